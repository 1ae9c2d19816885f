#!/usr/bin/env python3
"""How long heddle's decode steps take beside those of transformers and llama.cpp, in one run.

  python3 -m venv /tmp/peers && /tmp/peers/bin/pip install -r tests/bench/peers/requirements.txt
  cmake --build build --target heddle decode_steps
  /tmp/peers/bin/python tests/bench/peers/make_model.py /tmp/peers/model
  /tmp/peers/bin/python tests/bench/peers/compare.py check /tmp/peers/model
  /tmp/peers/bin/python tests/bench/peers/compare.py time /tmp/peers/model \
      heddle llama_cpp transformers --batch 64 --context 512 --steps 8 8 1

`check` compares the logits of all engines on the same tokens. `time` starts the engines, lets them
take turns and prints the median over the rounds of what a step of each takes over what a step of
the first takes (both the median of their turn). A step decodes one token of each of `batch`
sequences, each with `context` cached tokens of its own; filling the caches is not timed. Sampling
counts for heddle alone.

An engine is a name and its options, as in transformers:bfloat16:static:sdpa:grouped_mm,
llama_cpp:bf16:1:f16 or heddle:bfloat16 (the type of its cache); the defaults are what was fastest.
`mla` and `mha` are heddle with dense models of random weights that differ in their attention.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
BUILD = HERE.parents[2] / "build"
VOCAB_SIZE = 32768  # as make_model.py

# V2-Lite's width with a dense feed-forward block, and the same with keys and values of 128 for
# each of its 16 heads.
MLA = json.loads((HERE.parents[2] / "configs/models/deepseek-v2-lite/config.json").read_text()) | {
    "intermediate_size": 5504,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "vocab_size": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_scaling": None,
}
MHA = {key: MLA[key] for key in (
    "hidden_act", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "tie_word_embeddings", "torch_dtype",
)} | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 128}


def command(engine: str, model: pathlib.Path, batch: int, context: int, threads: int) -> list[str]:
    name, *options = engine.split(":")
    shape = [str(batch), str(context), str(threads)]
    if name == "transformers":
        script, path = HERE / "transformers_steps.py", model / "hf"
        return [sys.executable, str(script), str(path), *shape, *(options or ["float32"])]
    if name == "llama_cpp":
        weights, *options = options or ["bf16"]
        script, path = HERE / "llama_cpp_steps.py", model / f"{weights}.gguf"
        return [sys.executable, str(script), str(path), *shape, *options]
    path = model / "hf"
    if name in ("mla", "mha"):
        path = model / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(MLA if name == "mla" else MHA))
    elif name != "heddle":
        sys.exit(f"unknown engine {name}: heddle, mla, mha, transformers or llama_cpp")
    program = BUILD / "tests/bench/decode_steps"
    return [str(program), str(path), *shape, "1", *(options or ["float32"])]


class Engine:
    """A process that answers each line."""

    def __init__(self, arguments: list[str], directory: str | None = None):
        self.process = subprocess.Popen(
            arguments, cwd=directory, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.ready = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args} ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self, line: str):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def heddle_logits(model: pathlib.Path, ids: list[int], directory: str) -> np.ndarray:
    path = pathlib.Path(directory) / "ids.jsonl"
    path.write_text(json.dumps({"id": "0", "token_ids": ids}))
    arguments = [str(BUILD / "heddle"), "score", "--model", str(model / "hf"), "--logits",
                 "--max-model-len", "256", "--input", str(path), "--output", "-"]
    line = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    return np.array(json.loads(line)["logits"], np.float32).reshape(len(ids), -1)


def check(model: pathlib.Path, threads: int) -> None:
    """Prints, for each engine, its logits' largest distance from heddle's in standard deviations of
    the logits, and at how many positions both have the same greedy token."""
    numbers = random.Random(2)
    ids = [numbers.randrange(VOCAB_SIZE) for _ in range(128)]
    with tempfile.TemporaryDirectory() as directory:
        ours = heddle_logits(model, ids, directory)
        for name in ("transformers:float32", "transformers:bfloat16", "llama_cpp:f32:0:f32",
                     "llama_cpp:f32:1:f16", "llama_cpp:bf16:1:f16"):
            engine = Engine(command(name, model, 1, 256, threads), directory)
            engine.ask("logits " + ",".join(map(str, ids)))
            engine.close()
            theirs = np.fromfile(pathlib.Path(directory) / "logits.bin", np.float32)
            theirs = theirs.reshape(ours.shape)
            distance = np.abs(theirs - ours)
            same = (theirs.argmax(1) == ours.argmax(1)).sum()
            print(f"{name:28} largest distance {distance.max() / ours.std():.1e}, mean "
                  f"{distance.mean() / ours.std():.1e}; greedy tokens equal {same}/{len(ids)}")


def take_turns(engines: list[Engine], rounds: int, steps: list[int]) -> list[list[float]]:
    """For each engine the median seconds of a step, by round."""
    medians = [[] for _ in engines]
    for _ in range(rounds):
        for engine, count, own in zip(engines, steps, medians):
            own.append(statistics.median(engine.ask(str(count))))
    return medians


def compare(arguments) -> None:
    shape = (arguments.model, arguments.batch, arguments.context, arguments.threads)
    engines = [Engine(command(name, *shape)) for name in arguments.engines]
    take_turns(engines, 1, [1] * len(engines))  # touches everything once
    medians = take_turns(engines, arguments.rounds, arguments.steps * len(engines))
    print(f"batch {arguments.batch}, context {arguments.context}")
    for name, engine, own in zip(arguments.engines, engines, medians):
        ratios = sorted(theirs / ours for ours, theirs in zip(medians[0], own))
        cached = engine.ready.get("kv_bytes_per_token")
        print(f"{name:32} {1e3 * statistics.median(own):9.2f} ms a step, "
              f"{statistics.median(ratios):6.2f} times the first's "
              f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
              + (f", {cached} bytes a cached token" if cached else ""), flush=True)
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=["check", "time"])
    parser.add_argument("model", type=pathlib.Path, help="what make_model.py wrote")
    parser.add_argument("engines", nargs="*", default=["heddle", "llama_cpp", "transformers"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, nargs="+", default=[8],
                        help="of a turn, for each engine or for all")
    arguments = parser.parse_args()
    arguments.model = arguments.model.resolve()
    if arguments.action == "check":
        check(arguments.model, arguments.threads)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
