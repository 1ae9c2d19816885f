#!/usr/bin/env python3
"""The program as users start it: arguments in; stdout, stderr, files and an exit code out.

usage: program_test.py MPIEXEC HEDDLE MODELS [unittest arguments]
"""

import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import uuid
import xml.etree.ElementTree

# Start and end of mpirun itself, on a machine that is busy with other tests.
LAUNCH_SECONDS = 10
ALONE = 0  # as a number of ranks: started without mpirun

mpiexec, heddle, models = "", "", ""

PROMPTS = [
    {"id": "b", "prompt_token_ids": [1, 5, 9, 200, 3]},
    {"id": "a", "prompt_token_ids": [7], "max_tokens": 24},
    {"id": "b", "prompt_token_ids": [256, 257, 258, 0] * 9, "max_tokens": 2},
    {"id": 17, "prompt_token_ids": [4, 4, 4], "temperature": 0.9, "top_k": 40, "top_p": 0.9,
     "seed": 5},
    {"prompt_token_ids": [40, 41, 42], "repetition_penalty": 1.3},
]


def command(num_ranks, arguments):
    program = [heddle, *map(str, arguments)]
    return program if num_ranks == ALONE else [mpiexec, "-n", str(num_ranks), *program]


def messages(stderr):
    """What the program says is wrong: neither its log nor what mpirun adds about exit codes."""
    said, of_mpirun = [], False
    for line in stderr.splitlines():
        if re.fullmatch(r"-{20,}", line):
            of_mpirun = not of_mpirun
        elif not of_mpirun and not re.match(r"\[rank \d+ \S+\] [IW] \w+\.cc:\d+\]", line):
            said.append(line)
    return said


