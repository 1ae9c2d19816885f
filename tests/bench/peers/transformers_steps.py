#!/usr/bin/env python3
"""Decodes on command with transformers, as ../decode_steps.cc does with heddle.

Usage: transformers_steps.py MODEL BATCH CONTEXT THREADS DTYPE [CACHE [ATTENTION [EXPERTS]]]

CACHE is static (as large as needed, from the start) or dynamic; ATTENTION sdpa or eager; EXPERTS
eager, batched_mm or grouped_mm. The line "logits ID,ID,..." writes the logits of these tokens as
float32 [tokens, vocab] to the file logits.bin of the current directory.
"""

import json
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

MOST_STEPS = 56


class Decoder:
    def __init__(self, model, batch: int, context: int, static: bool):
        self.model, self.batch, self.context, self.static = model, batch, context, static
        self.random = torch.Generator().manual_seed(1)
        if static:
            self.cache = StaticCache(config=model.config, max_cache_len=context + MOST_STEPS)
        else:
            self.cache = DynamicCache(config=model.config)
        self.fill()

    def fill(self) -> None:
        """Computes one context and stores it for every sequence: what a step takes does not depend
        on the values."""
        one = DynamicCache(config=self.model.config)
        self.model(self.tokens(1, self.context), cache=one, use_cache=True)
        for number, layer in enumerate(one.layers):
            every = lambda values: values.expand(self.batch, -1, -1, -1).contiguous()
            self.cache.update(every(layer.keys), every(layer.values), number)
            layer.keys = layer.values = None

    def tokens(self, rows: int, cols: int) -> torch.Tensor:
        return torch.randint(self.model.config.vocab_size, (rows, cols), generator=self.random)

    def rewind(self) -> None:
        if not self.static:
            too_many = self.cache.get_seq_length() - self.context
            if too_many > 0:
                self.cache.crop(-too_many)
            return
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)

    def run(self, num_steps: int) -> list[float]:
        self.rewind()
        seconds = []
        for step in range(num_steps):
            tokens = self.tokens(self.batch, 1)
            places = torch.full((self.batch, 1), self.context + step)
            start = time.perf_counter()
            logits = self.model(
                tokens, position_ids=places, cache=self.cache, use_cache=True
            ).logits
            seconds.append(time.perf_counter() - start)
            assert logits.shape[:2] == (self.batch, 1)
        assert self.cache.get_seq_length() == self.context + num_steps
        return seconds


@torch.inference_mode()
def main() -> None:
    path, batch, context, threads, dtype = sys.argv[1:6]
    cache, attention, experts = sys.argv[6:] + ["static", "sdpa", "grouped_mm"][len(sys.argv) - 6 :]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation=attention,
        experts_implementation=experts,
    ).eval()
    decoder = Decoder(model, int(batch), int(context), cache == "static")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if line.startswith("logits "):
            ids = torch.tensor([[int(text) for text in line.split()[1].split(",")]])
            model(ids).logits[0].float().numpy().astype(np.float32).tofile("logits.bin")
            print("{}", flush=True)
        else:
            print(json.dumps(decoder.run(int(line))), flush=True)


if __name__ == "__main__":
    main()
