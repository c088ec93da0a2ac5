"""Several models behind one server: what a load and a swap cost, and two models that answer at once
beside each alone.

    python -m benchmarks models
    python -m benchmarks models --gigabytes 4

A load is measured with the bundled model, of 4.5 MB, and with random weights of a given size; the
difference is what weights cost. The first load also computes what the model needs, and the digest
of its weights. Files are in the page cache. A swap is a
turn of a conversation with a copy of the bundled model while another one has the only place: that
one is put away, the model is loaded, and the conversation is read from disk. All times are those of
a client.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged.loading import demo_model_path
from mlx_paged.models import qwen3

LISTENS = "listening on "
# Room for one copy of the bundled model with its process, and for all.
ONE_PLACE, ALL_PLACES = "600M", "64G"
PROMPT = "One day, a cat saw a dog. " * 180
# A layer has 12.6 million parameters.
SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}


def main() -> int:
    args = parse_args()
    setting = machine_card() | {"gigabytes": args.gigabytes, "tokens": args.tokens}
    print_card("several models", setting)
    with TemporaryDirectory() as name:
        folder = Path(name)
        for each in ("a", "b"):
            shutil.copytree(demo_model_path(), folder / each)
        nbytes = write_large(folder / "large", args.gigabytes)
        models = [str(folder / each) for each in ("a", "b", "large")]
        with served(models, ALL_PLACES, folder / "kv") as url:
            loads = measure_loads(url, nbytes / 1e9, args.rounds)
            speeds = measure_speeds(url, args.tokens, args.rounds)
        with served(models[:2], ONE_PLACE, folder / "kv") as url:
            swaps = measure_swaps(url, args.rounds)
    print_table(
        ["s of a load", "bundled model", f"{nbytes / 1e9:.2f} GB", "per GB"],
        [[when, *each.values()] for when, each in loads.items()],
    )
    print_table(["tokens/s", "a", "b"], [[who, *each.values()] for who, each in speeds.items()])
    print_table(["a turn", "s to the first token"], list(swaps.items()))
    results = {"loads": loads, "tokens_per_second": speeds, "turns": swaps}
    print_json("models", setting, results, args.out)
    return 0


def parse_args() -> argparse.Namespace:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the model that is loaded")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def write_large(folder: Path, gigabytes: float) -> int:
    """A random model with about this many gigabytes of bfloat16 weights; returns their bytes."""
    shutil.copytree(demo_model_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {**SHAPE, "num_key_value_heads": 8, "head_dim": 64, "torch_dtype": "bfloat16"}
    config["num_hidden_layers"] = max(1, round(gigabytes * 1e9 / 25.2e6))
    (folder / "config.json").write_text(json.dumps(config))
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return sum(each.nbytes for each in weights.values())


@contextmanager
def served(models: Sequence[str], limit: str, cache_dir: Path) -> Iterator[str]:
    """The address of a server of these models within a limit of memory."""
    flags = [word for model in models for word in ("--model", model)]
    flags += ["--port", "0", "--memory-limit", limit, "--cache-dir", str(cache_dir)]
    command = [sys.executable, "-m", "mlx_paged", "serve", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if LISTENS in line)
        with ThreadPoolExecutor(1) as reader:
            reader.submit(process.stderr.read)
            yield line.partition(LISTENS)[2].partition(";")[0]
            process.terminate()
    finally:
        process.kill()
        process.wait()


def post(url: str, body: dict[str, Any]) -> Iterator[bytes]:
    """The lines of the answer to a request."""
    data, head = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, head), timeout=300) as answer:
        yield from answer


def measure_loads(url: str, gigabytes: float, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of the first and of later loads of two models, and the difference for each GB."""

    def load(model: str) -> float:
        begin = time.perf_counter()
        list(post(f"{url}/v1/models/{model}/load", {}))
        seconds = time.perf_counter() - begin
        list(post(f"{url}/v1/models/{model}/unload", {}))
        return seconds

    found = {}
    for when, count in (("the first", 1), ("a later one", rounds)):
        small, large = (
            statistics.median(load(model) for _ in range(count)) for model in ("a", "large")
        )
        found[when] = {
            "bundled": round(small, 2),
            "random": round(large, 2),
            "per_gb": round((large - small) / gigabytes, 2),
        }
    return found


def answer(url: str, model: str, num_tokens: int) -> tuple[float, float]:
    """Seconds until the first token of an answer and until its end."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    begin, times = time.perf_counter(), []
    for line in post(f"{url}/v1/completions", body):
        if line.startswith(b"data: {"):
            times.append(time.perf_counter() - begin)
    return times[0], times[-1]


def measure_speeds(url: str, num_tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens per second of two models, alone and at once: the medians of some rounds."""

    def speed(model: str) -> float:
        first, last = answer(url, model, num_tokens)
        return (num_tokens - 1) / (last - first)

    for model in "ab":  # loads them, and computes the prompt
        answer(url, model, 2)
    alone = {model: statistics.median(speed(model) for _ in range(rounds)) for model in "ab"}
    with ThreadPoolExecutor(2) as threads:
        pairs = [list(threads.map(speed, "ab")) for _ in range(rounds)]
    at_once = {model: statistics.median(pair[i] for pair in pairs) for i, model in enumerate("ab")}
    return {
        who: {name: round(each) for name, each in by.items()}
        for who, by in (("each alone", alone), ("at once", at_once))
    }


def measure_swaps(url: str, rounds: int) -> dict[str, float]:
    """Seconds to the first token of a turn: of a model in memory, and after a swap."""
    in_memory, swapped = [], []
    for model in "ab":
        answer(url, model, 2)
    for _ in range(rounds):
        for model in "ab":
            swapped.append(answer(url, model, 2)[0])
            in_memory.append(answer(url, model, 2)[0])
    return {
        "of a model in memory": round(statistics.median(in_memory), 3),
        "after a swap": round(statistics.median(swapped), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
