#!/usr/bin/env python3
"""Writes the tiny models of tests/golden/models and what transformers says of them.

Usage: make_models.py [NAME...]   (no name: every model; README.md has the format)

The weights are a function of the model's and the tensor's name, so that a run with the versions of
requirements.txt writes the same models again.
"""

import json
import pathlib
import re
import shutil
import sys
import zlib

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

MODELS_DIR = pathlib.Path(__file__).parent / "models"
GREEDY_TOKENS = 24

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA_A = LLAMA | {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 259,
}
# Eight rotary frequencies, a few of which lie on the ramps of llama3 and yarn.
ROPE = LLAMA | {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "rope_theta": 500.0,
    "max_position_embeddings": 256,
}

# name -> (config.json, dtype of the stored weights)
MODELS = {
    "gqa-a": (GQA_A, torch.float32),
    "gqa-odd": (
        LLAMA
        | {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "vocab_size": 261,
        },
        torch.bfloat16,
    ),
    "mqa": (
        GQA_A
        | {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "intermediate_size": 64,
        },
        torch.bfloat16,
    ),
    "hd": (
        GQA_A
        | {
            "hidden_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 72,
        },
        torch.float16,
    ),
    "tied": (GQA_A | {"tie_word_embeddings": True}, torch.bfloat16),
    "llama-biases": (GQA_A | {"attention_bias": True, "mlp_bias": True}, torch.bfloat16),
    "qw2": (
        GQA_A
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "sliding_window": 4,
            "max_window_layers": 2,
        },
        torch.bfloat16,
    ),
    # Only the layers from max_window_layers on have a window.
    "qw2-window": (
        GQA_A
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "vocab_size": 97,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
        torch.bfloat16,
    ),
    # As transformers 5 writes it: the rotary base in rope_parameters, one type a layer, "dtype".
    "qwen3": (
        {k: v for k, v in GQA_A.items() if k != "rope_theta"}
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "head_dim": 8,
            "attention_bias": False,
            "dtype": "bfloat16",
            "layer_types": ["full_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_window": None,
            "use_sliding_window": False,
            "transformers_version": "5.24.0",
        },
        torch.bfloat16,
    ),
    "mistral-window": (
        GQA_A
        | {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "head_dim": 8,
            "sliding_window": 4,
        },
        torch.bfloat16,
    ),
    # As the first Llama releases: no KV head count, no rotary base, and the inverse frequencies
    # stored beside the weights, where every reader leaves them.
    "mha": (
        {k: v for k, v in LLAMA.items() if k != "rope_theta"}
        | {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "vocab_size": 97,
        },
        torch.float16,
    ),
    "rope-linear": (ROPE | {"rope_scaling": {"type": "linear", "factor": 4.0}}, torch.bfloat16),
    "rope-llama3": (
        ROPE
        | {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        torch.bfloat16,
    ),
    "rope-yarn": (
        ROPE
        | {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
            }
        },
        torch.bfloat16,
    ),
    # Frozen at load for MAX_MODEL_LEN positions, twice what the model was trained for.
    "rope-dynamic": (
        ROPE | {"max_position_embeddings": 128, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        torch.bfloat16,
    ),
}
MAX_MODEL_LEN = {"rope-dynamic": 256}

# The same model as another one, its tensors dealt to two files with an index.
TWO_SHARDS = {"mqa-two-shards": "mqa"}


def random_tensor(model_name: str, tied: bool, name: str, shape: torch.Size) -> torch.Tensor:
    """Weights wide enough that attention is far from uniform and every tensor shows in the logits."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{model_name}/{name}".encode()))
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 1.6 + 0.3 * normal
    if name.endswith("norm.weight"):
        return 1.0 + 0.3 * normal
    if name.endswith("bias"):
        return 0.5 * normal
    if "embed_tokens" in name:
        # A tied head would answer every token with itself if embeddings were wide.
        return normal * (0.2 if tied else 1.0)
    gains = {"q_proj": 1.4, "k_proj": 1.4, "lm_head": 2.0}
    gain = next((value for part, value in gains.items() if part in name), 1.0)
    return normal * gain / shape[-1] ** 0.5


def write_weights(directory: pathlib.Path, tensors: dict, num_shards: int) -> None:
    metadata = {"format": "pt"}
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata)
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        save_file({name: tensors[name] for name in part}, directory / file_name, metadata)
        weight_map |= {name: file_name for name in part}
    total_size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def write_model(name: str, source: str, config: dict, dtype: torch.dtype, num_shards: int):
    """Writes config.json and the weights of `source` under `name`; returns transformers' model."""
    directory = MODELS_DIR / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    config = {"torch_dtype": str(dtype).removeprefix("torch.")} | config
    if "dtype" in config:
        del config["torch_dtype"]
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    # A model of transformers' own random weights tells the tensors' names and shapes.
    skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    tied = config["tie_word_embeddings"]
    tensors = {
        tensor: random_tensor(source, tied, tensor, parameter.shape).to(dtype)
        for tensor, parameter in skeleton.state_dict().items()
        if not (tied and tensor == "lm_head.weight")
    }
    if source == "mha":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        inv_freq = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        for layer in range(config["num_hidden_layers"]):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = inv_freq.clone()
    write_weights(directory, tensors, num_shards)

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    return model.eval()


