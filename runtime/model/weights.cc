#include "runtime/model/weights.h"

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/gemm/dequantise.h"
#include "kernels/kernel_table.h"
#include "runtime/model/tensor_names.h"

namespace heddle {
namespace {

constexpr int64_t kAlignment = 128;
constexpr int64_t kSharedBufferBytes = int64_t{16} << 20;

// The transpose of whole rows: in their own type, or float32 if that is quantised.
class TransposedRows {
 public:
  static absl::StatusOr<TransposedRows> Create(const WeightRows& rows) {
    TransposedRows transposed;
    if (!IsQuantised(rows.dtype)) {
      transposed.Fill(rows);
      return transposed;
    }
    std::vector<float> wide(rows.n * rows.k);
    for (int64_t row = 0; row < rows.n; ++row) {
      RETURN_IF_ERROR(DequantiseRow(rows, row, wide.data() + row * rows.k));
    }
    transposed.Fill({.data = reinterpret_cast<const std::byte*>(wide.data()),
                     .dtype = DType::kFloat32,
                     .row_stride_bytes = rows.k * static_cast<int64_t>(sizeof(float)),
                     .n = rows.n,
                     .k = rows.k});
    return transposed;
  }

  WeightRows rows() const {
    return {.data = bytes_.data(),
            .dtype = dtype_,
            .row_stride_bytes = k_ * BlockBytes(dtype_),
            .n = n_,
            .k = k_};
  }

 private:
  void Fill(const WeightRows& rows) {
    dtype_ = rows.dtype;
    n_ = rows.k;
    k_ = rows.n;
    const int64_t size = BlockBytes(dtype_);
    bytes_.resize(n_ * k_ * size);
    for (int64_t row = 0; row < rows.n; ++row) {
      const std::byte* from = rows.data + row * rows.row_stride_bytes;
      for (int64_t col = 0; col < rows.k; ++col) {
        std::memcpy(bytes_.data() + (col * k_ + row) * size, from + col * size, size);
      }
    }
  }

  DType dtype_ = DType::kFloat32;
  int64_t n_ = 0;
  int64_t k_ = 0;
  std::vector<std::byte> bytes_;
};

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

  // Whether this rank adds the biases of what attention and the FFN project back to hidden states.
  struct AddsBiases {
    bool attention, ffn;
  };
  absl::Status LoadLayer(int64_t index, const RankLayout& layout, AddsBiases adds_biases) {
    index_ = index;
    adds_biases_ = adds_biases.attention;
    LayerWeights& layer = weights_.layers.emplace_back();
    RETURN_IF_ERROR(Vector(Name("input_layernorm.weight"), Hidden(), layer.attention_norm));
    if (spec_.mla.has_value()) {
      RETURN_IF_ERROR(
          LoadMla(*spec_.mla, layout.heads.query_heads, layer.attention.emplace<MlaWeights>()));
    } else {
      RETURN_IF_ERROR(LoadGqa(layout.heads, layer.attention.emplace<GqaWeights>()));
    }
    RETURN_IF_ERROR(Vector(Name("post_attention_layernorm.weight"), Hidden(), layer.ffn_norm));
    const FfnShare& share = layout.ffn[index];
    adds_biases_ = adds_biases.ffn;
    if (HasExperts(spec_, index)) {
      return LoadMoe(*spec_.moe, share, layer.ffn.emplace<MoeWeights>());
    }
    return LoadDenseFfn(share.columns, layer.ffn.emplace<DenseFfnWeights>());
  }

 private:
  absl::Status LoadGqa(const KvGridRank& heads, GqaWeights& weights) {
    const Range query_rows = heads.query_heads.ScaledBy(spec_.head_dim);
    const Range kv_rows = heads.kv_heads.ScaledBy(spec_.head_dim);
    const Range head = {0, spec_.head_dim};
    RETURN_IF_ERROR(Rows("self_attn.q_proj", query_rows, spec_.qkv_bias, weights.q));
    RETURN_IF_ERROR(Rows("self_attn.k_proj", kv_rows, spec_.qkv_bias, weights.k));
    RETURN_IF_ERROR(Rows("self_attn.v_proj", kv_rows, spec_.qkv_bias, weights.v));
    if (spec_.qk_norm) {
      RETURN_IF_ERROR(Vector(Name("self_attn.q_norm.weight"), head, weights.q_norm));
      RETURN_IF_ERROR(Vector(Name("self_attn.k_norm.weight"), head, weights.k_norm));
    }
    return Columns("self_attn.o_proj", query_rows, spec_.output_bias, weights.o);
  }

