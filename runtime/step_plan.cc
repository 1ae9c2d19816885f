#include "runtime/step_plan.h"

#include <bit>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace heddle {
namespace {

constexpr uint8_t kVersion = 1;

static_assert(std::endian::native == std::endian::little, "numbers are copied as they lie");

template <typename T>
concept Number = std::is_arithmetic_v<T> || std::is_enum_v<T>;

class Writer {
 public:
  template <Number T>
  void operator()(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void operator()(const std::string& text) {
    (*this)(static_cast<uint32_t>(text.size()));
    bytes_.append(text);
  }
  template <typename T>
  void operator()(const std::optional<T>& value) {
    (*this)(value.has_value());
    if (value) (*this)(*value);
  }
  template <typename T>
  void operator()(const std::vector<T>& list);

  std::string Take() && { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// After the first error nothing more is read.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : bytes_(bytes) {}

  template <Number T>
  void operator()(T& value) {
    if (!Need(sizeof(T))) return;
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_.remove_prefix(sizeof(T));
  }
  void operator()(bool& value) {
    uint8_t byte = 0;
    (*this)(byte);
    if (byte > 1) Fail(absl::StrCat("a flag is ", byte));
    value = byte == 1;
  }
  void operator()(PageOp::Kind& kind) {
    uint8_t byte = 0;
    (*this)(byte);
    if (byte != static_cast<uint8_t>(PageOp::Kind::kCopy)) Fail(absl::StrCat("page op ", byte));
    kind = PageOp::Kind::kCopy;
  }
  void operator()(std::string& text) {
    const uint32_t size = Count();
    text.assign(bytes_.data(), size);
    bytes_.remove_prefix(size);
  }
  template <typename T>
  void operator()(std::optional<T>& value) {
    bool present = false;
    (*this)(present);
    value.reset();
    if (present) (*this)(value.emplace());
  }
  template <typename T>
  void operator()(std::vector<T>& list);

  absl::Status Finish() {
    if (!bytes_.empty()) Fail(absl::StrCat(bytes_.size(), " bytes too many"));
    return error_;
  }

 private:
  void Fail(absl::string_view what) {
    if (error_.ok()) error_ = absl::InvalidArgumentError(absl::StrCat("step plan: ", what));
    bytes_ = {};
  }
  bool Need(size_t size) {
    if (size <= bytes_.size()) return true;
    Fail(absl::StrCat("ends ", size - bytes_.size(), " bytes short"));
    return false;
  }
  // An element takes a byte at least.
  uint32_t Count() {
    uint32_t count = 0;
    (*this)(count);
    return Need(count) ? count : 0;
  }

  absl::string_view bytes_;
  absl::Status error_;
};

// The fields of each struct in their order on the wire, once for both directions.
template <typename T, typename U>
concept Is = std::is_same_v<std::remove_const_t<T>, U>;

template <typename Archive, Is<PageLocation> T>
void Fields(Archive& archive, T& location) {
  archive(location.stripe);
  archive(location.slot);
}

template <typename Archive, Is<SamplingParams> T>
void Fields(Archive& archive, T& params) {
  archive(params.max_tokens);
  archive(params.min_tokens);
  archive(params.temperature);
  archive(params.top_k);
  archive(params.top_p);
  archive(params.min_p);
  archive(params.repetition_penalty);
  archive(params.presence_penalty);
  archive(params.frequency_penalty);
  archive(params.seed);
  archive(params.n);
  archive(params.logprobs);
  archive(params.ignore_eos);
  archive(params.stop);
  archive(params.stop_token_ids);
  archive(params.skip_special_tokens);
  archive(params.prompt_logprobs);
  archive(params.prompt_logits);
}

template <typename Archive, Is<SlotAdmission> T>
void Fields(Archive& archive, T& admission) {
  archive(admission.batch_slot);
  Fields(archive, admission.params);
  archive(admission.seed);
  archive(admission.prompt_length);
  archive(admission.token_ids);
}

template <typename Archive, Is<PageTableDelta> T>
void Fields(Archive& archive, T& delta) {
  archive(delta.batch_slot);
  archive(delta.reset);
  archive(delta.num_dropped_front);
  archive(delta.appended);
}

template <typename Archive, Is<PageOp> T>
void Fields(Archive& archive, T& op) {
  archive(op.kind);
  Fields(archive, op.source);
  Fields(archive, op.target);
}

template <typename Archive, Is<PlanRow> T>
void Fields(Archive& archive, T& row) {
  archive(row.batch_slot);
  archive(row.query_length);
  archive(row.first_position);
  archive(row.sample);
}

template <typename Archive, Is<StepPlan> T>
void Fields(Archive& archive, T& plan) {
  archive(plan.epoch);
  archive(plan.shutdown);
  archive(plan.released_slots);
  archive(plan.admissions);
  archive(plan.page_deltas);
  archive(plan.page_ops);
  archive(plan.rows);
  archive(plan.has_digest);
  archive(plan.page_table_digest);
}

template <typename T>
void Writer::operator()(const std::vector<T>& list) {
  (*this)(static_cast<uint32_t>(list.size()));
  for (const T& element : list) {
    if constexpr (Number<T> || std::is_same_v<T, std::string>) {
      (*this)(element);
    } else {
      Fields(*this, element);
    }
  }
}

template <typename T>
void Reader::operator()(std::vector<T>& list) {
  const uint32_t count = Count();
  // Grows with what is really there: a count costs nothing before its elements have been read.
  for (uint32_t i = 0; i < count && error_.ok(); ++i) {
    T& element = list.emplace_back();
    if constexpr (Number<T> || std::is_same_v<T, std::string>) {
      (*this)(element);
    } else {
      Fields(*this, element);
    }
  }
}

}  // namespace

int64_t StepPlan::NumTokens() const {
  int64_t num_tokens = 0;
  for (const PlanRow& row : rows) num_tokens += row.query_length;
  return num_tokens;
}

absl::Status ApplyPageTableDelta(const PageTableDelta& delta, PageTable* table) {
  if (delta.num_dropped_front < 0 ||
      (!delta.reset && delta.num_dropped_front > static_cast<int64_t>(table->pages.size()))) {
    return absl::InvalidArgumentError(
        absl::StrCat("page table of batch slot ", delta.batch_slot, " has ", table->pages.size(),
                     " pages, of which ", delta.num_dropped_front, " are to be dropped"));
  }
  if (delta.reset) {
    *table = PageTable{.first_page = delta.num_dropped_front, .pages = {}};
  } else {
    table->pages.erase(table->pages.begin(), table->pages.begin() + delta.num_dropped_front);
    table->first_page += delta.num_dropped_front;
  }
  table->pages.insert(table->pages.end(), delta.appended.begin(), delta.appended.end());
  return absl::OkStatus();
}

std::string SerializeStepPlan(const StepPlan& plan) {
  Writer writer;
  writer(kVersion);
  Fields(writer, plan);
  return std::move(writer).Take();
}

absl::StatusOr<StepPlan> ParseStepPlan(absl::string_view bytes) {
  if (bytes.empty()) return absl::InvalidArgumentError("step plan: has no bytes");
  if (const uint8_t version = bytes[0]; version != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat("step plan: version ", version, " where ",
                                                   kVersion,
                                                   " is due; all ranks must run the same build"));
  }
  Reader reader(bytes.substr(1));
  StepPlan plan;
  Fields(reader, plan);
  if (absl::Status status = reader.Finish(); !status.ok()) return status;
  return plan;
}

}  // namespace heddle
