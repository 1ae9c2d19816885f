// Paged attention against what the machine can read and multiply, and against a naive loop.
//
// Prints lines for ratios.sh: medians over repetitions in which yardsticks and cases take turns.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/backend_registry.h"
#include "kernels/base/logging.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/kernel_table.h"
#include "tests/bench/machine.h"

namespace heddle {
namespace {

struct Shape {
  std::string name;
  int64_t query_heads, kv_heads, head_dim;
  DType dtype;
  int64_t page_size;
  int64_t num_sequences;
  int64_t context;       // tokens stored for each sequence
  int64_t query_tokens;  // of each sequence, the last of the context
};

// Layers of a cache that together are far larger than the last-level cache, called in turn, so
// that decode finds each layer cold as it would in a model. They share two buffers: the planes of a
// pool for many sequences are so large that the backend gets huge pages for them.
class PagedCase {
 public:
  PagedCase(Backend& backend, const Shape& shape)
      : shape_(shape), backend_(backend), stream_(*backend.CreateStream()) {
    const int64_t pages = (shape.context + shape.page_size - 1) / shape.page_size;
    const int64_t head_stride = shape.head_dim * shape.page_size;
    const int64_t slot_stride = shape.kv_heads * head_stride;
    const int64_t plane_bytes = shape.num_sequences * pages * slot_stride * BlockBytes(shape.dtype);
    constexpr int64_t kColdBytes = 192 << 20;
    const int64_t num_layers =
        shape.query_tokens > 1 ? 1 : std::max<int64_t>(1, kColdBytes / (2 * plane_bytes));
    const KvPlane k = NewPlane(num_layers * plane_bytes, slot_stride, head_stride);
    const KvPlane v = NewPlane(num_layers * plane_bytes, slot_stride, head_stride);
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      layers_.push_back({k, v});
      layers_.back().k.data = static_cast<std::byte*>(k.data) + layer * plane_bytes;
      layers_.back().v.data = static_cast<std::byte*>(v.data) + layer * plane_bytes;
    }
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
      for (int64_t i = shape.context - shape.query_tokens; i < shape.context; ++i) {
        positions.push_back(static_cast<int32_t>(i));
      }
      query_starts.push_back(static_cast<int32_t>(positions.size()));
    }
    const auto tokens = static_cast<int64_t>(positions.size());
    const int64_t width = shape.query_heads * shape.head_dim;
    float* q = Upload(std::vector<float>(tokens * width));
    for (int64_t i = 0; i < tokens * width; ++i) q[i] = Value(i);
    args_.q = FloatMatrix(static_cast<const float*>(q), tokens, width);
    args_.kv.num_kv_heads = shape.kv_heads;
    args_.kv.head_dim = shape.head_dim;
    args_.kv.page_size = shape.page_size;
    args_.kv.page_starts = Upload(page_starts);
    args_.kv.pages = Upload(spans);
    args_.num_query_heads = shape.query_heads;
    args_.num_sequences = shape.num_sequences;
    args_.query_starts = Upload(query_starts);
    args_.positions = Upload(positions);
    args_.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    args_.out = FloatMatrix(Upload(std::vector<float>(tokens * width)), tokens, width);
  }

  void Run() {
    const Layer& layer = layers_[next_layer_++ % layers_.size()];
    args_.kv.k = layer.k;
    args_.kv.v = layer.v;
    CHECK_OK(backend_.kernels().gqa_attention(args_, *stream_));
    CHECK_OK(stream_->Synchronize());
  }

  const Shape& shape() const { return shape_; }
  double bytes() const {
    return 2.0 * static_cast<double>(shape_.num_sequences * shape_.context * shape_.kv_heads *
                                     shape_.head_dim * BlockBytes(shape_.dtype));
  }
  double flops() const {
    const auto queries = static_cast<double>(shape_.query_tokens);
    const double keys = static_cast<double>(shape_.context) - (queries - 1) / 2;
    return 4.0 * static_cast<double>(shape_.num_sequences * shape_.query_heads * shape_.head_dim) *
           queries * keys;
  }

