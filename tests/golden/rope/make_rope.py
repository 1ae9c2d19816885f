#!/usr/bin/env python3
"""Writes rope.json: transformers' rotary tables for every kind of rope scaling.

Needs the packages of ../requirements.txt. Each case is a config.json and what
LlamaRotaryEmbedding makes of it in float32 for a sequence of `length` tokens.
"""
import json
import pathlib

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

POSITIONS = [0, 31, 32, 200]

TINY = dict(model_type="llama", vocab_size=97, hidden_size=32, intermediate_size=48,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
            max_position_embeddings=32, rope_theta=10000.0)
LLAMA_3 = TINY | dict(hidden_size=256, head_dim=128, max_position_embeddings=131072,
                      rope_theta=500000.0)
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=32)
LLAMA_3_SCALING = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                       original_max_position_embeddings=8192)

CASES = [
    ("default", TINY, 201),
    ("default-large-theta", LLAMA_3, 201),
    ("linear", TINY | dict(rope_scaling=dict(type="linear", factor=4.0)), 201),
    ("dynamic-below-original", TINY | dict(rope_scaling=dict(type="dynamic", factor=4.0)), 32),
    ("dynamic-above-original", TINY | dict(rope_scaling=dict(type="dynamic", factor=4.0)), 201),
    ("llama3", LLAMA_3 | dict(rope_scaling=LLAMA_3_SCALING), 201),
    ("llama3-factor-32", LLAMA_3 | dict(rope_scaling=LLAMA_3_SCALING | dict(factor=32.0)), 201),
    ("llama3-short", TINY | dict(rope_scaling=LLAMA_3_SCALING | dict(
        original_max_position_embeddings=32)), 201),
    ("llama3-default-original", TINY | dict(rope_scaling=dict(
        rope_type="llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=8.0)), 201),
    ("yarn", TINY | dict(rope_scaling=YARN), 201),
    ("yarn-default-original", TINY | dict(rope_scaling=dict(type="yarn", factor=4.0)), 201),
    ("yarn-large", LLAMA_3 | dict(rope_theta=1000000.0, max_position_embeddings=32768,
                                  rope_scaling=YARN | dict(
                                      factor=4.0, original_max_position_embeddings=32768)), 201),
    ("yarn-betas", TINY | dict(rope_scaling=YARN | dict(beta_fast=4.0, beta_slow=0.5)), 201),
    ("yarn-not-truncated", TINY | dict(rope_scaling=YARN | dict(truncate=False)), 201),
    ("yarn-attention-factor", TINY | dict(rope_scaling=YARN | dict(attention_factor=0.75)), 201),
    ("yarn-mscale", TINY | dict(rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=0.5)), 201),
    ("yarn-equal-mscales", TINY | dict(rope_scaling=YARN | dict(
        factor=40.0, mscale=0.707, mscale_all_dim=0.707)), 201),
    ("yarn-one-mscale", TINY | dict(rope_scaling=YARN | dict(mscale=0.5)), 201),
]


def make_case(name, config, length):
    rotary = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(config))))
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    half = config["head_dim"] // 2
    return {
        "name": name,
        "config": config,
        "max_model_len": length,
        "inv_freq": rotary.inv_freq.tolist(),
        "attention_factor": float(rotary.attention_scaling),
        "rows": [{"position": position, "cos": cos[0, position, :half].tolist(),
                  "sin": sin[0, position, :half].tolist()}
                 for position in POSITIONS if position < length],
    }


def main():
    cases = [make_case(*case) for case in CASES]
    path = pathlib.Path(__file__).with_name("rope.json")
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