  absl::Status LoadMla(const MlaSpec& mla, Range heads, MlaWeights& weights) {
    const Range query_rows = heads.ScaledBy(spec_.head_dim);
    if (mla.q_lora_rank == 0) {
      RETURN_IF_ERROR(Rows("self_attn.q_proj", query_rows, /*has_bias=*/false, weights.q_b));
    } else {
      const Range latent = {0, mla.q_lora_rank};
      RETURN_IF_ERROR(Rows("self_attn.q_a_proj", latent, spec_.qkv_bias, weights.q_a));
      RETURN_IF_ERROR(Vector(Name("self_attn.q_a_layernorm.weight"), latent, weights.q_a_norm));
      RETURN_IF_ERROR(
          Matrix(Name("self_attn.q_b_proj.weight"), query_rows, latent, weights.q_b.weight));
    }
    const Range latent = {0, mla.kv_lora_rank};
    RETURN_IF_ERROR(Rows("self_attn.kv_a_proj_with_mqa",
                         {0, mla.kv_lora_rank + mla.qk_rope_head_dim}, spec_.qkv_bias,
                         weights.kv_a));
    RETURN_IF_ERROR(Vector(Name("self_attn.kv_a_layernorm.weight"), latent, weights.kv_a_norm));
    const std::string kv_b = Name("self_attn.kv_b_proj.weight");
    RETURN_IF_ERROR(Finish(kv_b, ReadKvB(kv_b, mla, heads, weights)));
    return Columns("self_attn.o_proj", heads.ScaledBy(mla.v_head_dim), spec_.output_bias,
                   weights.o);
  }

  // A head's rows of kv_b are W_UK [qk_nope_head_dim, kv_lora_rank], then W_UV.
  absl::Status ReadKvB(const std::string& name, const MlaSpec& mla, Range heads,
                       MlaWeights& weights) {
    const int64_t head_rows = mla.qk_nope_head_dim + mla.v_head_dim;
    const Range latent = {0, mla.kv_lora_rank};
    RETURN_IF_ERROR(
        ReadMatrix(name, heads.ScaledBy(head_rows), latent, options_.dtype, weights.kv_b));
    weights.absorbed_k.first = {.n = mla.kv_lora_rank, .k = mla.qk_nope_head_dim};
    weights.absorbed_v.first = {.n = mla.v_head_dim, .k = mla.kv_lora_rank};
    const auto read_rows = [&](int64_t head, int64_t begin, int64_t end) {
      const int64_t first = (heads.begin + head) * head_rows;
      return source_.Read(name, {first + begin, first + end}, latent);
    };
    for (int64_t i = 0; i < heads.size(); ++i) {
      ASSIGN_OR_RETURN(const TensorSlice slice, read_rows(i, 0, mla.qk_nope_head_dim));
      ASSIGN_OR_RETURN(const TransposedRows transposed, TransposedRows::Create(slice.rows));
      // What was widened stays so: it is never rounded twice.
      const std::optional<DType> dtype =
          IsQuantised(slice.rows.dtype) ? std::nullopt : options_.dtype;
      RETURN_IF_ERROR(PackInStack(transposed.rows(), dtype, i, heads.size(), weights.absorbed_k));
    }
    for (int64_t i = 0; i < heads.size(); ++i) {
      ASSIGN_OR_RETURN(const TensorSlice slice, read_rows(i, mla.qk_nope_head_dim, head_rows));
      RETURN_IF_ERROR(PackInStack(slice.rows, options_.dtype, i, heads.size(), weights.absorbed_v));
    }
    return absl::OkStatus();
  }

  absl::Status LoadDenseFfn(Range columns, DenseFfnWeights& weights) {
    RETURN_IF_ERROR(Rows("mlp.gate_proj", columns, spec_.mlp_bias, weights.gate));
    RETURN_IF_ERROR(Rows("mlp.up_proj", columns, spec_.mlp_bias, weights.up));
    return Columns("mlp.down_proj", columns, spec_.mlp_bias, weights.down);
  }

