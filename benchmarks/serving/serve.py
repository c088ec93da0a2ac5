"""Agent sessions against our server and mlx_lm.server, on the same weights in one run.

    python -m benchmarks serve                         # the demo model
    python -m benchmarks serve --model shape           # layers as Qwen3-0.6B's, random weights
    python -m benchmarks serve --model PATH            # a real one

A client in a process of its own (``serve_client.py``) runs 1, 4 and 16 sessions at once: a system
prompt of 2,500 tokens that all share, and ten turns that each add a little. The two servers take
turns, each in a fresh process for each number of sessions, as they come. Reported are tokens per
second, the time to the first token of the first turn and of those behind it, errors, and the memory
of the server's process at its highest. What HTTP costs is the time per token of the same requests
at 16 streams, less that of an ``AsyncEngine`` that is asked without HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
from mlx.utils import tree_flatten

from benchmarks.lib.card import (
    COMMAND,
    machine_card,
    make_arg_parser,
    print_card,
    print_json,
    print_table,
)
from mlx_paged import AsyncEngine, RequestOutputKind, SamplingParams, demo_model_path, load

HERE = Path(__file__).parent
SIDES = ("mlx_paged", "mlx_lm")
LEVELS = {"mlx_paged": "warning", "mlx_lm": "WARNING"}


def model_folder(name: str, scratch: Path) -> Path:
    """The folder of a model by name; one of random weights is made."""
    if name == "demo":
        return demo_model_path()
    if name != "shape":
        return Path(name)
    from benchmarks.lib.models import QWEN3_0_6B_LAYERS, random_weights

    folder = scratch / "shape"
    shutil.copytree(demo_model_path(), folder, ignore=shutil.ignore_patterns("model.*"))
    config = {**json.loads((folder / "config.json").read_text()), **QWEN3_0_6B_LAYERS}
    config["vocab_size"] = 1024  # the demo model's tokenizer
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(demo_model_path() / "tokenizer.model", folder)
    model, _ = random_weights(config)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        {"format": "mlx"},
    )
    return folder


def command_of(side: str, folder: Path, port: int, options: list[str]) -> list[str]:
    module = ["mlx_paged.server"] if side == "mlx_paged" else ["mlx_lm", "server"]
    where = ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-m", *module, *where, "--log-level", LEVELS[side], *options]


@contextmanager
def served(side: str, folder: Path, options: list[str]) -> Iterator[tuple[str, MemoryWatch]]:
    """A server in a process of its own, ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = command_of(side, folder, port, options)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            if not becomes_ready(url, process):
                log.seek(0)
                raise SystemExit(f"{' '.join(command)}: {log.read()[-2000:].decode()}")
            with MemoryWatch(process.pid) as watch:
                yield url, watch
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def becomes_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    for _ in range(600):
        if process.poll() is not None:
            return False
        try:
            httpx.get(f"{url}/health", timeout=1)
            return True
        except httpx.HTTPError:
            time.sleep(0.2)
    return False


class MemoryWatch:
    """The resident memory of a process, in MiB, looked at every quarter of a second."""

    def __init__(self, pid: int):
        self.pid = pid
        self.first = self.highest = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self.first = self.highest = self.look()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.25):
            self.highest = max(self.highest, self.look())

    def look(self) -> float:
        command = ["ps", "-o", "rss=", "-p", str(self.pid)]
        text = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        return int(text or 0) / 1024


