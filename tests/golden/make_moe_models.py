#!/usr/bin/env python3
"""Writes the models of tests/golden/models that have latent attention or experts.

Usage: make_moe_models.py [NAME...]   (no name: every model; README.md has the format)

DeepSeek's published code defines these families; transformers 5.24.0 agrees with it in what earlier
releases missed, which `check_oracle` asserts: the square of YaRN's magnitude in the softmax's scale,
and groups masked with minus infinity, not zero.
"""

import json
import math
import pathlib
import random
import shutil
import sys
import tempfile
import zlib

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.utils import logging

import make_models
from make_models import MODELS_DIR, attention_entropy, make_prompts, write_expectations

PROMPT_LENGTHS = [1, 9, 41]
# Prompts are drawn until every position of theirs is routed by LEAST_MARGIN at least, and 95 % of
# all positions by CLEAR_MARGIN.
LEAST_MARGIN = 1e-4
CLEAR_MARGIN = 1e-3
MOST_DRAWS = 100

COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "vocab_size": 131,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# transformers rotates views of the queries and the latent as complex numbers, which torch refuses
# where an odd width stands before the rotated part; copies are at even addresses.
rotate_views = modeling_deepseek_v2.apply_rotary_emb


def rotate_copies(q, k, angles):
    dense = torch.contiguous_format
    return rotate_views(q.clone(memory_format=dense), k.clone(memory_format=dense), angles)


modeling_deepseek_v2.apply_rotary_emb = rotate_copies


def yarn(factor: float, original: int, mscale: float, mscale_all_dim: float, **more) -> dict:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    } | more


# DeepSeek-V2-Lite's config.json, smaller.
MLA_LITE = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_theta": 10000,
    "rope_scaling": yarn(40, 32, 0.707, 0.707),
}
# DeepSeek-V3's.
MLA_V3 = MLA_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 24,
    "v_head_dim": 6,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_scaling": yarn(40, 32, 1.0, 1.0),
}
# Kimi-K2's: the architecture of DeepSeek-V3 with one group of more experts and fewer heads.
KIMI_K2 = MLA_V3 | {
    "model_type": "kimi_k2",
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "rope_scaling": yarn(32, 32, 1.0, 1.0, beta_fast=1.0, beta_slow=1.0),
}
MIXTRAL = {k: v for k, v in COMMON.items() if k != "attention_bias"} | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
# As transformers 5 writes it.
QWEN3_MOE = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "use_sliding_window": False,
    "sliding_window": None,
    "dtype": "bfloat16",
}


def renamed_rope(config: dict) -> dict:
    """The same model in the newer spelling."""
    parameters = dict(config["rope_scaling"])
    parameters["rope_type"] = parameters.pop("type")
    parameters["rope_theta"] = config["rope_theta"]
    rest = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_theta")}
    return rest | {"rope_parameters": parameters}


def block_fp8(config: dict, rows: int, columns: int) -> dict:
    return config | {
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [rows, columns],
        }
    }