 private:
  struct Layer {
    KvPlane k, v;
  };

  static float Value(int64_t i) { return static_cast<float>((i * 37) % 101) / 101.0f - 0.5f; }

  template <typename T>
  T* Upload(const std::vector<T>& values) {
    buffers_.push_back(*backend_.Allocate(values.size() * sizeof(T)));
    std::copy(values.begin(), values.end(), buffers_.back().template as<T>());
    return buffers_.back().template as<T>();
  }

  KvPlane NewPlane(int64_t bytes, int64_t slot_stride, int64_t head_stride) {
    buffers_.push_back(*backend_.Allocate(bytes));
    void* data = buffers_.back().data();
    for (int64_t i = 0; i < bytes / BlockBytes(shape_.dtype); ++i) {
      if (shape_.dtype == DType::kFloat32) {
        static_cast<float*>(data)[i] = Value(i);
      } else {
        static_cast<uint16_t*>(data)[i] =
            shape_.dtype == DType::kBFloat16 ? FloatToBFloat16(Value(i)) : FloatToFloat16(Value(i));
      }
    }
    return {data, shape_.dtype, slot_stride, head_stride};
  }

  Shape shape_;
  Backend& backend_;
  std::unique_ptr<Stream> stream_;
  std::vector<DeviceBuffer> buffers_;
  std::vector<Layer> layers_;
  size_t next_layer_ = 0;
  GqaAttentionArgs args_;
};

// What one writes first: each query head by itself over token-major float32 keys and values, with
// vector instructions where the compiler finds them.
__attribute__((target("avx2,fma"), optimize("O3", "fast-math"))) void NaiveHead(
    const float* q, const float* k, const float* v, int64_t context, int64_t head_dim,
    int64_t token_stride, float* scores, float* out) {
  float maximum = -INFINITY;
  for (int64_t t = 0; t < context; ++t) {
    float score = 0;
    for (int64_t i = 0; i < head_dim; ++i) score += q[i] * k[t * token_stride + i];
    scores[t] = score * 0.125f;
    maximum = std::max(maximum, scores[t]);
  }
  float sum = 0;
  for (int64_t i = 0; i < head_dim; ++i) out[i] = 0;
  for (int64_t t = 0; t < context; ++t) {
    const float weight = std::exp(scores[t] - maximum);
    sum += weight;
    for (int64_t i = 0; i < head_dim; ++i) out[i] += weight * v[t * token_stride + i];
  }
  for (int64_t i = 0; i < head_dim; ++i) out[i] /= sum;
}

// The naive loop on the shape of a decode case, layers cold in turn as there.
class NaiveCase {
 public:
  NaiveCase(Stream& stream, const Shape& shape)
      : stream_(CpuStream::From(stream)),
        shape_(shape),
        layer_floats_(shape.num_sequences * shape.context * shape.kv_heads * shape.head_dim),
        num_layers_(std::max<int64_t>(1, (48 << 20) / (2 * layer_floats_))),
        kv_(2 * num_layers_ * layer_floats_, 0.25f),
        q_(shape.query_heads * shape.head_dim, 0.5f),
        out_(shape.num_sequences * shape.query_heads * shape.head_dim),
        scores_(shape.num_sequences * shape.query_heads * shape.context) {}

  void Run() {
    const float* k = kv_.data() + (next_layer_++ % num_layers_) * 2 * layer_floats_;
    const float* v = k + layer_floats_;
    const int64_t group = shape_.query_heads / shape_.kv_heads;
    const int64_t stride = shape_.kv_heads * shape_.head_dim;
    const auto run_head = [&](int64_t task) {
      const int64_t head = task % shape_.query_heads;
      const int64_t offset =
          task / shape_.query_heads * shape_.context * stride + head / group * shape_.head_dim;
      NaiveHead(q_.data() + head * shape_.head_dim, k + offset, v + offset, shape_.context,
                shape_.head_dim, stride, scores_.data() + task * shape_.context,
                out_.data() + task * shape_.head_dim);
    };
    stream_.Enqueue([&](CpuThreadPool& pool) {
      pool.ParallelFor(shape_.num_sequences * shape_.query_heads, run_head);
      return absl::OkStatus();
    });
    CHECK_OK(stream_.Synchronize());
  }