def freeze_dynamic_rope(model, max_model_len: int) -> None:
    """Takes the table that `dynamic` would have at max_model_len, for all positions."""
    rotary = model.model.rotary_emb
    inv_freq, scaling = ROPE_INIT_FUNCTIONS["dynamic"](model.config, "cpu", seq_len=max_model_len)
    rotary.inv_freq, rotary.attention_scaling = inv_freq, scaling
    rotary.rope_type = "default"


@torch.no_grad()
def logits_of(model, token_ids: list) -> torch.Tensor:  # [tokens, vocab]
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def top2_gap(row: torch.Tensor) -> float:
    best = row.topk(2).values
    return float(best[0] - best[1])


def make_prompts(name: str, vocab_size: int, lengths: list) -> dict:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    prompts = {
        f"random-{n}": torch.randint(0, vocab_size, (n,), generator=generator).tolist()
        for n in lengths
    }
    prompts["last-ids"] = [vocab_size - 3, vocab_size - 2, vocab_size - 1]
    return prompts


def write_expectations(
    json_path: pathlib.Path,
    logits_path: pathlib.Path,
    model,
    prompts_of: str,
    lengths: list,
    max_model_len: int,
    router_margins_of=None,
) -> dict:
    """Writes what `model` says of the prompts named `prompts_of`; returns figures for the log.

    `router_margins_of` gives the margin of each position of a list of tokens, for models with experts.
    """
    vocab_size = model.config.vocab_size
    rows, prompts, gaps, noise = [], [], [], 0.0
    exact = torch.nn.Module.double(model)  # the model's own refuses what came from GGUF
    prompt_ids = make_prompts(prompts_of, vocab_size, lengths)
    exact_logits = {key: logits_of(exact, ids) for key, ids in prompt_ids.items()}
    model = torch.nn.Module.float(model)
    for key, token_ids in prompt_ids.items():
        logits = logits_of(model, token_ids)
        spread = float(logits.max() - logits.min())
        noise = max(noise, float((logits.double() - exact_logits[key]).abs().max()) / spread)
        greedy, greedy_gaps = [], []
        for _ in range(GREEDY_TOKENS):
            last = logits_of(model, token_ids + greedy)[-1]
            greedy.append(int(last.argmax()))
            greedy_gaps.append(top2_gap(last))
        prompts.append(
            {
                "id": key,
                "token_ids": token_ids,
                "logits_row": sum(len(r) for r in rows),
                "greedy_token_ids": greedy,
                "greedy_top2_gaps": [round(g, 5) for g in greedy_gaps],
            }
        )
        if router_margins_of is not None:
            margins = [round(m, 5) for m in router_margins_of((token_ids + greedy)[:-1])]
            prompts[-1]["router_margins"] = margins[: len(token_ids)]
            prompts[-1]["greedy_router_margins"] = margins[len(token_ids) - 1 :]
        rows.append(logits)
        gaps += greedy_gaps
    logits = torch.cat(rows)
    rotary = model.model.rotary_emb
    expectations = {
        "max_model_len": max_model_len,
        "vocab_size": vocab_size,
        "num_logits_rows": len(logits),
        "rope_inv_freq": [float(f) for f in rotary.inv_freq],
        "rope_attention_scaling": float(rotary.attention_scaling),
        "prompts": prompts,
    }
    lines = json.dumps(expectations, indent=1)
    json_path.write_text(compact_number_lists(lines) + "\n")
    logits_path.write_bytes(logits.numpy().astype("<f4").tobytes())
    return {"noise": noise, "min_gap": min(gaps), "spread": float(logits.max() - logits.min())}


def compact_number_lists(text: str) -> str:
    """Puts each list of numbers on one line."""
    return re.sub(
        r"\[\s*(-?[\d.][^\[\]{}\"]*?)\s*\]",
        lambda m: "[" + ", ".join(part.strip() for part in m.group(1).split(",")) + "]",
        text,
    )


def attention_entropy(model, token_ids: list) -> float:
    """Mean entropy of the last position's attention over that of a uniform one."""
    with torch.no_grad():
        out = model(torch.tensor([token_ids]), output_attentions=True, use_cache=False)
    last = torch.stack(out.attentions)[:, 0, :, -1]  # [layers, heads, positions]
    entropy = -(last * last.clamp_min(1e-30).log()).sum(-1)
    return float(entropy.mean() / torch.log(torch.tensor(float(len(token_ids)))))


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(2)
    wanted = sys.argv[1:] or [*MODELS, *TWO_SHARDS]
    for name in wanted:
        source = TWO_SHARDS.get(name, name)
        config, dtype = MODELS[source]
        model = write_model(name, source, config, dtype, 2 if name in TWO_SHARDS else 1)
        max_model_len = MAX_MODEL_LEN.get(name, config["max_position_embeddings"])
        if name in MAX_MODEL_LEN:
            freeze_dynamic_rope(model, max_model_len)
        lengths = [1, 33, 210] if name.startswith("rope-") else [1, 2, 7, 16, 64]
        directory = MODELS_DIR / name
        figures = write_expectations(
            directory / "expect.json",
            directory / "logits.f32",
            model,
            source,
            lengths,
            max_model_len,
        )
        figures["attention entropy"] = attention_entropy(model, list(range(1, 33)))
        size = sum(f.stat().st_size for f in directory.iterdir())
        print(f"{name:16} {size // 1024:4} KiB", {k: f"{v:.2g}" for k, v in figures.items()})


if __name__ == "__main__":
    main()
