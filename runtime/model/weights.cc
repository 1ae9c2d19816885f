#include "runtime/model/weights.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/kernel_table.h"
#include "runtime/model/tensor_names.h"

namespace heddle {
namespace {

// Fills one ModelWeights, a tensor at a time.
class Loader {
 public:
  Loader(const ModelSpec& spec, WeightSource& source, const WeightLoadOptions& options,
         Backend& backend, Stream& stream, ModelWeights& weights)
      : spec_(spec),
        source_(source),
        options_(options),
        backend_(backend),
        stream_(stream),
        weights_(weights) {}

  absl::Status LoadEmbedding(Range vocabulary) {
    return Matrix(std::string(kEmbeddingTensor), vocabulary, Hidden(), weights_.embedding);
  }

  absl::Status LoadHead(Range vocabulary) {
    RETURN_IF_ERROR(Vector(std::string(kFinalNormTensor), Hidden(), weights_.final_norm));
    if (spec_.tie_word_embeddings) {
      weights_.head = weights_.embedding;
      return absl::OkStatus();
    }
    return Matrix(std::string(kHeadTensor), vocabulary, Hidden(), weights_.head);
  }

  // `adds_biases`: whether this rank adds the biases of partial sums.
  absl::Status LoadLayer(int64_t index, const RankLayout& layout, bool adds_biases) {
    const auto name = [index](absl::string_view suffix) { return LayerTensor(index, suffix); };
    const Range query_rows = layout.heads.query_heads.ScaledBy(spec_.head_dim);
    const Range kv_rows = layout.heads.kv_heads.ScaledBy(spec_.head_dim);
    const Range columns = layout.ffn_columns[index];
    const Range hidden = Hidden();
    const Range head = {0, spec_.head_dim};
    LayerWeights& layer = weights_.layers.emplace_back();

    RETURN_IF_ERROR(Vector(name("input_layernorm.weight"), hidden, layer.attention_norm));
    RETURN_IF_ERROR(Matrix(name("self_attn.q_proj.weight"), query_rows, hidden, layer.q.weight));
    RETURN_IF_ERROR(Matrix(name("self_attn.k_proj.weight"), kv_rows, hidden, layer.k.weight));
    RETURN_IF_ERROR(Matrix(name("self_attn.v_proj.weight"), kv_rows, hidden, layer.v.weight));
    if (spec_.qkv_bias) {
      RETURN_IF_ERROR(Vector(name("self_attn.q_proj.bias"), query_rows, layer.q.bias));
      RETURN_IF_ERROR(Vector(name("self_attn.k_proj.bias"), kv_rows, layer.k.bias));
      RETURN_IF_ERROR(Vector(name("self_attn.v_proj.bias"), kv_rows, layer.v.bias));
    }
    if (spec_.qk_norm) {
      RETURN_IF_ERROR(Vector(name("self_attn.q_norm.weight"), head, layer.q_norm));
      RETURN_IF_ERROR(Vector(name("self_attn.k_norm.weight"), head, layer.k_norm));
    }
    RETURN_IF_ERROR(Matrix(name("self_attn.o_proj.weight"), hidden, query_rows, layer.o.weight));
    if (spec_.output_bias && adds_biases) {
      RETURN_IF_ERROR(Vector(name("self_attn.o_proj.bias"), hidden, layer.o.bias));
    }

    RETURN_IF_ERROR(Vector(name("post_attention_layernorm.weight"), hidden, layer.ffn_norm));
    RETURN_IF_ERROR(Matrix(name("mlp.gate_proj.weight"), columns, hidden, layer.ffn.gate.weight));
    RETURN_IF_ERROR(Matrix(name("mlp.up_proj.weight"), columns, hidden, layer.ffn.up.weight));
    RETURN_IF_ERROR(Matrix(name("mlp.down_proj.weight"), hidden, columns, layer.ffn.down.weight));
    if (spec_.mlp_bias) {
      RETURN_IF_ERROR(Vector(name("mlp.gate_proj.bias"), columns, layer.ffn.gate.bias));
      RETURN_IF_ERROR(Vector(name("mlp.up_proj.bias"), columns, layer.ffn.up.bias));
      if (adds_biases)
        RETURN_IF_ERROR(Vector(name("mlp.down_proj.bias"), hidden, layer.ffn.down.bias));
    }
    return absl::OkStatus();
  }

