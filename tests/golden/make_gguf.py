#!/usr/bin/env python3
"""Writes the tiny GGUF files of tests/golden/gguf and what transformers says of them.

Usage: make_gguf.py [NAME...]   (no name: every file; README.md has the format)
"""

import pathlib
import sys
import zlib

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from make_models import write_expectations

GGUF_DIR = pathlib.Path(__file__).parent / "gguf"
PROMPT_LENGTHS = [1, 7, 40]
MAX_MODEL_LEN = 128

SMALL = {
    "hidden": 64,
    "query_heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate": 96,
    "layers": 2,
    "vocab": 97,
    "theta": 10000.0,
}
# Rows of 256, the block of the K types; one layer keeps the file small.
WIDE = SMALL | {
    "hidden": 256,
    "query_heads": 8,
    "head_dim": 32,
    "intermediate": 256,
    "layers": 1,
    "theta": 500000.0,
}
# The mixture of a Q4_K_M file, and a Q5_K tensor.
K_TYPES = {
    "attn_v": Type.Q6_K,
    "ffn_down": Type.Q6_K,
    "output": Type.Q6_K,
    "ffn_up": Type.Q5_K,
    "": Type.Q4_K,
}

# name -> (architecture, shape, part of a tensor's name -> type, options)
FILES = {
    "llama-f16": ("llama", SMALL | {"layers": 1}, {"": Type.F16}, set()),
    "llama-bf16": ("llama", SMALL | {"layers": 1}, {"": Type.BF16}, set()),
    "llama-q8_0": ("llama", SMALL, {"": Type.Q8_0}, {"tied"}),
    "llama-q4_0": ("llama", SMALL, {"": Type.Q4_0}, set()),
    "llama-q4_1": ("llama", SMALL, {"": Type.Q4_1}, set()),
    "llama-q5_0": ("llama", SMALL, {"": Type.Q5_0}, set()),
    "llama-q5_1": ("llama", SMALL, {"": Type.Q5_1}, set()),
    "llama-k-rope-freqs": ("llama", WIDE, K_TYPES, {"rope_freqs"}),
    "qwen2-q8_0": ("qwen2", SMALL, {"": Type.Q8_0}, set()),
    "qwen2-q4_1": ("qwen2", SMALL, {"token_embd": Type.Q8_0, "": Type.Q4_1}, {"tied"}),
}

# The gguf package de-quantises the K types but does not quantise to them: their blocks are random
# bytes with chosen scales. Fields in order: name, bytes; then what `min` must be, in units of `d`,
# for a mean near zero.
K_BLOCKS = {
    Type.Q4_K: ([("d", 2), ("min", 2), ("scales", 12), ("quants", 128)], 7.5),
    Type.Q5_K: ([("d", 2), ("min", 2), ("scales", 12), ("high", 32), ("quants", 128)], 15.5),
    Type.Q6_K: ([("low", 128), ("high", 64), ("scales", 16), ("d", 2)], 0.0),
}


def random_k_blocks(rng, shape: tuple, kind: Type, std: float) -> np.ndarray:  # uint8
    fields, min_over_d = K_BLOCKS[kind]
    rows, blocks = shape[0], shape[1] // 256
    spread = rng.uniform(0.5, 1.5, (rows, blocks, 1))
    noise = {name: rng.integers(0, 256, (rows, blocks, size), np.uint8) for name, size in fields}

    def with_scale(scale: float) -> np.ndarray:
        noise["d"] = (spread * scale).astype("<f2").view(np.uint8)
        if "min" in noise:
            noise["min"] = (spread * scale * min_over_d).astype("<f2").view(np.uint8)
        return np.concatenate([noise[name] for name, _ in fields], axis=2).reshape(rows, -1)

    trial = 2.0**-8
    return with_scale(trial * std / gguf.quants.dequantize(with_scale(trial), kind).std())


def type_of(tensor: str, types: dict) -> Type:
    return next(kind for part, kind in types.items() if part in tensor)


