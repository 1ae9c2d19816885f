// MLA's attention against the machine's peak of multiply-adds, and against a naive loop.
//
// Prints lines for ratios.sh: medians over repetitions in which yardsticks and cases take turns.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/backend_registry.h"
#include "kernels/base/logging.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/kernel_table.h"
#include "tests/bench/machine.h"

namespace heddle {
namespace {

// DeepSeek-V2's and V3's widths.
constexpr int64_t kRank = 512, kNope = 128, kRope = 64, kValue = 128;
constexpr int kRepetitions = 9;

float Value(int64_t i) { return static_cast<float>((i * 37) % 101) / 101.0f - 0.5f; }

// Device memory of a case.
class Memory {
 public:
  explicit Memory(Backend& backend) : backend_(backend) {}

  template <typename T>
  T* Upload(const std::vector<T>& values) {
    buffers_.push_back(*backend_.Allocate(values.size() * sizeof(T)));
    std::copy(values.begin(), values.end(), buffers_.back().template as<T>());
    return buffers_.back().template as<T>();
  }
  float* Floats(int64_t count) {
    std::vector<float> values(count);
    for (int64_t i = 0; i < count; ++i) values[i] = Value(i);
    return Upload(values);
  }
  void* Stored(int64_t count, DType dtype) {
    if (dtype == DType::kFloat32) return Floats(count);
    std::vector<uint16_t> values(count);
    for (int64_t i = 0; i < count; ++i) values[i] = FloatToBFloat16(Value(i));
    return Upload(values);
  }

 private:
  Backend& backend_;
  std::vector<DeviceBuffer> buffers_;
};

struct Shape {
  int64_t heads;
  DType dtype;
  int64_t page_size;
  int64_t num_sequences;
  int64_t context;
  double asked;       // of the peak
  double over_naive;  // asked; 0: not compared

  std::string name() const {
    return absl::StrCat("mla_decode_", heads, "_heads_", DTypeName(dtype), "_page", page_size,
                        "_batch", num_sequences, "_context", context);
  }
};

// A decode step over the latents of one layer.
class DecodeCase {
 public:
  DecodeCase(Backend& backend, Stream& stream, const Shape& shape)
      : kernels_(backend.kernels()), stream_(stream), shape_(shape), memory_(backend) {
    const int64_t pages = (shape.context + shape.page_size - 1) / shape.page_size;
    std::vector<PageSpan> spans;
    std::vector<int32_t> page_starts{0}, query_starts{0}, positions;
    for (int64_t sequence = 0; sequence < shape.num_sequences; ++sequence) {
      for (int64_t page = 0; page < pages; ++page) {
        // Slots of the sequences are interleaved, as pages taken in decode steps are.
        const int64_t first = page * shape.page_size;
        spans.push_back({static_cast<int32_t>(page * shape.num_sequences + sequence),
                         static_cast<int32_t>(std::min(shape.page_size, shape.context - first)),
                         static_cast<int32_t>(first)});
      }
      page_starts.push_back(static_cast<int32_t>(spans.size()));
      positions.push_back(static_cast<int32_t>(shape.context - 1));
      query_starts.push_back(static_cast<int32_t>(positions.size()));
    }
    const int64_t slots = pages * shape.num_sequences;
    const int64_t tokens = shape.num_sequences;
    const float* q_latent = memory_.Floats(tokens * shape.heads * kRank);
    const float* q_rope = memory_.Floats(tokens * shape.heads * kRope);
    args_.q_latent = HeadMajor(q_latent, tokens, shape.heads, kRank);
    args_.q_rope = HeadMajor(q_rope, tokens, shape.heads, kRope);
    args_.kv = {.latent = {memory_.Stored(slots * shape.page_size * kRank, shape.dtype),
                           shape.dtype, shape.page_size * kRank, shape.page_size * kRank},
                .rope = {memory_.Stored(slots * shape.page_size * kRope, shape.dtype), shape.dtype,
                         shape.page_size * kRope, shape.page_size * kRope},
                .kv_lora_rank = kRank,
                .rope_dim = kRope,
                .page_size = shape.page_size,
                .page_starts = memory_.Upload(page_starts),
                .pages = memory_.Upload(spans)};
    args_.num_sequences = tokens;
    args_.query_starts = memory_.Upload(query_starts);
    args_.positions = memory_.Upload(positions);
    args_.scale = 0.07f;
    args_.out = HeadMajor(memory_.Floats(tokens * shape.heads * kRank), tokens, shape.heads, kRank);
  }

