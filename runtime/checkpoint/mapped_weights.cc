#include "runtime/checkpoint/mapped_weights.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "runtime/checkpoint/tensor_index.h"
#include "runtime/model/problem_list.h"

namespace heddle {
namespace {

float LoadFloat(DType dtype, const char* bytes) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return dtype == DType::kBFloat16 ? BFloat16ToFloat(bits) : Float16ToFloat(bits);
}

// What elements of a plain type, and scales inside a block, must be aligned to.
int64_t ElementAlignment(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

class MappedWeights : public WeightSource {
 public:
  // `spans[i]` says where `infos[i]` lies.
  MappedWeights(std::vector<TensorInfo> infos, std::vector<MappedTensor> spans)
      : index_(std::move(infos)), spans_(std::move(spans)) {}

  const std::vector<TensorInfo>& tensors() const override { return index_.tensors(); }
  const TensorInfo* Find(absl::string_view name) const override { return index_.Find(name); }

  absl::StatusOr<TensorSlice> Read(absl::string_view name, Range rows, Range cols) override {
    ASSIGN_OR_RETURN(const TensorInfo* info, index_.FindMatrix(name, rows, cols));
    TensorSlice slice;
    slice.rows.dtype = info->dtype;
    slice.rows.n = rows.size();
    slice.rows.k = cols.size();
    if (rows.empty() || cols.empty()) return slice;

    const int64_t block = BlockElements(info->dtype);
    const BlockCover cover = CoverWithBlocks(cols, block, info->shape[1]);
    ASSIGN_OR_RETURN(const int64_t row_bytes, RowBytes(info->dtype, info->shape[1]));
    ASSIGN_OR_RETURN(const int64_t slice_bytes, RowBytes(info->dtype, cover.stored.size()));
    const MappedTensor& span = spans_[index_.PositionOf(*info)];
    const int64_t first = span.stored.offset + rows.begin * row_bytes +
                          cover.stored.begin / block * BlockBytes(info->dtype);
    span.file->WillNeed(first, (rows.size() - 1) * row_bytes + slice_bytes);

    const char* data = span.file->contents().data() + first;
    slice.rows.k_offset = cover.start_offset;
    if (reinterpret_cast<uintptr_t>(data) % ElementAlignment(info->dtype) == 0) {
      slice.rows.data = reinterpret_cast<const std::byte*>(data);
      slice.rows.row_stride_bytes = row_bytes;
      slice.keep_alive = span.file;
      return slice;
    }
    // A header of odd length leaves everything behind it misaligned.
    auto copy = std::make_shared<std::vector<std::byte>>(rows.size() * slice_bytes);
    for (int64_t row = 0; row < rows.size(); ++row) {
      std::memcpy(copy->data() + row * slice_bytes, data + row * row_bytes, slice_bytes);
    }
    slice.rows.data = copy->data();
    slice.rows.row_stride_bytes = slice_bytes;
    slice.keep_alive = std::move(copy);
    return slice;
  }

  absl::StatusOr<std::vector<float>> ReadVector(absl::string_view name, Range range) override {
    ASSIGN_OR_RETURN(const TensorInfo* info, index_.FindVector(name, range));
    const MappedTensor& span = spans_[index_.PositionOf(*info)];
    const int64_t element_bytes = BlockBytes(info->dtype);
    const char* data = span.file->contents().data() + span.stored.offset;
    std::vector<float> values(range.size());
    for (int64_t i = 0; i < range.size(); ++i) {
      values[i] = LoadFloat(info->dtype, data + (range.begin + i) * element_bytes);
    }
    return values;
  }

  void Release(absl::string_view name) override {
    const TensorInfo* info = Find(name);
    if (info == nullptr) return;
    const MappedTensor& span = spans_[index_.PositionOf(*info)];
    span.file->DontNeed(span.stored.offset, span.stored.bytes);
  }

 private:
  TensorIndex index_;
  std::vector<MappedTensor> spans_;
};

std::string Missing(const ExpectedTensor& expected) {
  std::string text = absl::StrCat("missing tensor ", expected.name, " ", ShapeName(expected.shape));
  if (expected.name == "lm_head.weight") {
    absl::StrAppend(&text,
                    ": tie_word_embeddings is false, so the head needs a tensor of its own; set "
                    "it to true if the head is the embedding");
  }
  return text;
}

// Appends what is wrong with a tensor that has the right name.
void CheckTensor(const ExpectedTensor& expected, const StoredTensor& stored,
                 std::vector<std::string>& problems) {
  if (stored.shape != expected.shape) {
    problems.push_back(absl::StrCat("tensor ", expected.name, " is ", ShapeName(stored.shape),
                                    ", expected ", ShapeName(expected.shape)));
  }
  const bool matrix = expected.shape.size() == 2;
  const bool usable = stored.dtype && (IsFloatingPoint(*stored.dtype) ||
                                       (matrix && IsBlockQuantised(*stored.dtype)));
  if (!usable) {
    problems.push_back(absl::StrCat("tensor ", expected.name, " is stored as ", stored.type_name,
                                    ", which is not supported for a ",
                                    matrix ? "matrix" : "vector"));
  }
}

void LogIgnored(const std::vector<std::string>& names, absl::string_view where) {
  constexpr size_t kMaxNames = 8;
  if (names.empty()) return;
  const auto shown = absl::MakeConstSpan(names).subspan(0, kMaxNames);
  LOG(INFO) << where << ": ignored " << names.size()
            << " tensors that the model has no use for: " << absl::StrJoin(shown, ", ")
            << (names.size() > kMaxNames ? ", …" : "");
}

}  // namespace

// The tensors are moved from one by one, which the check does not see.
absl::StatusOr<std::unique_ptr<WeightSource>> MapWeights(const ModelSpec& spec,
                                                         // NOLINTNEXTLINE(performance-*)
                                                         std::vector<MappedTensor> tensors,
                                                         absl::string_view where) {
  std::vector<std::string> problems;
  absl::flat_hash_map<std::string, MappedTensor> by_name;
  for (MappedTensor& tensor : tensors) {
    const std::string name = tensor.stored.name;
    if (!by_name.emplace(name, std::move(tensor)).second) {
      problems.push_back(absl::StrCat("tensor ", name, " is given twice"));
    }
  }
  std::vector<TensorInfo> infos;
  std::vector<MappedTensor> spans;
  for (ExpectedTensor& expected : ExpectedTensors(spec)) {
    const auto it = by_name.find(expected.name);
    if (it == by_name.end()) {
      problems.push_back(Missing(expected));
      continue;
    }
    const StoredTensor& stored = it->second.stored;
    CheckTensor(expected, stored, problems);
    infos.push_back({expected.name, stored.dtype.value_or(DType::kFloat32), expected.shape});
    spans.push_back(std::move(it->second));
    by_name.erase(it);
  }

  std::vector<std::string> ignored;
  std::vector<std::string> unknown;
  for (const auto& [name, tensor] : by_name) {
    const bool harmless = tensor.stored.bytes == 0 || IsIgnorableTensor(spec, name);
    (harmless ? ignored : unknown).push_back(name);
  }
  absl::c_sort(ignored);
  absl::c_sort(unknown);
  for (const std::string& name : unknown) {
    problems.push_back(absl::StrCat("unknown tensor ", name, ": ", spec.model_type,
                                    " as configured has no use for it"));
  }
  RETURN_IF_ERROR(ProblemsToStatus(where, problems));
  LogIgnored(ignored, where);
  return std::make_unique<MappedWeights>(std::move(infos), std::move(spans));
}

}  // namespace heddle