def write_file(name: str) -> None:
    architecture, shape, types, options = FILES[name]
    writer = gguf.GGUFWriter(GGUF_DIR / f"{name}.gguf", architecture)
    writer.add_name(name)
    writer.add_block_count(shape["layers"])
    writer.add_context_length(MAX_MODEL_LEN)
    writer.add_embedding_length(shape["hidden"])
    writer.add_feed_forward_length(shape["intermediate"])
    writer.add_head_count(shape["query_heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_rope_freq_base(shape["theta"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape["vocab"])
    if architecture == "llama" or shape["query_heads"] * shape["head_dim"] != shape["hidden"]:
        writer.add_rope_dimension_count(shape["head_dim"])
        writer.add_key_length(shape["head_dim"])
        writer.add_value_length(shape["head_dim"])

    def rng_of(tensor: str):
        return np.random.default_rng(zlib.crc32(f"{name}/{tensor}".encode()))

    def add_matrix(tensor: str, rows: int, cols: int, gain: float = 1.0) -> None:
        kind = type_of(tensor, types)
        std = gain if tensor == "token_embd.weight" else gain / cols**0.5
        if kind in K_BLOCKS:
            data = random_k_blocks(rng_of(tensor), (rows, cols), kind, std)
        else:
            values = rng_of(tensor).normal(0, std, (rows, cols)).astype(np.float32)
            data = gguf.quants.quantize(values, kind)
        writer.add_tensor(tensor, data, raw_dtype=kind)

    def add_vector(tensor: str, size: int, mean: float, std: float) -> None:
        writer.add_tensor(tensor, rng_of(tensor).normal(mean, std, size).astype(np.float32))

    hidden, intermediate = shape["hidden"], shape["intermediate"]
    query_rows = shape["query_heads"] * shape["head_dim"]
    kv_rows = shape["kv_heads"] * shape["head_dim"]
    tied = "tied" in options
    add_matrix("token_embd.weight", shape["vocab"], hidden, 0.2 if tied else 1.0)
    if "rope_freqs" in options:
        factors = np.geomspace(1, 8, shape["head_dim"] // 2).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    for layer in range(shape["layers"]):
        block = f"blk.{layer}."
        add_vector(block + "attn_norm.weight", hidden, 1.0, 0.3)
        add_vector(block + "ffn_norm.weight", hidden, 1.0, 0.3)
        add_matrix(block + "attn_q.weight", query_rows, hidden, 1.4)
        add_matrix(block + "attn_k.weight", kv_rows, hidden, 1.4)
        add_matrix(block + "attn_v.weight", kv_rows, hidden)
        add_matrix(block + "attn_output.weight", hidden, query_rows)
        add_matrix(block + "ffn_gate.weight", intermediate, hidden)
        add_matrix(block + "ffn_up.weight", intermediate, hidden)
        add_matrix(block + "ffn_down.weight", hidden, intermediate)
        if architecture == "qwen2":
            for part, rows in (("q", query_rows), ("k", kv_rows), ("v", kv_rows)):
                add_vector(block + f"attn_{part}.bias", rows, 0.0, 0.5)
    add_vector("output_norm.weight", hidden, 1.0, 0.3)
    if not tied:
        add_matrix("output.weight", shape["vocab"], hidden, 2.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_weights(model, tensors: dict) -> None:
    """transformers' weights are the file's, Q and K of llama in the order of Hugging Face's."""
    config, layer = model.config, model.model.layers[0]

    def stored(part: str) -> np.ndarray:
        tensor = tensors[f"blk.0.{part}.weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    def reordered(part: str, heads: int) -> np.ndarray:
        rows = stored(part)
        if config.model_type != "llama":
            return rows
        return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)

    for module, expected in (
        (layer.mlp.down_proj, stored("ffn_down")),
        (layer.self_attn.q_proj, reordered("attn_q", config.num_attention_heads)),
        (layer.self_attn.k_proj, reordered("attn_k", config.num_key_value_heads)),
        (layer.self_attn.v_proj, stored("attn_v")),
    ):
        assert np.array_equal(module.weight.detach().numpy(), expected)


def load_with_transformers(name: str):
    model, info = AutoModelForCausalLM.from_pretrained(
        GGUF_DIR,
        gguf_file=f"{name}.gguf",
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    tensors = {t.name: t for t in gguf.GGUFReader(GGUF_DIR / f"{name}.gguf").tensors}
    if "rope_freqs.weight" in tensors:  # transformers leaves them out
        model.model.rotary_emb.inv_freq /= torch.tensor(tensors["rope_freqs.weight"].data)
    check_weights(model, tensors)
    return model.eval()


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(2)
    GGUF_DIR.mkdir(exist_ok=True)
    for name in sys.argv[1:] or FILES:
        write_file(name)
        stem = GGUF_DIR / name
        figures = write_expectations(
            stem.with_suffix(".json"),
            stem.with_suffix(".f32"),
            load_with_transformers(name),
            name,
            PROMPT_LENGTHS,
            MAX_MODEL_LEN,
        )
        size = stem.with_suffix(".gguf").stat().st_size
        print(f"{name:20} {size // 1024:4} KiB", {k: f"{v:.2g}" for k, v in figures.items()})


if __name__ == "__main__":
    main()
