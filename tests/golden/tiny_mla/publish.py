#!/usr/bin/env python3
"""Writes the model directory and greedy.json: publish.py TEXT STATE_DIR MODEL_DIR

TEXT and STATE_DIR are those of train.py. Everything is measured on what was written: the bfloat16
weights, widened and computed in float32.
"""

import lzma
import pathlib
import string
import sys

import torch
from bpe import BOS_ID, chapter_ids, write_tokenizer
from corpus import join, read_corpus
from model import MAX_LENGTH, bits, make_model
from safetensors import safe_open
from tokenizers import Tokenizer
from train import stream_nats
from transformers import AutoModelForCausalLM, GenerationConfig

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from oracle import describe, perplexity, window_nats, write_json  # noqa: E402

EXCERPT_BYTES = 65536
GREEDY_TOKENS = 48
SAMPLE_TOKENS = 220
PROMPTS = {
    "one-word": "And",
    "beginning": "In the beginning",
    "came-to-pass": "And it came to pass in those days, that",
    "genealogy": "And Arphaxad lived five and thirty years, and begat Salah:\nAnd",
    "speech": "Then said Jesus unto his disciples,",
    "psalm": "Psalms 23\n\n",
    "proverb": "A wise son maketh a glad father:",
    "law": "And the LORD spake unto Moses, saying,\nSpeak unto the children of Israel, and",
    "modern": "The engine of the locomotive was started at 12:45, and",
    "held-out": "Revelation 1\n\nThe Revelation of Jesus Christ, which God gave unto him, to shew",
}
SAMPLES = ["And it came to pass", "Psalms 151\n\n"]


def excerpt(text: str) -> str:
    """The first lines of the text, at most EXCERPT_BYTES of them."""
    return text[: text.rindex("\n", 0, EXCERPT_BYTES) + 1]


def write_weights(state_dir: pathlib.Path, model_dir: pathlib.Path) -> dict:
    """Returns what train.py noted of the weights."""
    best = torch.load(state_dir / "best.pt")
    model = make_model()
    model.load_state_dict(best["model"])
    # All of them, as DeepSeek stores them; transformers keeps the routers in float32 otherwise.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(model_dir)
    (model_dir / "model.safetensors").chmod(0o644)
    with safe_open(model_dir / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert "model.layers.1.mlp.experts.7.gate_proj.weight" in names, "experts are fused"
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    return best["about"]


@torch.no_grad()
def sample(model, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    torch.manual_seed(seed)
    ids = [BOS_ID, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    tokens = torch.tensor([ids])
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        max_new_tokens=SAMPLE_TOKENS,
    )
    return tokenizer.decode(output[0].tolist(), skip_special_tokens=True).strip()


def main() -> None:
    text_path, state_dir, model_dir = (pathlib.Path(argument) for argument in sys.argv[1:])
    torch.set_num_threads(2)
    model_dir.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus(text_path)
    tokenizer = Tokenizer.from_file(str(state_dir / "tokenizer.json"))
    write_tokenizer(tokenizer, model_dir, MAX_LENGTH)
    about = write_weights(state_dir, model_dir)
    model, info = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    model.eval()

    held_out = join(corpus.held_out)
    packed = len(lzma.compress(held_out.encode(), preset=9))
    nats = stream_nats(model, chapter_ids(tokenizer, corpus.held_out), MAX_LENGTH, MAX_LENGTH // 2)
    part = excerpt(held_out)
    (model_dir / "heldout.txt").write_text(part, encoding="ascii")
    part_ids = tokenizer.encode(part, add_special_tokens=False).ids
    part_nats, part_scored = window_nats(model, part_ids, MAX_LENGTH)

    prompts = []
    for key, text in PROMPTS.items():
        ids = [BOS_ID, *tokenizer.encode(text, add_special_tokens=False).ids]
        prompts.append(describe(model, key, text, ids, GREEDY_TOKENS))
    text_file = "../../../configs/models/tiny-mla/heldout.txt"
    head = {"perplexity": perplexity(model, part_ids, text_file, MAX_LENGTH)}
    write_json(HERE / "greedy.json", head, "prompts", prompts)

    num_parameters = sum(p.numel() for p in model.parameters())
    facts = {
        "parameters": f"{num_parameters:,}",
        "core_minutes": f"{about['core_minutes']:.0f}",
        "steps": f"{about['step']:,}",
        "train_bytes": f"{len(join(corpus.train)):,}",
        "validation_bytes": f"{len(join(corpus.validation)):,}",
        "held_out_bytes": f"{len(held_out):,}",
        "held_out_begin": corpus.held_out[0].split("\n")[0],
        "held_out_bits": f"{bits(nats) / len(held_out):.3f}",
        "xz_bytes": f"{packed:,}",
        "xz_bits": f"{8 * packed / len(held_out):.3f}",
        "excerpt_bytes": f"{len(part):,}",
        "excerpt_tokens": f"{len(part_ids):,}",
        "excerpt_scored": f"{part_scored:,}",
        "excerpt_bits": f"{bits(part_nats) / scored_bytes(tokenizer, part_ids):.4f}",
        "excerpt_perplexity": str(head["perplexity"]["value"]),
        "samples": "\n\n".join(
            f"```\n{sample(model, tokenizer, prompt, seed=1)}\n```" for prompt in SAMPLES
        ),
    }
    readme = string.Template((HERE / "readme.in.md").read_text(encoding="utf-8"))
    (model_dir / "README.md").write_text(readme.substitute(facts), encoding="utf-8")
    for name, value in facts.items():
        print(f"{name}: {value}")


def scored_bytes(tokenizer: Tokenizer, ids: list) -> int:
    """Of the tokens that window_nats scores."""
    return sum(
        len(tokenizer.decode(ids[begin + 1 : begin + MAX_LENGTH]))
        for begin in range(0, len(ids), MAX_LENGTH)
    )


if __name__ == "__main__":
    main()
