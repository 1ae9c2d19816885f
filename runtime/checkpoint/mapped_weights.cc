#include "runtime/checkpoint/mapped_weights.h"

#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "runtime/checkpoint/block_fp8.h"
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
int64_t ElementAlignment(DType dtype) {
  if (dtype == DType::kFloat8E4M3) return 1;
  return dtype == DType::kFloat32 ? 4 : 2;
}

struct TensorSpan {
  MappedTensor tensor;
  std::optional<MappedTensor> scales;  // of float8
};

class MappedWeights : public WeightSource {
 public:
  // `spans[i]` says where `infos[i]` lies.
  MappedWeights(std::vector<TensorInfo> infos, std::vector<TensorSpan> spans, BlockFp8Spec blocks)
      : index_(std::move(infos)), spans_(std::move(spans)), fp8_blocks_(blocks) {}

  const std::vector<TensorInfo>& tensors() const override { return index_.tensors(); }
  const TensorInfo* Find(absl::string_view name) const override { return index_.Find(name); }

  absl::StatusOr<TensorSlice> Read(absl::string_view name, Range rows, Range cols) override {
    ASSIGN_OR_RETURN(const TensorInfo* info, index_.FindMatrix(name, rows, cols));
    TensorSlice slice;
    slice.rows.dtype = info->dtype;
    slice.rows.n = rows.size();
    slice.rows.k = cols.size();
    const bool is_float8 = info->dtype == DType::kFloat8E4M3;
    if (is_float8) {
      slice.rows.scales.block_rows = fp8_blocks_.block_rows;
      slice.rows.scales.block_columns = fp8_blocks_.block_columns;
    }
    if (rows.empty() || cols.empty()) return slice;

    const int64_t block = is_float8 ? fp8_blocks_.block_columns : BlockElements(info->dtype);
    const BlockCover cover = CoverWithBlocks(cols, block, info->shape[1]);
    ASSIGN_OR_RETURN(const int64_t row_bytes, RowBytes(info->dtype, info->shape[1]));
    ASSIGN_OR_RETURN(const int64_t skipped_bytes, RowBytes(info->dtype, cover.stored.begin));
    ASSIGN_OR_RETURN(const int64_t slice_bytes, RowBytes(info->dtype, cover.stored.size()));
    const TensorSpan& span = spans_[index_.PositionOf(*info)];
    const MappedFile& file = *span.tensor.file;
    const int64_t first = span.tensor.stored.offset + rows.begin * row_bytes + skipped_bytes;
    file.WillNeed(first, (rows.size() - 1) * row_bytes + slice_bytes);

    auto storage = std::make_shared<SliceStorage>();
    storage->file = span.tensor.file;
    slice.keep_alive = storage;
    const char* data = file.contents().data() + first;
    slice.rows.k_offset = cover.start_offset;
    if (reinterpret_cast<uintptr_t>(data) % ElementAlignment(info->dtype) == 0) {
      slice.rows.data = reinterpret_cast<const std::byte*>(data);
      slice.rows.row_stride_bytes = row_bytes;
    } else {
      // A header of odd length leaves everything behind it misaligned.
      storage->copy.resize(rows.size() * slice_bytes);
      for (int64_t row = 0; row < rows.size(); ++row) {
        std::memcpy(storage->copy.data() + row * slice_bytes, data + row * row_bytes, slice_bytes);
      }
      slice.rows.data = storage->copy.data();
      slice.rows.row_stride_bytes = slice_bytes;
    }
    if (is_float8) {
      ASSIGN_OR_RETURN(slice.rows.scales,
                       ReadScales(*span.scales, fp8_blocks_, rows, cols, storage->scales));
      RETURN_IF_ERROR(CheckCodes(name, slice.rows, rows.begin, cols.begin));
    }
    return slice;
  }

  absl::StatusOr<std::vector<float>> ReadVector(absl::string_view name, Range range) override {
    ASSIGN_OR_RETURN(const TensorInfo* info, index_.FindVector(name, range));
    const MappedTensor& span = spans_[index_.PositionOf(*info)].tensor;
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
    const TensorSpan& span = spans_[index_.PositionOf(*info)];
    const auto release = [](const MappedTensor& tensor) {
      tensor.file->DontNeed(tensor.stored.offset, tensor.stored.bytes);
    };
    release(span.tensor);
    if (span.scales.has_value()) release(*span.scales);
  }

 private:
  // What a slice borrows from.
  struct SliceStorage {
    std::shared_ptr<const MappedFile> file;
    std::vector<std::byte> copy;
    std::vector<float> scales;
  };

  TensorIndex index_;
  std::vector<TensorSpan> spans_;
  BlockFp8Spec fp8_blocks_;
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
void CheckTensor(const ModelSpec& spec, const ExpectedTensor& expected, const StoredTensor& stored,
                 std::vector<std::string>& problems) {
  if (stored.shape != expected.shape) {
    problems.push_back(absl::StrCat("tensor ", expected.name, " is ", ShapeName(stored.shape),
                                    ", expected ", ShapeName(expected.shape)));
  }
  const bool matrix = expected.shape.size() == 2;
  const bool usable =
      stored.dtype && (IsFloatingPoint(*stored.dtype) || (matrix && IsQuantised(*stored.dtype)));
  if (matrix && stored.dtype == DType::kFloat8E4M3 && !spec.block_fp8) {
    problems.push_back(absl::StrCat("tensor ", expected.name, " is stored as ", stored.type_name,
                                    ", but no quantization_config tells its weight_block_size"));
  } else if (!usable) {
    problems.push_back(absl::StrCat("tensor ", expected.name, " is stored as ", stored.type_name,
                                    ", which is not supported for a ",
                                    matrix ? "matrix" : "vector"));
  }
}

bool NeedsScales(const ModelSpec& spec, const StoredTensor& stored) {
  return spec.block_fp8 && stored.dtype == DType::kFloat8E4M3 && stored.shape.size() == 2;
}

// Takes the scales of `matrix` out of `by_name`. Appends what is wrong with them.
std::optional<MappedTensor> TakeScales(const BlockFp8Spec& blocks, const StoredTensor& matrix,
                                       absl::flat_hash_map<std::string, MappedTensor>& by_name,
                                       std::vector<std::string>& problems) {
  const auto scales = by_name.extract(ScaleTensorName(matrix.name));
  if (scales.empty()) {
    problems.push_back(absl::StrCat("missing tensor ", ScaleTensorName(matrix.name), ": ",
                                    matrix.name, " is stored as ", matrix.type_name,
                                    " and means nothing without its scales"));
    return std::nullopt;
  }
  CheckScaleTensor(matrix, scales.mapped().stored, blocks, problems);
  return std::move(scales.mapped());
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
  std::vector<TensorSpan> spans;
  for (ExpectedTensor& expected : ExpectedTensors(spec)) {
    const auto it = by_name.find(expected.name);
    if (it == by_name.end()) {
      problems.push_back(Missing(expected));
      continue;
    }
    const StoredTensor& stored = it->second.stored;
    CheckTensor(spec, expected, stored, problems);
    infos.push_back({expected.name, stored.dtype.value_or(DType::kFloat32), expected.shape});
    TensorSpan& span = spans.emplace_back(TensorSpan{std::move(it->second), std::nullopt});
    by_name.erase(it);
    if (NeedsScales(spec, span.tensor.stored)) {
      span.scales = TakeScales(*spec.block_fp8, span.tensor.stored, by_name, problems);
    }
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
  return std::make_unique<MappedWeights>(std::move(infos), std::move(spans),
                                         spec.block_fp8.value_or(BlockFp8Spec()));
}

}  // namespace heddle