  void Run() {
    CHECK_OK(kernels_.mla_decode(args_, stream_));
    CHECK_OK(stream_.Synchronize());
  }
  double flops() const {
    return 2.0 * static_cast<double>(shape_.num_sequences * shape_.heads * shape_.context *
                                     (2 * kRank + kRope));
  }

 private:
  const KernelTable& kernels_;
  Stream& stream_;
  Shape shape_;
  Memory memory_;
  MlaDecodeArgs args_;
};

// What one writes first: each head by itself over dense float32 latents, with vector instructions
// where the compiler finds them.
__attribute__((target("avx2,fma"), optimize("O3", "fast-math"))) void NaiveHead(
    const float* q, const float* latents, int64_t context, float* scores, float* out) {
  float maximum = -INFINITY;
  for (int64_t t = 0; t < context; ++t) {
    float score = 0;
    for (int64_t i = 0; i < kRank + kRope; ++i) score += q[i] * latents[t * (kRank + kRope) + i];
    scores[t] = score * 0.07f;
    maximum = std::max(maximum, scores[t]);
  }
  float sum = 0;
  for (int64_t i = 0; i < kRank; ++i) out[i] = 0;
  for (int64_t t = 0; t < context; ++t) {
    const float weight = std::exp(scores[t] - maximum);
    sum += weight;
    for (int64_t i = 0; i < kRank; ++i) out[i] += weight * latents[t * (kRank + kRope) + i];
  }
  for (int64_t i = 0; i < kRank; ++i) out[i] /= sum;
}

class NaiveCase {
 public:
  NaiveCase(Stream& stream, const Shape& shape)
      : stream_(CpuStream::From(stream)),
        shape_(shape),
        latents_(shape.num_sequences * shape.context * (kRank + kRope), 0.25f),
        q_(shape.heads * (kRank + kRope), 0.5f),
        out_(shape.num_sequences * shape.heads * kRank),
        scores_(shape.num_sequences * shape.heads * shape.context) {}

  void Run() {
    const auto run_head = [&](int64_t task) {
      const int64_t sequence = task / shape_.heads, head = task % shape_.heads;
      NaiveHead(q_.data() + head * (kRank + kRope),
                latents_.data() + sequence * shape_.context * (kRank + kRope), shape_.context,
                scores_.data() + task * shape_.context, out_.data() + task * kRank);
    };
    stream_.Enqueue([&](CpuThreadPool& pool) {
      pool.ParallelFor(shape_.num_sequences * shape_.heads, run_head);
      return absl::OkStatus();
    });
    CHECK_OK(stream_.Synchronize());
  }

 private:
  CpuStream& stream_;
  Shape shape_;
  std::vector<float> latents_, q_, out_, scores_;
};

// The last `queries` tokens of one sequence over all of its keys, expanded, in one piece.
class PrefillCase {
 public:
  PrefillCase(Backend& backend, Stream& stream, int64_t heads, int64_t queries, int64_t keys)
      : kernels_(backend.kernels()), stream_(stream), memory_(backend) {
    std::vector<int32_t> positions;
    for (int64_t i = keys - queries; i < keys; ++i) positions.push_back(static_cast<int32_t>(i));
    const float* q = memory_.Floats(queries * heads * (kNope + kRope));
    const float* expanded = memory_.Floats(keys * heads * (kNope + kValue));
    const float* k_rope = memory_.Floats(keys * kRope);
    args_.q = TokenMajor(q, queries, heads, kNope + kRope);
    args_.expanded = TokenMajor(expanded, keys, heads, kNope + kValue);
    args_.k_rope = FloatMatrix(k_rope, keys, kRope);
    args_.num_sequences = 1;
    args_.segment_starts = memory_.Upload(std::vector<int32_t>{0, static_cast<int32_t>(keys)});
    args_.segment_first_positions = memory_.Upload(std::vector<int32_t>{0});
    args_.query_starts = memory_.Upload(std::vector<int32_t>{0, static_cast<int32_t>(queries)});
    args_.positions = memory_.Upload(positions);
    args_.scale = 0.07f;
    args_.maximum = memory_.Floats(queries * heads);
    args_.sum = memory_.Floats(queries * heads);
    args_.out = TokenMajor(memory_.Floats(queries * heads * kValue), queries, heads, kValue);
    const double visible = static_cast<double>(keys) - static_cast<double>(queries - 1) / 2;
    flops_ = 2.0 * static_cast<double>(heads * queries * (kNope + kRope + kValue)) * visible;
  }

  void Run() {
    CHECK_OK(kernels_.mla_prefill(args_, stream_));
    CHECK_OK(stream_.Synchronize());
  }
  double flops() const { return flops_; }

