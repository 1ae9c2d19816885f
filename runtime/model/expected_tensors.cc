#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/model/model_spec.h"
#include "runtime/model/tensor_names.h"

namespace heddle {
namespace {

// Collects the tensors of one model.
class TensorList {
 public:
  explicit TensorList(const ModelSpec& spec) : spec_(spec) {}

  void Add(std::string name, std::vector<int64_t> shape) {
    tensors_.push_back({std::move(name), std::move(shape)});
  }

  void AddLayer(int64_t layer) {
    AddVector(layer, "input_layernorm", spec_.hidden_size);
    if (spec_.mla) {
      AddMla(layer, *spec_.mla);
    } else {
      AddGqa(layer);
    }
    AddVector(layer, "post_attention_layernorm", spec_.hidden_size);
    if (HasExperts(spec_, layer)) {
      AddMoe(layer, *spec_.moe);
    } else {
      AddDenseFfn(layer);
    }
  }

  std::vector<ExpectedTensor> Take() { return std::move(tensors_); }

 private:
  void AddVector(int64_t layer, absl::string_view name, int64_t size) {
    Add(LayerTensor(layer, absl::StrCat(name, ".weight")), {size});
  }
  void AddLinear(int64_t layer, absl::string_view name, int64_t out, int64_t in, bool bias) {
    Add(LayerTensor(layer, absl::StrCat(name, ".weight")), {out, in});
    if (bias) Add(LayerTensor(layer, absl::StrCat(name, ".bias")), {out});
  }

  void AddGqa(int64_t layer) {
    const int64_t hidden = spec_.hidden_size;
    const int64_t query_width = spec_.total_query_heads * spec_.head_dim;
    const int64_t kv_width = spec_.total_kv_heads * spec_.head_dim;
    AddLinear(layer, "self_attn.q_proj", query_width, hidden, spec_.qkv_bias);
    AddLinear(layer, "self_attn.k_proj", kv_width, hidden, spec_.qkv_bias);
    AddLinear(layer, "self_attn.v_proj", kv_width, hidden, spec_.qkv_bias);
    if (spec_.qk_norm) {
      AddVector(layer, "self_attn.q_norm", spec_.head_dim);
      AddVector(layer, "self_attn.k_norm", spec_.head_dim);
    }
    AddLinear(layer, "self_attn.o_proj", hidden, query_width, spec_.output_bias);
  }

  void AddMla(int64_t layer, const MlaSpec& mla) {
    const int64_t hidden = spec_.hidden_size;
    const int64_t heads = spec_.total_query_heads;
    const int64_t query_width = heads * spec_.head_dim;
    if (mla.q_lora_rank == 0) {
      AddLinear(layer, "self_attn.q_proj", query_width, hidden, /*bias=*/false);
    } else {
      AddLinear(layer, "self_attn.q_a_proj", mla.q_lora_rank, hidden, spec_.qkv_bias);
      AddVector(layer, "self_attn.q_a_layernorm", mla.q_lora_rank);
      AddLinear(layer, "self_attn.q_b_proj", query_width, mla.q_lora_rank, /*bias=*/false);
    }
    AddLinear(layer, "self_attn.kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim,
              hidden, spec_.qkv_bias);
    AddVector(layer, "self_attn.kv_a_layernorm", mla.kv_lora_rank);
    AddLinear(layer, "self_attn.kv_b_proj", heads * (mla.qk_nope_head_dim + mla.v_head_dim),
              mla.kv_lora_rank, /*bias=*/false);
    AddLinear(layer, "self_attn.o_proj", hidden, heads * mla.v_head_dim, spec_.output_bias);
  }

  void AddDenseFfn(int64_t layer) {
    AddLinear(layer, "mlp.gate_proj", spec_.intermediate_size, spec_.hidden_size, spec_.mlp_bias);
    AddLinear(layer, "mlp.up_proj", spec_.intermediate_size, spec_.hidden_size, spec_.mlp_bias);
    AddLinear(layer, "mlp.down_proj", spec_.hidden_size, spec_.intermediate_size, spec_.mlp_bias);
  }

  void AddMoe(int64_t layer, const MoeSpec& moe) {
    Add(RouterTensor(spec_, layer), {moe.num_experts, spec_.hidden_size});
    if (moe.correction_bias) Add(CorrectionBiasTensor(spec_, layer), {moe.num_experts});
    for (int64_t expert = 0; expert < moe.num_experts; ++expert) {
      AddGatedFfn(moe.expert_intermediate_size,
                  [&](FfnMatrix matrix) { return ExpertTensor(spec_, layer, expert, matrix); });
    }
    if (moe.shared_intermediate_size == 0) return;
    AddGatedFfn(moe.shared_intermediate_size,
                [&](FfnMatrix matrix) { return SharedExpertsTensor(layer, matrix); });
  }

  template <typename NameOf>
  void AddGatedFfn(int64_t intermediate_size, const NameOf& name_of) {
    Add(name_of(FfnMatrix::kGate), {intermediate_size, spec_.hidden_size});
    Add(name_of(FfnMatrix::kUp), {intermediate_size, spec_.hidden_size});
    Add(name_of(FfnMatrix::kDown), {spec_.hidden_size, intermediate_size});
  }

  const ModelSpec& spec_;
  std::vector<ExpectedTensor> tensors_;
};

}  // namespace

std::vector<ExpectedTensor> ExpectedTensors(const ModelSpec& spec) {
  TensorList list(spec);
  list.Add(std::string(kEmbeddingTensor), {spec.vocab_size, spec.hidden_size});
  for (int64_t layer = 0; layer < spec.num_layers; ++layer) list.AddLayer(layer);
  list.Add(std::string(kFinalNormTensor), {spec.hidden_size});
  if (!spec.tie_word_embeddings) {
    list.Add(std::string(kHeadTensor), {spec.vocab_size, spec.hidden_size});
  }
  return list.Take();
}

}  // namespace heddle