def random_variation(index: int) -> dict:
    """Widths, experts, groups and rotary settings drawn at random; odd ones are DeepSeek-V3's.

    The seed is one whose ten variations have every setting at least twice.
    """
    rng = random.Random(f"variation-311-{index}")
    v3 = index % 2 == 1
    heads = rng.randint(2, 6)
    num_groups = rng.randint(1, 4)
    group_size = rng.randint(2, 4) + (4 if num_groups == 1 else 0)
    top_groups = rng.randint(1, num_groups)
    config = (MLA_V3 if v3 else MLA_LITE) | {
        "hidden_size": heads * rng.randint(24 // heads, 36 // heads),
        "intermediate_size": rng.randint(30, 60),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, heads]),
        "q_lora_rank": rng.choice([None, rng.randint(6, 30)]),
        "kv_lora_rank": rng.randint(5, 37),
        "qk_nope_head_dim": rng.randint(3, 19),
        "qk_rope_head_dim": 2 * rng.randint(1, 7),
        "v_head_dim": rng.randint(3, 21),
        "n_routed_experts": num_groups * group_size,
        "n_shared_experts": rng.randint(1, 2),
        "num_experts_per_tok": rng.randint(2, max(2, min(4, top_groups * group_size - 2))),
        "moe_intermediate_size": rng.randint(7, 14),
        "n_group": num_groups,
        "topk_group": top_groups,
        "routed_scaling_factor": rng.choice([1.0, 1.5, 2.5]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-2]),
        "attention_bias": rng.random() < 0.5,
        "rope_theta": rng.choice([100.0, 10000.0, 50000.0]),
        "rope_scaling": rng.choice([None, "equal", "unequal", "unequal", "unequal"]),
    }
    if v3:
        config |= {"rope_interleave": rng.random() < 0.6, "norm_topk_prob": rng.random() < 0.7}
        config["num_nextn_predict_layers"] = 0
    elif num_groups > 1:
        config["topk_method"] = "group_limited_greedy"
    if config["rope_scaling"] is not None:
        mscale = round(rng.uniform(0.5, 1.2), 3)
        all_dim = mscale if config["rope_scaling"] == "equal" else round(rng.uniform(0.5, 1.2), 3)
        config["rope_scaling"] = yarn(
            round(rng.uniform(2, 40), 1),
            rng.choice([16, 24, 32]),
            mscale,
            all_dim,
            beta_fast=rng.choice([4, 32]),
            beta_slow=rng.choice([0.5, 1]),
        )
    if rng.random() < 0.5 and config["rope_scaling"] is not None:
        config = renamed_rope(config)
    return config


# name -> (config.json, dtype of the stored weights)
MODELS = {
    "mla-lite": (MLA_LITE, torch.bfloat16),
    "mla-lite-rope-parameters": (renamed_rope(MLA_LITE), torch.bfloat16),
    "mla-v3": (MLA_V3, torch.bfloat16),
    "mla-v3-fp8": (block_fp8(MLA_V3 | {"hidden_size": 40, "moe_intermediate_size": 24}, 16, 16), torch.bfloat16),
    "mla-v3-fp8-oblong": (block_fp8(MLA_V3, 128, 24), torch.bfloat16),
    "mla-dense": (MLA_V3 | {"first_k_dense_replace": 2, "num_hidden_layers": 2}, torch.bfloat16),
    "kimi-k2": (KIMI_K2, torch.bfloat16),
    "mixtral": (MIXTRAL, torch.bfloat16),
    "qwen3-moe": (QWEN3_MOE, torch.bfloat16),
    "qwen3-moe-sparse-step": (
        QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False},
        torch.float32,
    ),
} | {f"mla-random-{i}": (random_variation(i), torch.bfloat16) for i in range(10)}

# All their biased scores are negative: masks of zero instead of minus infinity would choose what
# they mask.
NEGATIVE_BIASES = {"mla-v3", "mla-random-1", "mla-random-9"}

# The same weights as another one.
SAME_WEIGHTS = {"mla-lite-rope-parameters": "mla-lite"}


def random_tensor(source: str, config: dict, name: str, shape: torch.Size) -> torch.Tensor:
    if name.endswith("e_score_correction_bias"):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{source}/{name}".encode()))
        bias = 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return bias - (2.0 if source in NEGATIVE_BIASES else 0.0)
    tensor = make_models.random_tensor(source, False, name, shape)
    if name.endswith(("q_a_layernorm.weight", "kv_a_layernorm.weight")):
        return tensor
    if name.endswith(".gate.weight"):  # a router far from uniform
        return tensor * (1.5 if config.get("scoring_func") == "sigmoid" else 1.4)
    if ".q_b_proj" in name:
        return tensor * 1.4
    return tensor