 private:
  CpuStream& stream_;
  Shape shape_;
  int64_t layer_floats_;
  int64_t num_layers_;
  int64_t next_layer_ = 0;
  std::vector<float> kv_, q_, out_, scores_;
};

int Main() {
  const auto backend = *CreateBackend({.cpu = {.num_threads = BenchThreads()}});
  const std::unique_ptr<Stream> stream = *backend->CreateStream();
  Machine machine(*backend, *stream);
  const std::vector<Shape> shapes = {
      {"decode_f32_page64", 9, 3, 64, DType::kFloat32, 64, 1, 4096, 1},
      {"decode_f32_page16", 9, 3, 64, DType::kFloat32, 16, 1, 4096, 1},
      {"decode_bf16_page64", 9, 3, 64, DType::kBFloat16, 64, 1, 4096, 1},
      {"decode_bf16_page16", 9, 3, 64, DType::kBFloat16, 16, 1, 4096, 1},
      {"decode_f16_page64", 9, 3, 64, DType::kFloat16, 64, 1, 4096, 1},
      {"decode_f32_8b_page64", 32, 8, 128, DType::kFloat32, 64, 1, 2048, 1},
      {"decode_bf16_8b_page64", 32, 8, 128, DType::kBFloat16, 64, 1, 2048, 1},
      {"decode_f32_mha_page64", 9, 9, 64, DType::kFloat32, 64, 1, 2048, 1},
      {"decode_f32_batch16_page16", 9, 3, 64, DType::kFloat32, 16, 16, 512, 1},
      {"decode_f32_short_page64", 9, 3, 64, DType::kFloat32, 64, 1, 512, 1},
      {"prefill512_f32_page16", 9, 3, 64, DType::kFloat32, 16, 1, 512, 512},
      {"prefill512_f32_page64", 9, 3, 64, DType::kFloat32, 64, 1, 512, 512},
      {"prefill2048_f32_page64", 9, 3, 64, DType::kFloat32, 64, 1, 2048, 2048},
      {"prefill512_bf16_8b_page64", 32, 8, 128, DType::kBFloat16, 64, 1, 512, 512},
      {"prefill512_f32_mha_page64", 9, 9, 64, DType::kFloat32, 64, 1, 512, 512},
  };
  constexpr int kRepetitions = 9;
  for (const Shape& shape : shapes) {
    PagedCase paged(*backend, shape);
    const bool decode = shape.query_tokens == 1;
    const bool asked = decode && shape.page_size == 64 && shape.context >= 2048;
    machine.Wake();
    const double share = Median(kRepetitions, [&] {
      const double floor = decode ? paged.bytes() / machine.ReadBytesPerSecond()
                                  : paged.flops() / machine.FlopsPerSecond();
      return floor / SecondsPerCall([&] { paged.Run(); });
    });
    PrintRatio(absl::StrCat("attention_", shape.name, decode ? "_of_bandwidth" : "_of_peak"), share,
               asked ? 0.55 : 0.0);
    if (!decode || shape.dtype != DType::kFloat32) continue;
    NaiveCase naive(*stream, shape);
    const double speedup = Median(kRepetitions, [&] {
      const double seconds = SecondsPerCall([&] { paged.Run(); });
      return SecondsPerCall([&] { naive.Run(); }) / seconds;
    });
    PrintRatio(absl::StrCat("attention_", shape.name, "_over_naive"), speedup, asked ? 2.5 : 0.0);
  }
  return 0;
}

}  // namespace
}  // namespace heddle

int main() { return heddle::Main(); }