  absl::Status LoadMoe(const MoeSpec& moe, const FfnShare& share, MoeWeights& weights) {
    const Range all = {0, moe.num_experts};
    // Never narrowed: a token would change its experts.
    const std::string router = RouterTensor(spec_, index_);
    RETURN_IF_ERROR(
        Finish(router, ReadMatrix(router, all, Hidden(), /*dtype=*/std::nullopt, weights.router)));
    if (moe.correction_bias) {
      RETURN_IF_ERROR(Vector(CorrectionBiasTensor(spec_, index_), all, weights.correction_bias));
    }
    weights.experts = share.experts;
    RETURN_IF_ERROR(Experts(FfnMatrix::kGate, share, weights.gate));
    RETURN_IF_ERROR(Experts(FfnMatrix::kUp, share, weights.up));
    RETURN_IF_ERROR(Experts(FfnMatrix::kDown, share, weights.down));
    if (moe.shared_intermediate_size == 0) return absl::OkStatus();
    const Range columns = share.shared_columns;
    RETURN_IF_ERROR(Matrix(SharedExpertsTensor(index_, FfnMatrix::kGate), columns, Hidden(),
                           weights.shared.gate.weight));
    RETURN_IF_ERROR(Matrix(SharedExpertsTensor(index_, FfnMatrix::kUp), columns, Hidden(),
                           weights.shared.up.weight));
    return Matrix(SharedExpertsTensor(index_, FfnMatrix::kDown), Hidden(), columns,
                  weights.shared.down.weight);
  }

  absl::Status Experts(FfnMatrix matrix, const FfnShare& share, PackedWeightStack& stack) {
    const bool is_down = matrix == FfnMatrix::kDown;
    const Range rows = is_down ? Hidden() : share.columns;
    const Range cols = is_down ? share.columns : Hidden();
    stack.first = {.n = rows.size(), .k = cols.size()};
    for (int64_t i = 0; i < share.experts.size(); ++i) {
      const std::string name = ExpertTensor(spec_, index_, share.experts.begin + i, matrix);
      const auto pack = [&]() -> absl::Status {
        ASSIGN_OR_RETURN(const TensorSlice slice, source_.Read(name, rows, cols));
        return PackInStack(slice.rows, options_.dtype, i, share.experts.size(), stack);
      };
      RETURN_IF_ERROR(Finish(name, pack()));
    }
    return absl::OkStatus();
  }

  Range Hidden() const { return {0, spec_.hidden_size}; }

  // Small tensors lie behind one another in one buffer, so that it is large enough for huge pages.
  absl::StatusOr<void*> Allocate(int64_t bytes) {
    const int64_t aligned = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    weights_.bytes += aligned;
    if (aligned >= kSharedBufferBytes / 4) return AllocateBuffer(aligned);
    if (aligned > shared_left_) {
      ASSIGN_OR_RETURN(shared_, AllocateBuffer(kSharedBufferBytes));
      shared_left_ = kSharedBufferBytes;
    }
    void* const data = shared_ + kSharedBufferBytes - shared_left_;
    shared_left_ -= aligned;
    return data;
  }

  absl::StatusOr<std::byte*> AllocateBuffer(int64_t bytes) {
    ASSIGN_OR_RETURN(DeviceBuffer buffer, backend_.Allocate(static_cast<size_t>(bytes)));
    weights_.buffers.push_back(std::move(buffer));
    return weights_.buffers.back().as<std::byte>();
  }

  std::string Name(absl::string_view suffix) const { return LayerTensor(index_, suffix); }

  // This rank's rows of a projection of hidden states, and of its bias.
  absl::Status Rows(absl::string_view module, Range rows, bool has_bias, Projection& projection) {
    const std::string name = Name(module);
    RETURN_IF_ERROR(Matrix(absl::StrCat(name, ".weight"), rows, Hidden(), projection.weight));
    if (!has_bias) return absl::OkStatus();
    return Vector(absl::StrCat(name, ".bias"), rows, projection.bias);
  }

  // This rank's columns of a projection to hidden states.
  absl::Status Columns(absl::string_view module, Range cols, bool has_bias,
                       Projection& projection) {
    const std::string name = Name(module);
    RETURN_IF_ERROR(Matrix(absl::StrCat(name, ".weight"), Hidden(), cols, projection.weight));
    if (!has_bias || !adds_biases_) return absl::OkStatus();
    return Vector(absl::StrCat(name, ".bias"), Hidden(), projection.bias);
  }