 private:
  const KernelTable& kernels_;
  Stream& stream_;
  Memory memory_;
  MlaPrefillArgs args_;
  double flops_ = 0;
};

// Queries of all heads into latent space: a product of few rows with each head's own weight.
class AbsorbCase {
 public:
  AbsorbCase(Backend& backend, Stream& stream, int64_t heads, int64_t tokens)
      : kernels_(backend.kernels()), stream_(stream), memory_(backend) {
    PackedWeight weight = {nullptr, DType::kBFloat16, kRank, kNope, 0};
    const int64_t bytes = *kernels_.packed_weight_bytes(weight);
    auto* packed = memory_.Upload(std::vector<std::byte>(heads * bytes));
    std::vector<uint16_t> rows(kRank * kNope);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = FloatToBFloat16(Value(i));
    const auto* data = reinterpret_cast<const std::byte*>(rows.data());
    for (int64_t head = 0; head < heads; ++head) {
      weight.data = packed + head * bytes;
      CHECK_OK(
          kernels_.pack_weight({data, weight.dtype, kNope * 2, kRank, kNope, 0}, weight, stream));
    }
    weight.data = packed;
    const float* x = memory_.Floats(tokens * heads * (kNope + kRope));
    args_.x = {x, tokens, heads, kNope, heads * (kNope + kRope), kNope + kRope};
    args_.weights = {weight, bytes, heads};
    args_.out = HeadMajor(memory_.Floats(tokens * heads * kRank), tokens, heads, kRank);
    flops_ = 2.0 * static_cast<double>(tokens * heads * kRank * kNope);
  }

  void Run() {
    CHECK_OK(kernels_.head_linear(args_, stream_));
    CHECK_OK(stream_.Synchronize());
  }
  double flops() const { return flops_; }

 private:
  const KernelTable& kernels_;
  Stream& stream_;
  Memory memory_;
  HeadLinearArgs args_;
  double flops_ = 0;
};

// Prints the share of the machine's peak that a case reaches.
template <typename Case>
void ShareOfPeak(Machine& machine, absl::string_view name, Case& a_case, double asked) {
  machine.Wake();
  const double share = Median(kRepetitions, [&] {
    const double floor = a_case.flops() / machine.FlopsPerSecond();
    return floor / SecondsPerCall([&] { a_case.Run(); });
  });
  PrintRatio(absl::StrCat(name, "_of_peak"), share, asked);
}

int Main() {
  const auto backend = *CreateBackend({.cpu = {.num_threads = BenchThreads()}});
  const std::unique_ptr<Stream> stream = *backend->CreateStream();
  Machine machine(*backend, *stream);
  const std::vector<Shape> shapes = {
      {16, DType::kFloat32, 64, 1, 4096, 0.55, 2.5}, {16, DType::kBFloat16, 64, 1, 4096, 0.55, 0},
      {16, DType::kBFloat16, 64, 1, 1024, 0.55, 0},  {16, DType::kFloat32, 16, 8, 2048, 0.55, 2.5},
      {16, DType::kBFloat16, 64, 64, 1024, 0.55, 0}, {128, DType::kFloat32, 64, 1, 1024, 0.75, 2.5},
      {128, DType::kBFloat16, 64, 1, 4096, 0.75, 0}, {128, DType::kBFloat16, 64, 8, 1024, 0.75, 0},
      {128, DType::kFloat32, 64, 64, 1024, 0.75, 0}, {8, DType::kBFloat16, 64, 8, 1024, 0, 0},
      {4, DType::kBFloat16, 64, 8, 1024, 0, 0},
  };
  for (const Shape& shape : shapes) {
    DecodeCase decode(*backend, *stream, shape);
    ShareOfPeak(machine, shape.name(), decode, shape.asked);
    if (shape.over_naive == 0) continue;
    NaiveCase naive(*stream, shape);
    const double speedup = Median(kRepetitions, [&] {
      const double seconds = SecondsPerCall([&] { decode.Run(); });
      return SecondsPerCall([&] { naive.Run(); }) / seconds;
    });
    PrintRatio(absl::StrCat(shape.name(), "_over_naive"), speedup, shape.over_naive);
  }
  PrefillCase prefill(*backend, *stream, 16, 512, 2048);
  ShareOfPeak(machine, "mla_prefill_16_heads_512_queries_2048_keys", prefill, 0.5);
  for (const int64_t tokens : {8, 64}) {
    AbsorbCase absorb(*backend, *stream, 128, tokens);
    ShareOfPeak(machine, absl::StrCat("mla_absorb_128_heads_batch", tokens), absorb, 0);
  }
  return 0;
}

}  // namespace
}  // namespace heddle

int main() { return heddle::Main(); }