class Job:
    """A job whose ranks can be found and signalled while it runs."""

    def __init__(self, num_ranks, arguments):
        self.mark = f"HEDDLE_PROGRAM_TEST={uuid.uuid4()}"
        key, value = self.mark.split("=")
        self.process = subprocess.Popen(
            command(num_ranks, arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, env={**os.environ, key: value})

    def pids(self, also=""):
        """The job's live processes, by what is in their environment."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    variables = file.read().decode(errors="replace").split("\0")
                with open(f"/proc/{pid}/stat") as file:
                    state = file.read().rpartition(")")[2].split()[0]
            except OSError:  # ended in between
                continue
            if self.mark in variables and (not also or also in variables) and state not in "ZX":
                found.append(int(pid))
        return found

    def rank(self, rank):
        (pid,) = self.pids(f"OMPI_COMM_WORLD_RANK={rank}")
        return pid

    def wait_for(self, text):
        for line in self.process.stderr:
            if text in line:
                return
        raise AssertionError(f"the job ended without saying {text!r}")

    def end(self, seconds):
        """stderr from here on, and the exit code; the job must end in so many seconds."""
        try:
            _, stderr = self.process.communicate(timeout=seconds)
        finally:
            for pid in self.pids() if self.process.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
        return stderr, self.process.returncode


class ProgramTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name, text=None):
        path = os.path.join(self.folder, name)
        if text is not None:
            with open(path, "w") as file:
                file.write(text)
        return path

    def rows(self, rows, name="prompts.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        return self.path(name, "".join(line + "\n" for line in lines))

    def changed_model(self, tensor, rows, value, model="gqa-a"):
        """A copy of the model (float32) whose tensor holds the value in these rows."""
        copy = self.path(f"{model}-{tensor}-{value}")
        shutil.copytree(os.path.join(models, model), copy)
        with open(os.path.join(copy, "model.safetensors"), "r+b") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            info = json.loads(file.read(header_bytes))[tensor]
            width = math.prod(info["shape"][1:])
            self.assertEqual(info["dtype"], "F32")
            for row in rows:
                file.seek(8 + header_bytes + info["data_offsets"][0] + 4 * width * row)
                file.write(struct.pack("<f", value) * width)
        return copy

    def run_heddle(self, num_ranks, *arguments, exit_code=0, environment=None):
        """stdout and stderr."""
        done = subprocess.run(command(num_ranks, arguments), capture_output=True, text=True,
                              timeout=120, env={**os.environ, **(environment or {})})
        self.assertEqual(done.returncode, exit_code, done.stderr)
        return done.stdout, done.stderr

    def generate(self, num_ranks, rows, *flags, model="gqa-a", **options):
        """The result lines. Auto would take some time to measure the machine."""
        if "--decode-context-parallel-size" not in flags:
            flags = ("--decode-context-parallel-size", 1, *flags)
        stdout, _ = self.run_heddle(
            num_ranks, "generate", "--model", os.path.join(models, model), "--prompt-file",
            self.rows(rows), "--temperature", 0, "--num-kv-pages", 64, *flags, **options)
        return [json.loads(line) for line in stdout.splitlines()]

    def token_ids(self, lines):
        return [line["token_ids"] for line in lines]


class GenerateTest(ProgramTest):
    def test_auto_says_what_it_chose_and_gives_the_same_lines(self):
        fixed = self.generate(2, PROMPTS, "--ignore-eos", model="mqa")
        stdout, stderr = self.run_heddle(
            2, "generate", "--model", os.path.join(models, "mqa"), "--prompt-file",
            self.rows(PROMPTS), "--temperature", 0, "--num-kv-pages", 64, "--ignore-eos",
            "--expected-context-len", 32)
        self.assertEqual(self.token_ids(map(json.loads, stdout.splitlines())),
                         self.token_ids(fixed))
        self.assertEqual(stderr.count("--decode-context-parallel-size auto is "), 1, stderr)
        self.assertIn("for 64 sequences of 32 tokens", stderr)

    def test_any_number_of_ranks_gives_the_same_lines_in_input_order(self):
        alone = self.generate(ALONE, PROMPTS, "--ignore-eos")
        self.assertEqual([line["id"] for line in alone], ["b", "a", "b", "17", "4"])
        self.assertEqual([len(line["token_ids"]) for line in alone], [16, 24, 2, 16, 16])
        for line, row in zip(alone, PROMPTS):
            self.assertEqual(line["prompt_token_ids"], row["prompt_token_ids"])
            self.assertEqual(line["finish_reason"], "length")
            self.assertNotIn("error", line)
            self.assertNotIn("index", line)
        for num_ranks in (1, 2, 3, 5):
            with self.subTest(num_ranks=num_ranks):
                # Equal as wholes: a second line of another rank would be one too many.
                self.assertEqual(self.generate(num_ranks, PROMPTS, "--ignore-eos"), alone)

    def test_ranks_on_nodes_of_their_own_give_the_same_lines(self):
        expected = self.generate(ALONE, PROMPTS, "--ignore-eos")
        for num_ranks, ranks_per_node in ((2, 1), (5, 2)):
            with self.subTest(num_ranks=num_ranks, ranks_per_node=ranks_per_node):
                lines = self.generate(num_ranks, PROMPTS, "--ignore-eos", environment={
                    "HEDDLE_TEST_RANKS_PER_NODE": str(ranks_per_node)})
                self.assertEqual(lines, expected)

    def test_stripes_and_experts_change_no_token(self):
        """Latent caches striped over ranks; whole experts dealt to them, and whole sequences."""
        prompts = [{**row, "prompt_token_ids": [token % 131 for token in row["prompt_token_ids"]]}
                   for row in PROMPTS]
        alone = self.generate(ALONE, prompts, "--ignore-eos", model="mla-v3")
        for num_ranks, flags in ((4, ["--decode-context-parallel-size", 2]),
                                 (3, ["--decode-context-parallel-size", 3, "--block-size", 3,
                                      "--prefill-chunk", 2]),
                                 (3, ["--enable-expert-parallel"]),
                                 (3, ["--enable-dp-attention", "--enable-expert-parallel"])):
            with self.subTest(num_ranks=num_ranks, flags=flags):
                self.assertEqual(
                    self.generate(num_ranks, prompts, "--ignore-eos", *flags, model="mla-v3"),
                    alone)
        expected = self.generate(ALONE, PROMPTS, "--ignore-eos", model="gqa-odd")
        self.assertEqual(self.generate(4, PROMPTS, "--ignore-eos",
                                       "--decode-context-parallel-size", 2, model="gqa-odd"),
                         expected)

    def test_the_tiny_model_says_what_transformers_says(self):
        """Greedy texts of configs/models/tiny-mla: alone, and on ranks that stripe its latents."""
        root = os.path.join(models, "..", "..", "..")
        with open(os.path.join(root, "tests", "golden", "tiny_mla", "greedy.json")) as file:
            prompts = json.load(file)["prompts"]
        rows = [{"id": prompt["id"], "prompt_token_ids": prompt["token_ids"],
                 "max_tokens": len(prompt["greedy_token_ids"])} for prompt in prompts]
        tiny = os.path.join(root, "configs", "models", "tiny-mla")
        for num_ranks, flags in ((ALONE, []), (2, ["--decode-context-parallel-size", 2]),
                                 (3, ["--enable-expert-parallel", "--enable-dp-attention"])):
            lines = self.generate(num_ranks, rows, "--ignore-eos", *flags, model=tiny)
            compared = 0
            for prompt, line in zip(prompts, lines, strict=True):
                expected, gaps = prompt["greedy_token_ids"], prompt["greedy_top2_gaps"]
                # Past a choice that rounding decides the texts may differ.
                clear = next((i for i, gap in enumerate(gaps) if gap < 1e-3), len(gaps))
                self.assertEqual(line["token_ids"][:clear], expected[:clear])
                compared += clear
            self.assertGreater(compared, 0.8 * sum(row["max_tokens"] for row in rows))

    def test_ranks_without_heads_run(self):
        for model, num_ranks in (("mqa", 5), ("gqa-a", 12)):
            with self.subTest(model=model):
                expected = self.generate(ALONE, PROMPTS[:2], model=model)
                self.assertEqual(self.generate(num_ranks, PROMPTS[:2], model=model), expected)

    def test_bad_rows_become_error_lines_and_the_rest_runs(self):
        good = {"id": "good", "prompt_token_ids": [3, 4], "max_tokens": 4}
        bad = [
            ({"id": "vocabulary", "prompt_token_ids": [3, 259]}, "259"),
            ({"id": "long", "prompt_token_ids": [3] * 200}, "128"),
            ({"id": "typo", "prompt_token_ids": [3], "temprature": 1}, "temprature"),
            ({"id": "nothing"}, "prompt_token_ids"),
            ({"id": "text", "prompt": "no tokenizer here"}, "tokenizer"),
            ({"id": "many", "prompt_token_ids": [3], "logprobs": 1000}, "logprobs"),
            ('{"id": "cut', "not valid JSON"),
        ]
        rows = [good]
        for row, _ in bad:
            rows += [row, good]
        for num_ranks in (ALONE, 3):
            lines = self.generate(num_ranks, rows, exit_code=2)
            self.assertEqual(len(lines), len(rows))
            for line in lines[::2]:
                self.assertEqual((line["id"], len(line["token_ids"])), ("good", 4))
                self.assertEqual(line["token_ids"], lines[0]["token_ids"])
            for line, (row, reason) in zip(lines[1::2], bad):
                with self.subTest(row=row, num_ranks=num_ranks):
                    if isinstance(row, dict):
                        self.assertEqual(line["id"], row["id"])
                    self.assertEqual((line["finish_reason"], line["token_ids"]), ("error", []))
                    self.assertIn(reason, line["error"])

    def test_an_empty_prompt_starts_from_bos(self):
        lines = self.generate(2, [{"prompt_token_ids": []}, {"prompt_token_ids": [1]}])
        self.assertEqual([line["prompt_token_ids"] for line in lines], [[1], [1]])
        self.assertEqual(lines[0]["token_ids"], lines[1]["token_ids"])

    def test_sequences_of_a_prompt_have_an_index(self):
        row = {"id": "many", "prompt_token_ids": [3, 4], "n": 3, "temperature": 1.5, "seed": 7}
        lines = self.generate(2, [PROMPTS[0], row, PROMPTS[1]])
        self.assertEqual([(line["id"], line.get("index")) for line in lines],
                         [("b", None), ("many", 0), ("many", 1), ("many", 2), ("a", None)])
        self.assertEqual(len({tuple(line["token_ids"]) for line in lines[1:4]}), 3)
        self.assertEqual(lines, self.generate(ALONE, [PROMPTS[0], row, PROMPTS[1]]))

    def test_log_probabilities_are_finite_numbers(self):
        def refuse(constant):
            raise AssertionError(f"{constant} is not JSON")

        # One candidate, and so sharp that all others have a probability of 0.
        row = {"prompt_token_ids": [3, 4], "top_k": 1, "temperature": 0.01, "logprobs": 5}
        whole = {"prompt_token_ids": [3, 4], "max_tokens": 1, "logprobs": 259}
        stdout, _ = self.run_heddle(
            2, "generate", "--model", os.path.join(models, "gqa-a"), "--prompt-file",
            self.rows([row, whole]))
        lines = [json.loads(line, parse_constant=refuse) for line in stdout.splitlines()]
        for line, num_top in zip(lines, (5, 259), strict=True):
            self.assertEqual(len(line["logprobs"]), len(line["token_ids"]))
            for token_id, position in zip(line["token_ids"], line["logprobs"]):
                top = [one["logprob"] for one in position["top"]]
                self.assertEqual((position["token_id"], len(top)), (token_id, num_top))
                self.assertEqual(top, sorted(top, reverse=True))
                self.assertTrue(all(math.isfinite(value) and value <= 0 for value in top))
        mass = sum(math.exp(one["logprob"]) for one in lines[1]["logprobs"][0]["top"])
        self.assertAlmostEqual(mass, 1, places=4)

    def test_a_prompt_with_bad_logits_fails_alone(self):
        expected = self.generate(ALONE, PROMPTS, "--ignore-eos")
        used = {i for line in expected for i in line["prompt_token_ids"] + line["token_ids"]}
        bad = next(i for i in range(259) if i not in used)
        for value in (math.nan, math.inf):
            model = self.changed_model("model.embed_tokens.weight", [bad], value)
            for num_ranks in (ALONE, 4):
                with self.subTest(value=value, num_ranks=num_ranks):
                    lines = self.generate(
                        num_ranks, [*PROMPTS, {"id": "bad", "prompt_token_ids": [3, bad, 4]}],
                        "--ignore-eos", model=model, exit_code=1)
                    self.assertEqual(lines[:-1], expected)
                    self.assertEqual((lines[-1]["finish_reason"], lines[-1]["token_ids"]),
                                     ("error", []))
                    self.assertIn("the model gave the logit", lines[-1]["error"])

    def test_results_go_to_the_output_file(self):
        output = self.path("results.jsonl")
        expected = self.generate(ALONE, PROMPTS)
        self.assertEqual(self.generate(2, PROMPTS, "--output", output), [])
        with open(output) as file:
            self.assertEqual([json.loads(line) for line in file], expected)

    def test_flags_beat_the_config_file(self):
        config = self.path("config.yaml", "max_tokens: 3\nignore-eos: true\ntemperature: 0\n")
        for flags, length in (((), 3), (("--max_tokens=5",), 5)):
            lines = self.generate(2, [{"prompt_token_ids": [3]}], "--config", config, *flags)
            self.assertEqual([len(line["token_ids"]) for line in lines], [length])


class RefusalTest(ProgramTest):
    def test_refusals_exit_with_2_and_one_message(self):
        model = os.path.join(models, "gqa-a")
        prompts = ["--prompt-file", self.rows(PROMPTS)]
        cases = [
            (["--model", "/nowhere/model", *prompts], "/nowhere/model"),
            (["--model", model, "--prompt-file", "/nowhere/prompts.jsonl"],
             "/nowhere/prompts.jsonl"),
            (["--model", model], "--prompt"),
            (["--model", model, *prompts, "--output", "/nowhere/results"], "/nowhere/results"),
            (["--model", model, *prompts, "--config", "/nowhere/config.yaml"],
             "/nowhere/config.yaml"),
            (["--model", model, *prompts, "--tensor-parallel-size", 7], "mpirun -np 7"),
            (["--model", model, *prompts, "--decode-context-parallel-size", 3],
             "3 stripes do not divide"),
            (["--model", model, *prompts, "--decode-context-parallel-size", "two"],
             "neither auto nor a count"),
            (["--model", model, *prompts, "--decode-context-parallel-size", 2, "--no-kv-cache"],
             "without a cache there is nothing to stripe"),
            (["--model", model, *prompts, "--enable-expert-parallel"], "has no experts"),
            (["--model", model, *prompts, "--temprature", 1], "--temperature"),
            (["--model", model, *prompts, "--enable-dp-attention"], "has no latents"),
            (["--model", model, *prompts, "--max-model-len", 4096], "128"),
            (["--model", model, *prompts, "--top-p", 2], "top_p"),
            (["--model", model, *prompts, "--logprobs", 260], "logprobs"),
            (["--model", model, *prompts, "--kv-cache-memory-bytes", 10],
             "--kv-cache-memory-bytes 10: a page takes"),
            (["--model", model, *prompts, "--gpu-memory-utilization", 1.5],
             "--gpu-memory-utilization"),
        ]
        # Every case as one process and on two ranks; one found by all ranks and one found by rank 0
        # alone on more.
        runs = [(num_ranks, case) for case in cases for num_ranks in (ALONE, 2)]
        runs += [(num_ranks, cases[i]) for i in (0, 1, 10) for num_ranks in (1, 5)]
        for num_ranks, (flags, reason) in runs:
            with self.subTest(num_ranks=num_ranks, flags=flags):
                stdout, stderr = self.run_heddle(num_ranks, "generate", *flags, exit_code=2)
                self.assertEqual(stdout, "")
                said = [line for line in messages(stderr) if not line.startswith("Run heddle --")]
                self.assertEqual(len(said), 1, stderr)
                self.assertRegex(said[0], r"^(heddle:|\[rank 0 \S+\]) ")
                self.assertIn(reason, said[0])


class InspectTest(ProgramTest):
    def inspect(self, model, *flags, **options):
        return self.run_heddle(ALONE, "inspect", "--model", os.path.join(models, model), *flags,
                               **options)

    def test_ranks_cover_the_model(self):
        for model, num_kv_heads in (("gqa-a", 2), ("gqa-odd", 3), ("mqa", 1)):
            # Keys and values of 2 layers and heads of 8, as float32.
            head_bytes = 2 * 2 * 8 * 4
            for num_ranks in range(1, 10):
                with self.subTest(model=model, num_ranks=num_ranks):
                    self.check_layout(model, num_ranks, num_kv_heads, head_bytes)

    def check_layout(self, model, num_ranks, num_kv_heads, head_bytes):
        stdout, _ = self.inspect(model, "--tensor-parallel-size", num_ranks, "--format", "json")
        found = json.loads(stdout)
        ranks = found["layout"]["ranks"]
        self.assertEqual(found["kv_heads"], num_kv_heads)
        self.assertEqual([rank["rank"] for rank in ranks], list(range(num_ranks)))
        for key, size in (("query_heads", found["query_heads"]),
                          ("ffn_columns", found["intermediate_size"]),
                          ("vocabulary", found["vocab_size"])):
            covered = [i for rank in ranks for i in range(*rank[key])]
            self.assertEqual(covered, list(range(size)), key)
        group = found["query_heads"] // num_kv_heads
        for rank in ranks:
            # Each rank keeps the KV heads that its query heads read and no other.
            read = {head // group for head in range(*rank["query_heads"])}
            self.assertEqual(set(range(*rank["kv_heads"])), read)
            self.assertEqual(rank["kv_bytes_per_token"], len(read) * head_bytes)
        self.assertEqual(found["layout"]["max_weight_bytes"],
                         max(rank["weight_bytes"] for rank in ranks))

        text, _ = self.inspect(model, "--tensor-parallel-size", num_ranks)
        self.assertIn(f"\n{num_ranks} rank(s): ", text)
        table = text[text.index("\n rank"):].splitlines()[2:2 + num_ranks]
        self.assertEqual([int(line.split()[0]) for line in table], list(range(num_ranks)))

    def test_shows_stripes(self):
        stdout, _ = self.inspect("gqa-a", "--tensor-parallel-size", 6,
                                 "--decode-context-parallel-size", 2, "--format", "json")
        layout = json.loads(stdout)["layout"]
        self.assertEqual((layout["head_shards"], layout["stripes"]), (3, 2))
        self.assertEqual([rank["stripe"] for rank in layout["ranks"]], [0, 1] * 3)
        _, stderr = self.inspect("gqa-a", "--tensor-parallel-size", 6,
                                 "--decode-context-parallel-size", 4, exit_code=2)
        self.assertIn("4 stripes do not divide 6 ranks; these would: 1, 2, 3, 6", stderr)

    def test_shows_data_parallel_attention(self):
        flags = ("--tensor-parallel-size", 3, "--enable-dp-attention")
        stdout, _ = self.inspect("mla-v3", *flags, "--format", "json")
        found = json.loads(stdout)
        self.assertNotIn("auto", found)
        self.assertTrue(found["layout"]["dp_attention"])
        self.assertEqual(found["layout"]["stripes"], 3)
        for rank in found["layout"]["ranks"]:
            self.assertEqual(rank["query_heads"], [0, found["query_heads"]])
            self.assertEqual(rank["kv_bytes_per_token"],
                             found["layout"]["ranks"][0]["kv_bytes_per_token"])
        self.assertIn("each sequence on one of them", self.inspect("mla-v3", *flags)[0])
        _, stderr = self.inspect("mla-v3", *flags, "--decode-context-parallel-size", 3,
                                 exit_code=2)
        self.assertIn("it must be auto or 1", stderr)

    def test_says_the_bytes_that_a_run_has(self):
        """What inspect foretells is what the ranks of a run then hold."""
        figures = self.path("figures.json")
        for num_ranks in (3, 5):  # a KV head each, and heads that are shared
            self.run_heddle(num_ranks, "bench", "throughput", "--model",
                            os.path.join(models, "gqa-odd"), "--input-len", 4, "--output-len", 2,
                            "--num-prompts", 2, "--num-kv-pages", 8, "--output-json", figures,
                            "--decode-context-parallel-size", 1)
            with open(figures) as file:
                run = json.load(file)
            stdout, _ = self.inspect(
                "gqa-odd", "--tensor-parallel-size", num_ranks, "--format", "json")
            first = json.loads(stdout)["layout"]["ranks"][0]
            self.assertEqual(run["kv_bytes_per_token_rank0"], first["kv_bytes_per_token"])
            self.assertEqual(run["weight_bytes_rank0"], first["weight_bytes"])

    def test_says_what_auto_would_be(self):
        flags = ("--tensor-parallel-size", 4, "--device-type", "H200", "--format", "json")
        stdout, _ = self.inspect("gqa-a", *flags, "--max-num-seqs", 1, "--expected-context-len", 8)
        found = json.loads(stdout)["auto"]
        self.assertEqual(found["stripes"], 1)
        self.assertIn("1 stripe for 1 sequences of 8 tokens", found["why"])
        stdout, _ = self.inspect("gqa-a", *flags, "--max-num-seqs", "1M",
                                 "--expected-context-len", "1M")
        # Pairs of ranks share a KV head; four would share two, and send more.
        self.assertEqual(json.loads(stdout)["auto"]["stripes"], 2)
        stdout, _ = self.inspect("gqa-a", *flags, "--decode-context-parallel-size", 2)
        self.assertNotIn("auto", json.loads(stdout))
        self.assertNotIn("auto would be", self.inspect("gqa-a")[0])  # one rank has no choice

    def test_refuses_what_is_no_number_of_ranks(self):
        for size in ("0", "-1", "two", "4294967297"):
            with self.subTest(size=size):
                stdout, stderr = self.inspect(
                    "gqa-a", f"--tensor-parallel-size={size}", exit_code=2)
                self.assertEqual(stdout, "")
                self.assertIn(size, messages(stderr)[0])

    def test_one_rank_of_a_job_answers(self):
        stdout, _ = self.run_heddle(3, "inspect", "--model", os.path.join(models, "mqa"),
                                    "--format", "json")
        self.assertEqual(json.loads(stdout)["layout"]["tensor_parallel_size"], 1)


class PlanTest(ProgramTest):
    def plan(self, model, *flags, **options):
        return self.run_heddle(ALONE, "plan", "--model", os.path.join(models, model), *flags,
                               **options)

    def figures(self, model, *flags):
        return json.loads(self.plan(model, "--format", "json", *flags)[0])

    def config(self, name):
        return os.path.join("..", "..", "..", "configs", "models", name)

    def test_a_config_alone_is_enough(self):
        found = self.figures(self.config("deepseek-v3"), "--device-type", "H200",
                             "--tensor-parallel-size", 8, "--expected-context-len", 8192)
        self.assertAlmostEqual(found["parameters"] / 671.03e9, 1, 3)
        self.assertAlmostEqual(found["active_parameters"] / 36.62e9, 1, 2)
        self.assertEqual(found["kv_bytes_per_token"]["mla"], 70272)
        self.assertEqual(found["kv_bytes_per_token"]["own"], "mla")
        self.assertEqual([one["stripes"] for one in found["placements"]], [1, 2, 4, 8, 1])
        *striped, dp = found["placements"]
        self.assertTrue(dp["dp_attention"])
        one_copy = striped[0]["capacity_tokens"]
        self.assertGreater(one_copy, 400_000)
        for placement in striped:
            # A latent has no heads to deal, so that weights are the same and pages are not.
            self.assertEqual(placement["weight_bytes"], striped[0]["weight_bytes"])
            self.assertEqual(placement["capacity_tokens"], placement["stripes"] * one_copy)
            self.assertEqual(placement["heads_per_read"], 16 * placement["stripes"])
        self.assertAlmostEqual(striped[0]["weight_bytes"] / 85.6e9, 1, 1)
        self.assertGreater(dp["weight_bytes"], striped[0]["weight_bytes"])
        self.assertGreater(dp["capacity_tokens"], 5.9 * one_copy)
        for placement in found["placements"]:
            for step, ceiling in zip(placement["steps"], found["ceilings"], strict=True):
                parts = [step[f"{part}_seconds"]
                         for part in ("linear", "attention", "communication")]
                self.assertAlmostEqual(step["tokens_per_second"] * sum(parts),
                                       step["batch_size"], 6)
                self.assertLess(step["tokens_per_second"], ceiling["tokens_per_second"])
                self.assertEqual(step["fits"], step["batch_size"] * step["context_len"]
                                 <= placement["capacity_tokens"])
        # As many as fit at this length, which only a striped cache holds.
        choice = found["choice"]
        self.assertEqual(choice["stripes"], 8)
        self.assertEqual(choice["max_num_seqs"], 8 * one_copy // 8192)
        self.assertIn("mpirun -np 8 heddle bench", found["command"])
        self.assertIn(f"--max-num-seqs {choice['max_num_seqs']} ", found["command"])
        self.assertIn("--decode-context-parallel-size 8", found["command"])

    def test_the_file_and_its_folder_are_the_same_model(self):
        flags = ("--device-type", "L40S", "--format", "json")
        folder, file = (self.plan(self.config(name), *flags)[0]
                        for name in ("llama-3-8b", "llama-3-8b/config.json"))
        self.assertEqual(json.loads(folder)["placements"], json.loads(file)["placements"])

    def test_holds_what_inspect_says(self):
        for model, num_ranks in (("gqa-odd", 6), ("gqa-a", 4)):
            found = self.figures(model, "--tensor-parallel-size", num_ranks, "--device-type",
                                 "A100", "--kv-cache-dtype", "float32")
            for placement in found["placements"]:
                with self.subTest(model=model, stripes=placement["stripes"]):
                    stdout, _ = self.run_heddle(
                        ALONE, "inspect", "--model", os.path.join(models, model), "--format",
                        "json", "--tensor-parallel-size", num_ranks,
                        "--decode-context-parallel-size", placement["stripes"])
                    layout = json.loads(stdout)["layout"]
                    self.assertEqual(placement["weight_bytes"], layout["max_weight_bytes"])
                    tokens = min((found["memory_bytes"] - rank["weight_bytes"])
                                 / rank["kv_bytes_per_token"]
                                 for rank in layout["ranks"] if rank["kv_bytes_per_token"])
                    self.assertAlmostEqual(
                        placement["capacity_tokens"], placement["stripes"] * tokens,
                        delta=placement["stripes"] * 16)

    def test_the_text_has_the_same_figures(self):
        flags = ("--tensor-parallel-size", 4, "--device-type", "A6000", "--batch-size", "1,16",
                 "--context-len", "1K,4K", "--max-num-seqs", 16, "--expected-context-len", "4K")
        model = self.config("deepseek-v2-lite")
        found, (text, _) = self.figures(model, *flags), self.plan(model, *flags)
        self.assertEqual(found["compute_bound"]["heads_per_read_simple"].__round__(), 101)
        self.assertRegex(text, r"MLA +31,104 +<- this model")
        for placement in found["placements"]:
            self.assertRegex(text, rf"{placement['name']} .* {placement['capacity_tokens']:,} ")
            for context in (1024, 4096):
                cells = [rf"{step['tokens_per_second']:,.0f}[ *\n]" for step in placement["steps"]
                         if step["context_len"] == context]
                self.assertRegex(text, rf"{placement['name']} +{' +'.join(cells)}")
        for advice in found["advice"]:
            self.assertIn(f"! {advice}\n", text)
        self.assertTrue(text.endswith(found["command"] + "\n"))

    def test_this_machine_is_measured(self):
        found = self.figures("gqa-a", "--tensor-parallel-size", 2, "--max-num-seqs", 4)
        self.assertEqual(found["device"]["name"], "cpu")
        self.assertEqual(found["kv_cache_dtype"], "float32")
        self.assertGreater(found["device"]["read_bytes_per_second"], 1e7)
        self.assertGreater(found["device"]["flops"], 1e8)

    def test_says_how_many_ranks_would_hold_it(self):
        found = self.figures(self.config("llama-2-70b"), "--device-type", "A6000",
                             "--tensor-parallel-size", 2)
        self.assertEqual([one["capacity_tokens"] for one in found["placements"]], [0, 0])
        self.assertIsNone(found["command"])
        self.assertRegex(found["advice"][0], r"the smallest count that fits is \d ranks")

    def test_data_parallel_attention_is_kept(self):
        found = self.figures(self.config("deepseek-v2-lite"), "--tensor-parallel-size", 4,
                             "--device-type", "H20", "--enable-dp-attention")
        self.assertIn("--enable-dp-attention", found["command"])
        self.assertNotIn("--decode-context-parallel-size", found["command"])
        dp = found["placements"][-1]
        self.assertEqual(found["choice"]["max_num_seqs"], min(
            found["compute_bound"]["linear_batch_size"],
            dp["capacity_tokens"] // found["choice"]["expected_context_len"]))

    def test_asked_stripes_are_kept(self):
        found = self.figures(self.config("deepseek-v2-lite"), "--tensor-parallel-size", 4,
                             "--device-type", "H20", "--decode-context-parallel-size", 2)
        self.assertEqual(found["choice"]["stripes"], 2)

    def test_refusals(self):
        for flags, said in ((("--device-type", "H1"), "H200, H100, A100, A6000, L40S, H20, cpu"),
                            (("--batch-size", "0"), "--batch-size 0"),
                            (("--context-len", "2G"), "--context-len"),
                            (("--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization"),
                            (("--tensor-parallel-size", "6", "--decode-context-parallel-size",
                              "4"), "4 stripes do not divide 6 ranks"),
                            (("--format", "xml"), "text or json")):
            with self.subTest(flags=flags):
                stdout, stderr = self.plan("gqa-a", *flags, exit_code=2)
                self.assertEqual(stdout, "")
                self.assertIn(said, stderr)


class DoctorTest(ProgramTest):
    def test_says_what_the_machine_has(self):
        for num_ranks, launcher in ((ALONE, "none"), (2, "mpirun, rank 0 of 2")):
            stdout, _ = self.run_heddle(num_ranks, "doctor")
            facts = dict(re.findall(r"^(\S+(?: \S+)*?) {2,}(.+)$", stdout, re.MULTILINE))
            self.assertEqual(facts["launcher"], launcher)
            self.assertEqual(facts["host"], os.uname().nodename)
            self.assertIn(f"{len(os.sched_getaffinity(0))} allowed", facts["CPUs"])
            for name in ("CPU", "memory", "/dev/shm", "MPI", "NVIDIA GPUs"):
                self.assertIn(name, facts)
            self.assertEqual(stdout.count("launcher "), 1)


class BenchTest(ProgramTest):
    def bench(self, num_ranks, kind, *flags, model="gqa-a", **options):
        figures = self.path("figures.json")
        self.run_heddle(num_ranks, "bench", kind, "--model", os.path.join(models, model),
                        "--num-kv-pages", 64, "--output-json", figures, *flags, **options)
        with open(figures) as file:
            return json.load(file)

    def test_throughput(self):
        for num_ranks in (ALONE, 2):
            run = self.bench(num_ranks, "throughput", "--input-len", 9, "--output-len", 4,
                             "--num-prompts", 6)
            self.assertEqual((run["num_requests"], run["failed"]), (6, 0))
            self.assertEqual((run["total_input_tokens"], run["total_output_tokens"]), (54, 24))
            self.assertEqual(run["total_num_tokens"], 54 + 24)
            self.assertEqual(run["world_size"], max(num_ranks, 1))
            self.assertGreaterEqual(run["num_warmup_requests"], 1)
            seconds = run["elapsed_time"]
            self.assertAlmostEqual(run["requests_per_second"] * seconds, 6)
            self.assertAlmostEqual(run["tokens_per_second"] * seconds, 78)
            self.assertAlmostEqual(run["output_tokens_per_second"] * seconds, 24)
            # The warm-up is in none of the figures: a prompt's last token gives the first output.
            self.assertLessEqual(run["computed_tokens"], 54 + 24 - 6)
            self.assertGreater(run["steps"], 0)
            self.assertGreaterEqual(run["mean_batch"], 1)
            for key in ("kv_waste", "preemptions", "mean_itl_ms", "kv_usage_peak", "idle_share"):
                self.assertGreaterEqual(run[key], 0)
            self.assertLess(run["idle_share"], 1)

    def test_requests_that_fail_are_not_counted(self):
        # A fifth of the prompts' tokens spoil the logits behind them.
        model = self.changed_model("model.embed_tokens.weight", range(0, 259, 50), math.nan)
        run = self.bench(2, "throughput", "--input-len", 9, "--output-len", 4, "--num-prompts", 20,
                         "--seed", 1, model=model, exit_code=1)
        completed, failed = run["num_requests"], run["failed"]
        self.assertEqual(completed + failed, 20)
        self.assertTrue(0 < failed < 20, failed)
        self.assertAlmostEqual(run["requests_per_second"] * run["elapsed_time"], completed)
        # Those that failed gave fewer than four tokens each, the others all four.
        tokens = run["total_output_tokens"]
        self.assertTrue(4 * completed <= tokens < 4 * completed + 4 * failed, tokens)

    def test_lengths_are_drawn_from_the_range(self):
        flags = ("--input-len", 20, "--input-len-min", 4, "--output-len", 6, "--output-len-min", 2,
                 "--num-prompts", 16)
        one, two = self.bench(ALONE, "throughput", *flags), self.bench(2, "throughput", *flags)
        for total, low, high in (("total_input_tokens", 4, 20), ("total_output_tokens", 2, 6)):
            self.assertTrue(16 * low < one[total] < 16 * high)
            self.assertEqual(one[total], two[total])  # the same work on any number of ranks

    def test_latency(self):
        results = self.bench(2, "latency", "--input-len", 5, "--output-len", 4, "--batch-size",
                             "1,3", "--num-iters", 3, "--num-iters-warmup", 2)
        self.assertEqual([run["batch_size"] for run in results], [1, 3])
        for run in results:
            latencies = run["latencies"]
            self.assertEqual((len(latencies), run["num_iters_warmup"]), (3, 2))
            self.assertAlmostEqual(run["avg_latency"], sum(latencies) / 3)
            percentiles = run["percentiles"]
            self.assertEqual(list(percentiles), ["10", "25", "50", "75", "90", "99"])
            self.assertEqual(list(percentiles.values()), sorted(percentiles.values()))
            self.assertAlmostEqual(percentiles["50"], sorted(latencies)[1])
            self.assertEqual(run["num_itl_samples"], (4 - 1) * run["batch_size"] * 3)

    def sweep(self, num_ranks, *flags, model, **options):
        """stdout, stderr and the figures."""
        figures = self.path("sweep.json")
        stdout, stderr = self.run_heddle(num_ranks, "bench", "batch", "--model", model,
                                         "--output-json", figures, *flags, **options)
        with open(figures) as file:
            return stdout, stderr, json.load(file)

    def test_a_sweep_has_a_cell_for_each_placement_length_and_batch(self):
        tiny = os.path.join(models, "..", "..", "..", "configs", "models", "tiny-mla")
        with open(os.path.join(tiny, "config.json")) as file:
            config = json.load(file)
        # Latents of all layers, as float32.
        token_bytes = 4 * config["num_hidden_layers"] * (
            config["kv_lora_rank"] + config["qk_rope_head_dim"])
        chart = self.path("chart.svg")
        stdout, _, found = self.sweep(
            2, "--batch-size", "1,4", "--input-len", 16, "--num-iters", 3, "--num-iters-warmup", 1,
            "--decode-context-parallel-size", "1,2", "--enable-dp-attention", "--plot", chart,
            model=tiny)
        self.assertEqual((found["world_size"], found["num_iters"]), (2, 3))
        cells = found["cells"]
        self.assertEqual([(cell["placement"], cell["batch_size"]) for cell in cells],
                         [(placement, batch)
                          for placement in ("replicated", "2 stripes", "DP attention")
                          for batch in (1, 4)])
        for cell in cells:
            batch, stripes = cell["batch_size"], cell["decode_context_parallel_size"]
            # A prompt gives the first token; of the steps after, the first is not counted.
            self.assertEqual((cell["input_len"], cell["context_len"]), (16, 19))
            dealt = cell["enable_dp_attention"]
            self.assertEqual(dealt, cell["placement"] == "DP attention")
            copies = 1 if dealt else 2 // stripes
            sequence_bytes = 19 * token_bytes
            self.assertEqual(cell["kv_bytes_per_step_all_ranks"], copies * batch * sequence_bytes)
            # A rank has whole sequences then.
            self.assertEqual(cell["kv_bytes_per_step"], (batch + 1) // 2 * sequence_bytes if dealt
                             else copies * batch * sequence_bytes / 2)
            self.assertEqual(len(cell["itls_ms"]), 3)
            self.assertAlmostEqual(cell["mean_itl_ms"], sum(cell["itls_ms"]) / 3)
            self.assertAlmostEqual(cell["output_tokens_per_second"] * cell["mean_itl_ms"],
                                   1000 * batch)
            self.assertAlmostEqual(
                cell["measured_over_predicted"] * cell["predicted_tokens_per_second"],
                cell["output_tokens_per_second"])
            bytes_per_second = (cell["kv_bytes_per_step"] + cell["weight_bytes_per_step"]) / (
                cell["mean_itl_ms"] / 1000)
            self.assertAlmostEqual(cell["read_share"] * found["read_bytes_per_second"]
                                   / bytes_per_second, 1)
            self.assertGreater(cell["flop_share"], 0)
            self.assertRegex(stdout, rf"(?m)^  {cell['placement']} +16 +{batch} +19\.00 ")
        # More sequences choose more experts, and every one is multiplied.
        self.assertGreater(cells[1]["weight_bytes_per_step"], cells[0]["weight_bytes_per_step"])
        self.assertGreater(cells[1]["flop_per_step"], 3.9 * cells[0]["flop_per_step"])
        svg = xml.etree.ElementTree.parse(chart).getroot()
        self.assertEqual(len([one for one in svg.iter("{http://www.w3.org/2000/svg}polyline")]), 6)

    def test_a_sweep_skips_what_the_cache_cannot_hold(self):
        """And runs from a config alone, whatever its folder is called."""
        folder = self.path("a & <b>")
        os.mkdir(folder)
        shutil.copy(os.path.join(models, "gqa-a", "config.json"), folder)
        chart = self.path("chart.html")
        stdout, _, found = self.sweep(
            ALONE, "--load-format", "dummy", "--batch-size", "8,2", "--input-len", "40,20",
            "--num-kv-pages", 10, "--num-iters", 2, "--plot", chart, model=folder)
        # Six tokens follow each prompt, in pages of 16.
        self.assertEqual([cell["skipped"] for cell in found["cells"]],
                         ["needs 384 tokens of cache; there are 160", None,
                          "needs 256 tokens of cache; there are 160", None])
        self.assertIn("skipped: needs 384 tokens of cache; there are 160\n", stdout)
        # All start together: two steps are not counted, and two are.
        self.assertEqual([cell["context_len"] for cell in found["cells"] if not cell["skipped"]],
                         [40 + 3.5, 20 + 3.5])
        with open(chart) as file:
            self.assertIn("a &amp; &lt;b&gt;", file.read())

    def test_sweeps_that_cannot_run_are_refused(self):
        nowhere = os.path.join(self.folder, "nowhere", "file")
        cases = [(["--batch-size", "1,0"], "--batch-size 0: expected 1 to "),
                 (["--batch-size", "1,x"], '--batch-size: "x" is not a count'),
                 (["--batch-size", "4", "--max-num-seqs", 2], "--batch-size 4 is above"),
                 (["--input-len", "16,0"], "--input-len 0: expected 1 to "),
                 (["--input-len", "128"], "the model has 128"),
                 (["--input-len", "64", "--max-model-len", 70], "--max-model-len has 70"),
                 (["--num-iters", 0], "--num-iters 0: expected 1 to "),
                 (["--max-num-batched-tokens", 63], "twice --max-num-seqs"),
                 (["--no-kv-cache"], "--no-kv-cache"),
                 (["--no-enable-prefix-caching"], "--no-enable-prefix-caching"),
                 (["--dcp", "1,2,3"], "2 stripes do not divide 1 ranks"),
                 (["--plot", "chart.png"], "expected a file name in .svg or .html"),
                 (["--plot", nowhere + ".svg"], "No such file"),
                 (["--output-json", nowhere], "No such file")]
        short = ["--input-len", 8]  # the models have 128 positions
        for flags, reason in cases:
            with self.subTest(flags=flags):
                stdout, stderr = self.run_heddle(
                    ALONE, "bench", "batch", "--model", os.path.join(models, "gqa-a"), *short,
                    *flags, exit_code=2)
                self.assertEqual(stdout, "")
                self.assertIn(reason, stderr)
        for flags, reason in ((["--dcp", "1,2,3"], "3 stripes do not divide 2 ranks"),
                              (["--plot", nowhere + ".svg"], "No such file"),
                              (["--kv-cache-memory-bytes", 10], "a page takes")):
            with self.subTest(flags=flags):
                _, stderr = self.run_heddle(
                    2, "bench", "batch", "--model", os.path.join(models, "gqa-a"), *short, *flags,
                    exit_code=2)
                self.assertEqual(len(messages(stderr)), 1, stderr)
                self.assertIn(reason, stderr)

    def test_requests_that_cannot_run_are_refused(self):
        _, stderr = self.run_heddle(
            2, "bench", "throughput", "--model", os.path.join(models, "gqa-a"), "--input-len", 200,
            exit_code=2)
        said = messages(stderr)
        self.assertEqual(len(said), 1, stderr)
        self.assertIn("128", said[0])


class FailureTest(ProgramTest):
    def start(self, num_ranks, *flags):
        # Work for minutes.
        rows = self.rows(
            [{"prompt_token_ids": [i % 200, 3], "max_tokens": 120} for i in range(20000)])
        job = Job(num_ranks, [
            "generate", "--model", os.path.join(models, "gqa-a"), "--prompt-file", rows,
            "--ignore-eos", "--max-num-seqs", 8, "--num-kv-pages", 80, *flags])
        self.addCleanup(job.process.stderr.close)
        job.wait_for("pages of 16 tokens a rank")  # it has loaded, and decodes from here on
        time.sleep(0.5)
        return job

    def assert_nobody_left(self, job):
        # The launcher may end a moment before the ranks it has killed.
        for _ in range(100):
            if not job.pids():
                return
            time.sleep(0.02)
        self.fail(f"processes {job.pids()} outlive the job")

    def test_a_rank_that_cannot_load_ends_the_job(self):
        # What rank 1 alone reads of the weights has no place in float16.
        layout, _ = self.run_heddle(ALONE, "inspect", "--model", os.path.join(models, "gqa-a"),
                                    "--tensor-parallel-size", 3, "--format", "json")
        row = json.loads(layout)["layout"]["ranks"][1]["ffn_columns"][0]
        tensor = "model.layers.0.mlp.up_proj.weight"
        model = self.changed_model(tensor, [row], 1e6)
        start = time.monotonic()
        _, stderr = self.run_heddle(
            3, "generate", "--model", model, "--dtype", "float16", "--prompt-file",
            self.rows(PROMPTS), exit_code=1)
        self.assertLess(time.monotonic() - start, 5 + LAUNCH_SECONDS)
        said = [line for line in messages(stderr) if tensor in line]
        self.assertEqual(len(said), 1, stderr)
        self.assertRegex(said[0], r"^\[rank 0 \S+\] .*rank 1 \(")

    def test_a_killed_rank_ends_the_job(self):
        job = self.start(3)
        os.kill(job.rank(1), signal.SIGKILL)
        stderr, exit_code = job.end(5 + LAUNCH_SECONDS)
        self.assertNotEqual(exit_code, 0)
        self.assertRegex(stderr, r"rank 1\b")
        self.assert_nobody_left(job)

    def test_a_stopped_rank_is_named_when_the_timeout_is_over(self):
        timeout = 3
        job = self.start(3, "--distributed-timeout-seconds", timeout)
        start = time.monotonic()
        os.kill(job.rank(1), signal.SIGSTOP)
        stderr, exit_code = job.end(timeout + 5 + LAUNCH_SECONDS)
        # Counted from the rank's last progress, which on a busy machine may be well before.
        self.assertGreater(time.monotonic() - start, timeout / 2)
        self.assertNotEqual(exit_code, 0)
        self.assertRegex("\n".join(messages(stderr)), r"rank 1\b")
        self.assert_nobody_left(job)

    def test_an_interrupted_job_leaves_nobody(self):
        job = self.start(2)
        job.process.send_signal(signal.SIGINT)
        _, exit_code = job.end(5 + LAUNCH_SECONDS)
        self.assertNotEqual(exit_code, 0)
        self.assert_nobody_left(job)


if __name__ == "__main__":
    mpiexec, heddle, models = sys.argv[1:4]
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
