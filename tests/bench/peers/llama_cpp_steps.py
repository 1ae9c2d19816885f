#!/usr/bin/env python3
"""Decodes on command with llama.cpp, as ../decode_steps.cc does with heddle.

Usage: llama_cpp_steps.py MODEL.gguf BATCH CONTEXT THREADS [FLASH_ATTENTION [CACHE_DTYPE]]

FLASH_ATTENTION is 0 or 1, CACHE_DTYPE f16 or f32. The line "logits ID,ID,..." writes the logits of
these tokens as float32 [tokens, vocab] to the file logits.bin of the current directory.
"""

import ctypes
import json
import random
import sys
import time

import llama_cpp as llama
import numpy as np


class Decoder:
    def __init__(self, path: str, batch: int, context: int, threads: int, flash: int, dtype: str):
        self.batch, self.context = batch, context
        self.random = random.Random(1)
        self.model = llama.llama_model_load_from_file(
            path.encode(), llama.llama_model_default_params()
        )
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        params = llama.llama_context_default_params()
        params.n_ctx = batch * (context + 256)
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = flash
        kinds = {"f32": llama.GGML_TYPE_F32, "f16": llama.GGML_TYPE_F16}
        params.type_k = params.type_v = kinds[dtype]
        params.kv_unified = False  # each sequence has keys and values of its own
        self.handle = llama.llama_init_from_model(self.model, params)
        self.memory = llama.llama_get_memory(self.handle)
        self.tokens = llama.llama_batch_init(max(512, batch), 0, 1)

    def decode(self, rows: list[tuple[int, int, int]], with_logits: bool) -> None:
        """Runs a step of `rows` of (token, position, sequence)."""
        tokens = self.tokens
        tokens.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            tokens.token[i], tokens.pos[i] = token, position
            tokens.n_seq_id[i], tokens.seq_id[i][0] = 1, sequence
            tokens.logits[i] = with_logits
        error = llama.llama_decode(self.handle, tokens)
        assert error == 0, error

    def logits(self, rows: int) -> np.ndarray:  # [rows, vocab]
        return np.ctypeslib.as_array(llama.llama_get_logits(self.handle), (rows, self.vocab_size))

    def token(self) -> int:
        return self.random.randrange(self.vocab_size)

    def fill(self) -> None:
        """Computes one context and copies it to every sequence: what a step takes does not depend
        on the values."""
        for start in range(0, self.context, 512):
            places = range(start, min(start + 512, self.context))
            self.decode([(self.token(), place, 0) for place in places], False)
        for sequence in range(1, self.batch):
            llama.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)

    def run(self, num_steps: int) -> list[float]:
        for sequence in range(self.batch):
            llama.llama_memory_seq_rm(self.memory, sequence, self.context, -1)
        seconds = []
        for step in range(num_steps):
            place = self.context + step
            rows = [(self.token(), place, sequence) for sequence in range(self.batch)]
            start = time.perf_counter()
            self.decode(rows, True)
            self.logits(self.batch)[0, 0]  # waits for the end of the step
            seconds.append(time.perf_counter() - start)
        return seconds

    def write_logits(self, ids: list[int]) -> None:
        llama.llama_memory_clear(self.memory, True)
        self.decode([(token, place, 0) for place, token in enumerate(ids)], True)
        self.logits(len(ids)).tofile("logits.bin")


@llama.llama_log_callback
def on_log(level, text, user_data):
    if level == 4:  # errors
        sys.stderr.write(text.decode())


def main() -> None:
    path, batch, context, threads = sys.argv[1:5]
    flash, dtype = sys.argv[5:] + ["1", "f16"][len(sys.argv) - 5 :]
    llama.llama_log_set(on_log, ctypes.c_void_p(0))
    llama.llama_backend_init()
    decoder = Decoder(path, int(batch), int(context), int(threads), int(flash), dtype)
    decoder.fill()
    system = llama.llama_print_system_info().decode()
    print(json.dumps({"ready": True, "system": system}), flush=True)
    for line in sys.stdin:
        if line.startswith("logits "):
            decoder.write_logits([int(text) for text in line.split()[1].split(",")])
            print("{}", flush=True)
        else:
            print(json.dumps(decoder.run(int(line))), flush=True)


if __name__ == "__main__":
    main()