 private:
  Range Hidden() const { return {0, spec_.hidden_size}; }

  absl::StatusOr<void*> Allocate(int64_t bytes) {
    ASSIGN_OR_RETURN(DeviceBuffer buffer, backend_.Allocate(static_cast<size_t>(bytes)));
    weights_.buffers.push_back(std::move(buffer));
    return weights_.buffers.back().data();
  }

  absl::Status Matrix(const std::string& name, Range rows, Range cols, PackedWeight& packed) {
    return Finish(name, ReadMatrix(name, rows, cols, packed));
  }
  absl::Status Vector(const std::string& name, Range range, const float*& values) {
    return Finish(name, ReadVector(name, range, values));
  }

  absl::Status Finish(const std::string& name, const absl::Status& status) {
    RETURN_IF_ERROR(Annotate(status, name));
    source_.Release(name);
    if (options_.on_progress) options_.on_progress(name);
    return absl::OkStatus();
  }

  absl::Status ReadMatrix(const std::string& name, Range rows, Range cols, PackedWeight& packed) {
    ASSIGN_OR_RETURN(const TensorSlice slice, source_.Read(name, rows, cols));
    packed = {.data = nullptr,
              .dtype = StoredDType(slice.rows.dtype, options_.dtype),
              .n = rows.size(),
              .k = cols.size(),
              .k_offset = slice.rows.k_offset};
    if (packed.n == 0 || packed.k == 0) return absl::OkStatus();
    const KernelTable& kernels = backend_.kernels();
    ASSIGN_OR_RETURN(const int64_t bytes, kernels.packed_weight_bytes(packed.dtype, packed.n,
                                                                      packed.k, packed.k_offset));
    ASSIGN_OR_RETURN(packed.data, Allocate(bytes));
    RETURN_IF_ERROR(kernels.pack_weight(slice.rows, packed, stream_));
    return stream_.Synchronize();  // the slice goes when this returns
  }

  absl::Status ReadVector(const std::string& name, Range range, const float*& values) {
    ASSIGN_OR_RETURN(const std::vector<float> host, source_.ReadVector(name, range));
    const int64_t bytes = range.size() * static_cast<int64_t>(sizeof(float));
    ASSIGN_OR_RETURN(void* const device, Allocate(bytes));
    values = static_cast<const float*>(device);
    RETURN_IF_ERROR(backend_.CopyAsync(device, host.data(), static_cast<size_t>(bytes), stream_));
    return stream_.Synchronize();
  }

  const ModelSpec& spec_;
  WeightSource& source_;
  const WeightLoadOptions& options_;
  Backend& backend_;
  Stream& stream_;
  ModelWeights& weights_;
};

// Says once that weights lose precision; what overflows is refused when packed.
void WarnOfNarrowing(const WeightSource& source, std::optional<DType> requested) {
  if (!requested.has_value()) return;
  for (const TensorInfo& tensor : source.tensors()) {
    const bool narrows = tensor.dtype != *requested && *requested != DType::kFloat32 &&
                         tensor.shape.size() > 1 && !IsBlockQuantised(tensor.dtype);
    if (!narrows) continue;
    LOG(WARNING) << tensor.name << " and others are " << DTypeName(tensor.dtype)
                 << " in the checkpoint and are kept as " << DTypeName(*requested);
    return;
  }
}

}  // namespace

int64_t ModelWeights::bytes() const {
  int64_t total = 0;
  for (const DeviceBuffer& buffer : buffers) total += static_cast<int64_t>(buffer.bytes());
  return total;
}

absl::StatusOr<ModelWeights> LoadWeights(const ModelSpec& spec, const ShardLayout& layout, int rank,
                                         WeightSource& source, const WeightLoadOptions& options,
                                         Backend& backend, Stream& stream) {
  if (rank == 0) WarnOfNarrowing(source, options.dtype);
  const RankLayout& held = layout.ranks[rank];
  ModelWeights weights;
  Loader loader(spec, source, options, backend, stream, weights);
  RETURN_IF_ERROR(loader.LoadEmbedding(held.vocabulary));
  for (int64_t layer = 0; layer < spec.num_layers; ++layer) {
    RETURN_IF_ERROR(loader.LoadLayer(layer, held, /*adds_biases=*/rank == 0));
  }
  RETURN_IF_ERROR(loader.LoadHead(held.vocabulary));
  return weights;
}

}  // namespace heddle
