#!/usr/bin/env python3
"""Writes a DeepSeek-V2-Lite of random weights, narrower and shallower, for three engines.

Usage: make_model.py DIRECTORY

DIRECTORY/hf is a Hugging Face directory (heddle, transformers); bf16.gguf and f32.gguf hold the
same values for llama.cpp, named and cut as its converter does: keys and values of the latent in
tensors of their own, which is what its absorbed attention asks for.
"""

import json
import pathlib
import sys

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

# Attention and the routing as in V2-Lite; the hidden size, experts and the dense layer at half.
CONFIG = json.loads(
    (pathlib.Path(__file__).parents[3] / "configs/models/deepseek-v2-lite/config.json").read_text()
) | {
    "hidden_size": 1024,
    "intermediate_size": 5472,
    "moe_intermediate_size": 704,
    "num_hidden_layers": 4,
    "vocab_size": 32768,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def rotary_scaling_keys(writer: gguf.GGUFWriter) -> None:
    scaling = CONFIG["rope_scaling"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def gguf_writer(path: pathlib.Path) -> gguf.GGUFWriter:
    c = CONFIG
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_vocab_size(c["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(1)
    # llama.cpp knows models without a latent of the queries by their depth; or by a rank of 0.
    writer.add_q_lora_rank(0)
    writer.add_kv_lora_rank(c["kv_lora_rank"])
    writer.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
    writer.add_value_length(c["kv_lora_rank"])
    writer.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    writer.add_value_length_mla(c["v_head_dim"])
    writer.add_rope_dimension_count(c["qk_rope_head_dim"])
    writer.add_rope_freq_base(c["rope_theta"])
    rotary_scaling_keys(writer)
    writer.add_leading_dense_block_count(c["first_k_dense_replace"])
    writer.add_expert_count(c["n_routed_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_expert_shared_count(c["n_shared_experts"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    writer.add_expert_weights_scale(c["routed_scaling_factor"])
    return writer


class Writers:
    """Takes each weight once, under its name there and its name here."""

    def __init__(self, directory: pathlib.Path):
        self.random = torch.Generator().manual_seed(0)
        self.hf = {}
        self.ggufs = {
            Type.BF16: gguf_writer(directory / "bf16.gguf"),
            Type.F32: gguf_writer(directory / "f32.gguf"),
        }
        self.hf_directory = directory / "hf"
        self.hf_directory.mkdir(exist_ok=True)

    def matrix(self, rows: int, cols: int) -> torch.Tensor:  # [rows, cols]
        values = torch.randn(rows, cols, generator=self.random) / cols**0.5
        return values.to(torch.bfloat16)

    def put_gguf(self, name: str, values: torch.Tensor, widen: bool = False) -> None:
        values = values.contiguous()
        for kind, writer in self.ggufs.items():
            if kind == Type.F32 or widen:
                writer.add_tensor(name, values.float().numpy())
            else:
                writer.add_tensor(name, values.view(torch.uint8).numpy(), raw_dtype=kind)

    def put(self, hf_name: str, gguf_name: str, values: torch.Tensor, widen: bool = False) -> None:
        self.hf[hf_name] = values
        self.put_gguf(gguf_name, values, widen)

    def put_norm(self, hf_name: str, gguf_name: str, size: int) -> None:
        values = 1 + 0.1 * torch.randn(size, generator=self.random)
        self.put(hf_name, gguf_name, values.to(torch.bfloat16), widen=True)

    def close(self) -> None:
        save_file(self.hf, self.hf_directory / "model.safetensors", metadata={"format": "pt"})
        (self.hf_directory / "config.json").write_text(json.dumps(CONFIG, indent=2))
        for writer in self.ggufs.values():
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()


def put_attention(out: Writers, hf: str, block: str) -> None:
    c = CONFIG
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    rank = c["kv_lora_rank"]
    out.put_norm(hf + "input_layernorm.weight", block + "attn_norm.weight", hidden)
    hf += "self_attn."
    out.put(hf + "q_proj.weight", block + "attn_q.weight",
            out.matrix(heads * (nope + rope), hidden))
    out.put(hf + "kv_a_proj_with_mqa.weight", block + "attn_kv_a_mqa.weight",
            out.matrix(rank + rope, hidden))
    out.put_norm(hf + "kv_a_layernorm.weight", block + "attn_kv_a_norm.weight", rank)
    kv_b = out.matrix(heads * (nope + value), rank)
    out.hf[hf + "kv_b_proj.weight"] = kv_b
    keys, values = kv_b.view(heads, nope + value, rank).split([nope, value], dim=1)
    out.put_gguf(block + "attn_k_b.weight", keys.transpose(1, 2))
    out.put_gguf(block + "attn_v_b.weight", values)
    out.put(hf + "o_proj.weight", block + "attn_output.weight", out.matrix(hidden, heads * value))


def put_ffn(out: Writers, hf: str, block: str, is_dense: bool) -> None:
    c = CONFIG
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    out.put_norm(hf + "post_attention_layernorm.weight", block + "ffn_norm.weight", hidden)
    hf += "mlp."

    def shapes(inner: int) -> dict:
        return {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}

    if is_dense:
        for part, shape in shapes(c["intermediate_size"]).items():
            out.put(f"{hf}{part}_proj.weight", f"{block}ffn_{part}.weight", out.matrix(*shape))
        return
    experts = c["n_routed_experts"]
    out.put(hf + "gate.weight", block + "ffn_gate_inp.weight", out.matrix(experts, hidden), True)
    for part, (rows, cols) in shapes(width).items():
        stack = out.matrix(experts * rows, cols).view(experts, rows, cols)
        for expert in range(experts):
            out.hf[f"{hf}experts.{expert}.{part}_proj.weight"] = stack[expert].clone()
        out.put_gguf(f"{block}ffn_{part}_exps.weight", stack)
    for part, shape in shapes(width * c["n_shared_experts"]).items():
        out.put(f"{hf}shared_experts.{part}_proj.weight", f"{block}ffn_{part}_shexp.weight",
                out.matrix(*shape))


def main() -> None:
    directory = pathlib.Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    out = Writers(directory)
    vocab, hidden = CONFIG["vocab_size"], CONFIG["hidden_size"]
    embedding = out.matrix(vocab, hidden) * hidden**0.5
    out.put("model.embed_tokens.weight", "token_embd.weight", embedding)
    for layer in range(CONFIG["num_hidden_layers"]):
        hf, block = f"model.layers.{layer}.", f"blk.{layer}."
        put_attention(out, hf, block)
        put_ffn(out, hf, block, layer < CONFIG["first_k_dense_replace"])
    out.put_norm("model.norm.weight", "output_norm.weight", hidden)
    out.put("lm_head.weight", "output.weight", out.matrix(vocab, hidden))
    out.close()


if __name__ == "__main__":
    main()
