#!/usr/bin/env python3
"""Trains the tiny MLA model: train.py TEXT STATE_DIR [--core-minutes M] [--minutes M]

TEXT is what fetch_text.sh wrote. STATE_DIR takes the tokenizer, the newest state (from which a run
that was stopped goes on) and the best weights; publish.py makes the model directory of it. The
schedule follows the processor time used, so that it matters little what else the machine does;
--minutes bounds the time by the clock besides, and the schedule ends by then.
"""

import argparse
import math
import os
import pathlib
import time

import torch
import torch.nn.functional as F
from bpe import BOS_ID, chapter_ids, train_tokenizer
from corpus import join, read_corpus
from model import LoadBalance, bits, make_model, make_optimizers

BATCH_TOKENS = 4096
WARM_UP_STEPS = 40
DECAY_SHARE = 0.6  # of the time, at its end: the learning rate falls to zero in a line
BALANCE_WEIGHT = 0.01
SECONDS_BETWEEN_SAVES = 180
CORE_SECONDS_BETWEEN_VALIDATIONS = 150
# From this share of the time on, rows of so many tokens.
ROW_LENGTHS = [(0.0, 256), (0.4, 512), (0.8, 1024)]


class Rows:
    """Rows of a token stream, each token once an epoch, cut and ordered anew in each.

    Half of the rows begin with BOS in place of their first token, as prompts do.
    """

    def __init__(self, stream: torch.Tensor):
        self.stream = stream
        self.epoch, self.length, self.pending = 0, 0, []

    def take(self, length: int) -> torch.Tensor:  # [rows, length + 1]
        num_rows = BATCH_TOKENS // length
        if length != self.length or len(self.pending) < num_rows:
            generator = torch.Generator().manual_seed(self.epoch)
            shift = int(torch.randint(length, (1,), generator=generator))
            begins = torch.arange(shift, len(self.stream) - length, length)
            self.pending = begins[torch.randperm(len(begins), generator=generator)].tolist()
            self.length = length
            self.epoch += 1
        begins, self.pending = self.pending[:num_rows], self.pending[num_rows:]
        rows = torch.stack([self.stream[begin : begin + length + 1] for begin in begins])
        rows[torch.rand(num_rows) < 0.5, 0] = BOS_ID
        return rows

    def state(self) -> dict:
        return {"epoch": self.epoch, "length": self.length, "pending": self.pending}

    def resume(self, state: dict) -> None:
        self.epoch, self.length, self.pending = state["epoch"], state["length"], state["pending"]


@torch.no_grad()
def stream_nats(model, ids: list, window: int, stride: int) -> float:
    """Of every token but the first, each given at least window - stride others, where there are."""
    total, scored = 0.0, 1
    for begin in range(0, len(ids), stride):
        row = torch.tensor(ids[begin : begin + window])
        logits = model(row[None], use_cache=False).logits[0].float()
        first = scored - begin
        total += float(F.cross_entropy(logits[first - 1 : -1], row[first:], reduction="sum"))
        scored = begin + len(row)
        if scored == len(ids):
            return total
    raise AssertionError("windows leave a gap")


def save_whole(value, path: pathlib.Path) -> None:
    """So that a run that is killed meanwhile leaves the old file."""
    torch.save(value, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def rate(step: int, progress: float) -> float:
    """Of the full learning rate: a short rise, level, and down to zero."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, (1 - progress) / DECAY_SHARE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("state_dir", type=pathlib.Path)
    parser.add_argument("--core-minutes", type=float, default=150)
    parser.add_argument("--minutes", type=float, default=math.inf)
    arguments = parser.parse_args()
    state_dir = arguments.state_dir
    state_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    torch.manual_seed(1)

    corpus = read_corpus(arguments.text)
    tokenizer = train_tokenizer(corpus.train)
    tokenizer.save(str(state_dir / "tokenizer.json"))
    rows = Rows(torch.tensor(chapter_ids(tokenizer, corpus.train)))
    validation = chapter_ids(tokenizer, corpus.validation)
    validation_bytes = len(join(corpus.validation))

    model = make_model()
    model.set_experts_implementation("grouped_mm")  # quicker, and the same
    optimizers = make_optimizers(model)
    full_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    balance = LoadBalance(model)
    # Seconds of the processors and of the clock.
    used, elapsed, step, best = 0.0, 0.0, 0, math.inf
    if (state_dir / "newest.pt").exists():
        state = torch.load(state_dir / "newest.pt")
        model.load_state_dict(state["model"])
        for optimizer, optimizer_state in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(optimizer_state)
        rows.resume(state["rows"])
        torch.set_rng_state(state["rng"])
        used, elapsed = state["used"], state["elapsed"]
        step, best = state["step"], state["best"]
        print(f"going on at step {step}, core-minute {used / 60:.1f}", flush=True)
    used_before, begin = used - time.process_time(), time.monotonic() - elapsed

    def validate() -> None:
        nonlocal best
        model.eval()
        value = bits(stream_nats(model, validation, window=1024, stride=512)) / validation_bytes
        model.train()
        balance.take()
        print(
            f"step {step} core-minute {used / 60:.1f} minute {elapsed / 60:.1f} "
            f"epoch {rows.epoch} length {rows.length} loss {float(loss.detach()):.3f} "
            f"least expert share {least_share:.3f} validation {value:.4f} bits/byte",
            flush=True,
        )
        if value < best:
            best = value
            about = {"step": step, "core_minutes": used / 60, "validation": value}
            save_whole({"model": model.state_dict(), "about": about}, state_dir / "best.pt")

    def save() -> None:
        state = {
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "rows": rows.state(),
            "rng": torch.get_rng_state(),
            "used": used,
            "elapsed": elapsed,
            "step": step,
            "best": best,
        }
        save_whole(state, state_dir / "newest.pt")

    model.train()
    validated, saved = used, elapsed
    progress = max(used / 60 / arguments.core_minutes, elapsed / 60 / arguments.minutes)
    while progress < 1:
        for optimizer, rates in zip(optimizers, full_rates):
            for group, full_rate in zip(optimizer.param_groups, rates):
                group["lr"] = full_rate * rate(step, progress)
        length = [length for since, length in ROW_LENGTHS if progress >= since][-1]
        batch = rows.take(length)
        logits = model(batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        balance_loss, least_share = balance.take()
        (loss + BALANCE_WEIGHT * balance_loss).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        used, elapsed = used_before + time.process_time(), time.monotonic() - begin
        progress = max(used / 60 / arguments.core_minutes, elapsed / 60 / arguments.minutes)
        if used - validated > CORE_SECONDS_BETWEEN_VALIDATIONS or progress >= 1:
            validate()
            validated = used
        if elapsed - saved > SECONDS_BETWEEN_SAVES or progress >= 1:
            save()
            saved = elapsed


if __name__ == "__main__":
    main()