  absl::Status Matrix(const std::string& name, Range rows, Range cols, PackedWeight& packed) {
    return Finish(name, ReadMatrix(name, rows, cols, options_.dtype, packed));
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

  // What the packed form of `rows` is called, yet without data.
  static PackedWeight Describe(const WeightRows& rows, std::optional<DType> dtype) {
    return {.data = nullptr,
            .dtype = StoredDType(rows.dtype, dtype),
            .n = rows.n,
            .k = rows.k,
            .k_offset = rows.k_offset,
            .block_columns = rows.scales.block_columns};
  }

  absl::StatusOr<int64_t> PackedBytes(const PackedWeight& weight) const {
    return backend_.kernels().packed_weight_bytes(weight);
  }

  absl::Status ReadMatrix(const std::string& name, Range rows, Range cols,
                          std::optional<DType> dtype, PackedWeight& packed) {
    ASSIGN_OR_RETURN(const TensorSlice slice, source_.Read(name, rows, cols));
    packed = Describe(slice.rows, dtype);
    if (packed.n == 0 || packed.k == 0) return absl::OkStatus();
    ASSIGN_OR_RETURN(const int64_t bytes, PackedBytes(packed));
    ASSIGN_OR_RETURN(packed.data, Allocate(bytes));
    return Pack(slice.rows, packed);
  }

  // Packs the i-th of `count` matrices, which come in order; the first one gives all their type.
  absl::Status PackInStack(const WeightRows& rows, std::optional<DType> dtype, int64_t i,
                           int64_t count, PackedWeightStack& stack) {
    const PackedWeight described = Describe(rows, dtype);
    if (i == 0) {
      stack.first = described;
      stack.count = count;
      if (described.n == 0 || described.k == 0) return absl::OkStatus();
      ASSIGN_OR_RETURN(const int64_t bytes, PackedBytes(described));
      stack.stride_bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
      ASSIGN_OR_RETURN(stack.first.data, Allocate(count * stack.stride_bytes));
    }
    if (described.dtype != stack.first.dtype) {
      return absl::InvalidArgumentError(
          absl::StrCat("is ", DTypeName(described.dtype), " where its layer's first expert is ",
                       DTypeName(stack.first.dtype), "; they must be of one type"));
    }
    if (stack.first.data == nullptr) return absl::OkStatus();
    return Pack(rows, stack.at(i));
  }

  absl::Status Pack(const WeightRows& rows, const PackedWeight& packed) {
    RETURN_IF_ERROR(backend_.kernels().pack_weight(rows, packed, stream_));
    return stream_.Synchronize();  // the rows go when this returns
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
  std::byte* shared_ = nullptr;  // the newest buffer of small tensors
  int64_t shared_left_ = 0;      // bytes
  int64_t index_ = 0;            // of the layer
  bool adds_biases_ = false;     // of the block being loaded
};

// Says once that weights lose precision; what overflows is refused when packed.
void WarnOfNarrowing(const WeightSource& source, std::optional<DType> requested) {
  if (!requested.has_value()) return;
  for (const TensorInfo& tensor : source.tensors()) {
    const bool narrows = tensor.dtype != *requested && *requested != DType::kFloat32 &&
                         tensor.shape.size() > 1 && !IsQuantised(tensor.dtype);
    if (!narrows) continue;
    LOG(WARNING) << tensor.name << " and others are " << DTypeName(tensor.dtype)
                 << " in the checkpoint and are kept as " << DTypeName(*requested);
    return;
  }
}

}  // namespace

absl::StatusOr<ModelWeights> LoadWeights(const ModelSpec& spec, const ShardLayout& layout, int rank,
                                         WeightSource& source, const WeightLoadOptions& options,
                                         Backend& backend, Stream& stream) {
  if (rank == 0) WarnOfNarrowing(source, options.dtype);
  const RankLayout& held = layout.ranks[rank];
  ModelWeights weights;
  Loader loader(spec, source, options, backend, stream, weights);
  RETURN_IF_ERROR(loader.LoadEmbedding(held.vocabulary));
  for (int64_t layer = 0; layer < spec.num_layers; ++layer) {
    RETURN_IF_ERROR(loader.LoadLayer(
        layer, held, {.attention = rank == 0 || layout.grid.data_parallel(), .ffn = rank == 0}));
  }
  RETURN_IF_ERROR(loader.LoadHead(held.vocabulary));
  return weights;
}

}  // namespace heddle