def hub_tensors(skeleton, config: dict) -> dict:
    """name -> shape as checkpoints have them: transformers joins what they keep apart."""
    shapes = {}
    for name, tensor in skeleton.state_dict().items():
        if config["model_type"] == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            shapes[name] = tensor.shape
            continue
        block = name.rsplit(".", 1)[0]
        mixtral = config["model_type"] == "mixtral"
        for expert in range(tensor.shape[0]):
            rows, columns = tensor.shape[1:]
            if name.endswith("down_proj"):
                shapes[f"{block}.{expert}.{'w2' if mixtral else 'down_proj'}.weight"] = (rows, columns)
            else:
                for matrix in ("w1", "w3") if mixtral else ("gate_proj", "up_proj"):
                    shapes[f"{block}.{expert}.{matrix}.weight"] = (rows // 2, columns)
    return shapes


def quantise(weight: torch.Tensor, block: list) -> tuple:
    """The weight as float8, the scale of each block, and what both stand for."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // block[0]) * block[0], -(-columns // block[1]) * block[1])
    padded[:rows, :columns] = weight
    blocks = padded.reshape(padded.shape[0] // block[0], block[0], -1, block[1])
    scales = blocks.abs().amax(dim=(1, 3)) / 448.0
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    spread = spread[:rows, :columns]
    stored = (weight / spread).to(torch.float8_e4m3fn)
    return stored, scales, stored.float() * spread


def store(tensors: dict, config: dict, dtype: torch.dtype) -> tuple:
    """The tensors of the checkpoint and, de-quantised, those of the oracle."""
    stored, exact = {}, {}
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            stored[name] = exact[name] = tensor.float()
        elif "quantization_config" in config and "_proj" in name and name.endswith(".weight"):
            block = config["quantization_config"]["weight_block_size"]
            stored[name], scales, exact[name] = quantise(tensor.float(), block)
            stored[name + "_scale_inv"] = scales
        else:
            stored[name] = exact[name] = tensor.to(dtype)
    return stored, exact


def write_model(name: str):
    """Writes config.json and weights under `name`; returns transformers' model of them."""
    config, dtype = MODELS[name]
    source = SAME_WEIGHTS.get(name, name)
    if "dtype" not in config:
        config = {"torch_dtype": str(dtype).removeprefix("torch.")} | config
    else:
        config = config | {"dtype": str(dtype).removeprefix("torch.")}
    directory = MODELS_DIR / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    # transformers knows Kimi-K2 as what it is, counts the KV heads that a latent is expanded to, and
    # needs no word of how weights are stored.
    oracle_config = {k: v for k, v in config.items() if k != "quantization_config"}
    if config["model_type"] == "kimi_k2":
        oracle_config["model_type"] = "deepseek_v3"
    if "kv_lora_rank" in config:
        oracle_config["num_key_value_heads"] = config["num_attention_heads"]
    with tempfile.TemporaryDirectory() as oracle:
        oracle = pathlib.Path(oracle)
        (oracle / "config.json").write_text(json.dumps(oracle_config))
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(oracle))
        tensors = {
            tensor: random_tensor(source, config, tensor, shape)
            for tensor, shape in hub_tensors(skeleton, config).items()
        }
        stored, exact = store(tensors, config, dtype)
        save_file(exact, oracle / "model.safetensors", {"format": "pt"})
        if config.get("num_nextn_predict_layers"):
            # A bit of the layer that predicts a token further, which readers leave alone.
            prefix = f"model.layers.{config['num_hidden_layers']}"
            stored[f"{prefix}.enorm.weight"] = torch.ones(config["hidden_size"], dtype=dtype)
            stored[f"{prefix}.mlp.experts.0.up_proj.weight"] = torch.ones(2, 2, dtype=dtype)
        save_file(stored, directory / "model.safetensors", {"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            oracle, dtype=torch.float32, attn_implementation="eager",
            experts_implementation="eager", output_loading_info=True,
        )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    assert not info["unexpected_keys"], info
    return model.eval()


def routers_of(model) -> list:
    return [module for path, module in model.named_modules() if path.endswith("mlp.gate")]


def margin_and_choice(config, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple:
    """Of each row of `logits` the router's margin, and the ids it chooses, spelled out once more.

    The margin is the smaller of two gaps between the last that is chosen and the first that is not:
    between groups, and between the experts of the chosen groups.
    """
    v3 = config.model_type == "deepseek_v3"
    scores = logits.sigmoid() if v3 else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    num_groups, top_groups = 1, 1
    if v3 or getattr(config, "topk_method", "") == "group_limited_greedy":
        num_groups, top_groups = config.n_group, config.topk_group
    margin = torch.full(logits.shape[:1], math.inf)
    grouped = choice.view(len(choice), num_groups, -1)
    if top_groups < num_groups:
        best = grouped.topk(2 if v3 else 1).values.sum(-1)
        ranked = best.sort(descending=True)
        margin = ranked.values[:, top_groups - 1] - ranked.values[:, top_groups]
        dropped = ranked.indices[:, top_groups:, None].expand(-1, -1, grouped.shape[-1])
        choice = grouped.scatter(1, dropped, -math.inf).view_as(choice)
    top_k = config.num_experts_per_tok
    ranked = choice.sort(descending=True)
    if top_k < choice.shape[-1]:
        gap = ranked.values[:, top_k - 1] - ranked.values[:, top_k]
        margin = torch.minimum(margin, gap)
    return margin, ranked.indices[:, :top_k]


@torch.no_grad()
def router_margins(model, token_ids: list) -> list:
    """The smallest margin of each position over all layers with experts."""
    margins = []

    def record(router, inputs, outputs):
        bias = getattr(router, "e_score_correction_bias", None)
        margin, chosen = margin_and_choice(model.config, outputs[0].float(), bias)
        assert torch.equal(chosen.sort().values, outputs[2].sort().values)
        margins.append(margin)

    hooks = [router.register_forward_hook(record) for router in routers_of(model)]
    model(torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(margins).amin(0).tolist()


def check_oracle(model) -> None:
    """That this release of transformers computes what DeepSeek's code defines."""
    config = model.config
    if not config.model_type.startswith("deepseek"):
        return
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        magnitude = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
        scale *= magnitude**2
    assert math.isclose(model.model.layers[0].self_attn.scaling, scale, rel_tol=1e-12)


def with_continuation(model, token_ids: list) -> list:
    for _ in range(make_models.GREEDY_TOKENS):
        last = make_models.logits_of(model, token_ids)[-1]
        token_ids = token_ids + [int(last.argmax())]
    return token_ids


def draw_prompts(name: str, model) -> str:
    """The name of the first prompts that are routed clearly, their greedy continuations included."""

    def clear(texts: list) -> bool:
        margins = [margin for token_ids in texts for margin in router_margins(model, token_ids)]
        num_clear = sum(margin >= CLEAR_MARGIN for margin in margins)
        return min(margins) >= LEAST_MARGIN and num_clear >= 0.95 * len(margins)

    for draw in range(MOST_DRAWS):
        prompts_of = f"{name}/{draw}"
        prompts = make_prompts(prompts_of, model.config.vocab_size, PROMPT_LENGTHS).values()
        if clear(prompts) and clear([with_continuation(model, ids) for ids in prompts]):
            return prompts_of
    raise RuntimeError(f"{name}: no prompts are routed clearly")


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        model = write_model(name)
        check_oracle(model)
        source = SAME_WEIGHTS.get(name, name)
        has_experts = bool(routers_of(model))
        config = MODELS[name][0]
        prompts_of = draw_prompts(source, model) if has_experts else source
        directory = MODELS_DIR / name
        figures = write_expectations(
            directory / "expect.json",
            directory / "logits.f32",
            model,
            prompts_of,
            PROMPT_LENGTHS,
            config["max_position_embeddings"],
            (lambda ids: router_margins(model, ids)) if has_experts else None,
        )
        figures["attention entropy"] = attention_entropy(model, list(range(1, 33)))
        size = sum(f.stat().st_size for f in directory.iterdir())
        figures = {k: f"{v:.2g}" for k, v in figures.items()}
        print(f"{name:25} {size // 1024:4} KiB", prompts_of, figures, flush=True)


if __name__ == "__main__":
    main()