def run_client(url: str, sessions: int, args: argparse.Namespace, banned: list[int]) -> Any:
    command = [
        *COMMAND, "serve_client", "--url", url,
        "--sessions", str(sessions), "--turns", str(args.turns),
        "--prefix-words", str(args.prefix_words), "--max-tokens", str(args.max_tokens),
        *(["--own-prefix"] if args.own_prefix else []), "--banned", *map(str, banned),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
    if done.returncode:
        raise SystemExit(f"the client failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def summary(result: Any, watch: MemoryWatch) -> dict[str, Any]:
    turns = result["turns"]
    good = [turn for turn in turns if turn["error"] is None]
    first = [turn["first_token"] for turn in good if turn["number"] == 0]
    later = [turn["first_token"] for turn in good if turn["number"] > 0]
    return {
        "tokens_per_second": sum(turn["answer_tokens"] for turn in good) / result["seconds"],
        "seconds": result["seconds"],
        "first_token_turn_1": statistics.median(first) if first else None,
        "first_token_later": statistics.median(later) if later else None,
        "first_token_later_p90": statistics.quantiles(later, n=10)[-1] if later else None,
        "first_token_by_turn": [
            statistics.median(each) if each else None
            for number in range(max(turn["number"] for turn in turns) + 1)
            for each in [[turn["first_token"] for turn in good if turn["number"] == number]]
        ],
        "cached_share_later": ratio(
            sum(turn["cached_tokens"] for turn in good if turn["number"]),
            sum(turn["prompt_tokens"] for turn in good if turn["number"]),
        ),
        "errors": len(turns) - len(good),
        "error": next((turn["error"] for turn in turns if turn["error"]), None),
        "memory_before_mib": watch.first,
        "memory_highest_mib": watch.highest,
        "texts": sorted((turn["session"], turn["number"], turn["text"]) for turn in good),
    }


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


async def in_process(folder: Path, num_streams: int, num_tokens: int) -> float:
    """Seconds per token and step of streams that are asked without HTTP."""
    model, tokenizer = load(folder)
    params = SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    async with AsyncEngine(model, tokenizer) as engine:

        async def read(number: int) -> None:
            async for _ in engine.generate(list(range(100 + number, 200 + number)), params):
                pass

        await asyncio.gather(*map(read, range(num_streams)))
        start = time.perf_counter()
        await asyncio.gather(*map(read, range(num_streams)))
        return (time.perf_counter() - start) / num_tokens


async def over_http(url: str, num_streams: int, num_tokens: int) -> float:
    """The same over HTTP; the reader is in this process."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def read(number: int) -> None:
            body = {
                "model": "default_model",
                "prompt": list(range(100 + number, 200 + number)),
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_raw():
                    pass

        await asyncio.gather(*map(read, range(num_streams)))
        start = time.perf_counter()
        await asyncio.gather(*map(read, range(num_streams)))
        return (time.perf_counter() - start) / num_tokens


def http_cost(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per step of 16 streams, with and without HTTP, and what HTTP adds per token."""
    streams, tokens = args.http_streams, args.http_tokens
    with_http, without = [], []
    for _ in range(args.http_turns):
        with served("mlx_paged", folder, ["--served-model-name", "default_model"]) as (url, _watch):
            with_http.append(asyncio.run(over_http(url, streams, tokens)))
        without.append(asyncio.run(in_process(folder, streams, tokens)))
    added = statistics.median(a - b for a, b in zip(with_http, without, strict=True))
    return {
        "streams": streams,
        "step_ms_http": statistics.median(with_http) * 1e3,
        "step_ms_engine": statistics.median(without) * 1e3,
        "added_ms_per_step": added * 1e3,
        "added_ms_per_token": added * 1e3 / streams,
    }


def print_sides(results: dict[str, dict[str, Any]], sessions: int) -> None:
    ours, theirs = results["mlx_paged"], results["mlx_lm"]
    rows = []
    for name, key, scale in (
        ("tokens per second", "tokens_per_second", 1),
        ("first token, turn 1 (ms)", "first_token_turn_1", 1e3),
        ("first token, turns 2 on (ms)", "first_token_later", 1e3),
        ("the same, 90th percentile (ms)", "first_token_later_p90", 1e3),
        ("prompt tokens from the cache, turns 2 on", "cached_share_later", 1),
        ("errors", "errors", 1),
        ("memory at its highest (MiB)", "memory_highest_mib", 1),
    ):
        values = [side[key] for side in (ours, theirs)]
        shown = ["-" if value is None else f"{value * scale:.4g}" for value in values]
        quotient = f"{values[0] / values[1]:.3f}" if all(values) else "-"
        rows.append([name, *shown, quotient])
    print(f"## {sessions} session{'s' * (sessions > 1)} at once")
    print_table(["", *SIDES, "ratio"], rows)


def parse_args() -> argparse.Namespace:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--model", default="demo", help='"demo", "shape", or a folder')
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--prefix-words", type=int, default=550, help="some 2,500 tokens")
    parser.add_argument("--own-prefix", action="store_true", help="of each session, not shared")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--http-streams", type=int, default=16)
    parser.add_argument("--http-tokens", type=int, default=200)
    parser.add_argument("--http-turns", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(args.model, Path(scratch))
        _, tokenizer = load(folder, lazy=True)
        banned = sorted(tokenizer.eos_token_ids)
        setting = {
            **machine_card(),
            "model": args.model,
            "turns": args.turns,
            "prefix_words": args.prefix_words,
            "prefix": "of each session" if args.own_prefix else "shared",
            "max_tokens": args.max_tokens,
        }
        print_card("Agent sessions over HTTP", setting)
        results: dict[str, Any] = {"sessions": {}}
        for sessions in args.sessions:
            sides = {}
            for side in SIDES:
                names = ["--served-model-name", "default_model"] if side == "mlx_paged" else []
                with served(side, folder, names) as (url, watch):
                    sides[side] = summary(run_client(url, sessions, args, banned), watch)
            texts = [side.pop("texts") for side in sides.values()]
            results["sessions"][sessions] = {**sides, "same_answers": texts[0] == texts[1]}
            print_sides(sides, sessions)
        if args.http_turns:
            results["http"] = http_cost(folder, args)
            rows = [[name, f"{value:.4g}"] for name, value in results["http"].items()]
            print("## What HTTP adds")
            print_table(["", ""], rows)
        print_json("serve", setting, results, args.out)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
