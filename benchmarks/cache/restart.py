"""A prefix read from disk in a new process, beside computing it: time to first token.

    python -m benchmarks restart                             # the demo model
    python -m benchmarks restart --model qwen3-0.6b          # its shape, random weights, bfloat16
    python -m benchmarks restart --model qwen3-0.6b --dtype float32 --turns 1
    python -m benchmarks restart --model PATH_OR_REPO
    python -m benchmarks restart --lengths 4000 --out FILE --add   # to the runs that FILE has
    python -m benchmarks restart --quick                     # does it run at all

For each length, one process computes a prompt and leaves its K/V in a folder (``cache_dir``). Then
fresh processes take turns, with the same prompt: one computes it, without a folder; one finds it in
the folder. What is timed is from ``add_request`` to the first token; loading and the start of the
engine (which reads all weights, for the model's identity) are excluded, and given by themselves.
All processes must answer with the same tokens.

Files that were written a moment ago are read from the system's page cache. Where the system can
drop a file from it (Linux), a third process reads them from the device.

On Linux, MLX computes faster with LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libopenblas.so.0, and so do
the processes (wheels of scipy up to 1.11 have such a library in scipy.libs). In half precision MLX
has no BLAS there, and computing is slow out of proportion.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from benchmarks.lib.card import (
    COMMAND,
    machine_card,
    make_arg_parser,
    print_card,
    print_json,
    print_table,
)
from benchmarks.lib.models import QWEN3_0_6B_LAYERS, shape_of
from mlx_paged import demo_model_path
from mlx_paged.engine.engine import Engine
from mlx_paged.loading import load_for
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import SamplingParams

QWEN3_0_6B = QWEN3_0_6B_LAYERS | {"num_hidden_layers": 28, "vocab_size": 151936}
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
NUM_TOKENS = 4  # of an answer
SECONDS_TO_WRITE = 600.0
LENGTHS = {"demo": [250, 500, 1000, 2000, 4000], "qwen3-0.6b": [500, 1000, 2000, 4000]}
WRITTEN, COMPUTED, FROM_CACHE, FROM_DEVICE = "written", "computed", "page cache", "device"


@dataclass(frozen=True)
class Answer:
    """What one process saw."""

    seconds_to_first_token: float
    seconds_to_start: float  # the engine
    num_cached_tokens: int
    token_ids: list[int]
    nbytes_on_disk: int
    is_written: bool  # all that was to be kept


# In a process of its own


def answer(args: argparse.Namespace) -> Answer:
    """Run one prompt of ``args.length`` tokens in a fresh engine."""
    model = load_model(args.model, args.dtype)
    where = {} if args.cache_dir is None else {"cache_dir": args.cache_dir}
    num_blocks = -(-(args.length + NUM_TOKENS) // 16) + 8
    begin = time.perf_counter()
    engine = Engine(model, kv_cache_bytes=f"{num_blocks}blocks", **where)
    started = time.perf_counter() - begin
    run(engine, "warm up", [7] * 40, no_store=True)
    prompt = [5 + (31 * index + index // 50) % 900 for index in range(args.length)]
    seconds, token_ids = run(engine, "prompt", prompt)
    num_cached = engine.stats().num_cached_prompt_tokens
    is_written = engine.close(SECONDS_TO_WRITE)
    tier = engine.stats().disk_tier
    nbytes = 0 if tier is None else tier.nbytes
    return Answer(seconds, started, num_cached, token_ids, nbytes, is_written)


def run(
    engine: Engine, name: str, prompt: list[int], no_store: bool = False
) -> tuple[float, list[int]]:
    """Seconds to the first token, and the tokens."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    begin = time.perf_counter()
    engine.add_request(name, prompt, params, no_store=no_store)
    first, token_ids = None, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            output.raise_if_failed()
            token_ids = output.outputs[0].token_ids
            if first is None and token_ids:
                first = time.perf_counter() - begin
    assert first is not None
    return first, token_ids


def load_model(name: str, dtype: str) -> nn.Module:
    if name != "qwen3-0.6b":
        # As the programs load it: its weights are hashed once for all starts.
        return load_for(None, demo_model_path() if name == "demo" else name)[0]
    mx.random.seed(0)
    made = qwen3.Model(qwen3.ModelArgs.from_dict(QWEN3_0_6B))
    made.set_dtype(DTYPES[dtype])
    mx.eval(made.parameters())
    return made


# The one that starts them


def ask(args: argparse.Namespace, length: int, cache_dir: Path | None) -> Answer:
    command = [*COMMAND, "restart", "--model", args.model, "--dtype", args.dtype]
    command += ["--length", str(length)]
    if cache_dir is not None:
        command += ["--cache-dir", str(cache_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"restart.py: a process of {length} tokens failed:\n{done.stderr}")
    return Answer(**json.loads(done.stdout.splitlines()[-1]))


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure(args: argparse.Namespace, length: int, folder: Path) -> dict[str, Any]:
    """Of one length: the runs of each way, and what they come to."""
    written = ask(args, length, folder)
    note(length, "written", written)
    if not written.is_written:
        raise SystemExit(f"restart.py: {length} tokens were not all written")
    ways: dict[str, list[Answer]] = {WRITTEN: [written], COMPUTED: [], FROM_CACHE: []}
    if hasattr(os, "posix_fadvise"):
        ways[FROM_DEVICE] = []
    for turn in range(args.turns):
        timed = [way for way in ways if way != WRITTEN]
        for way in timed if turn % 2 == 0 else timed[::-1]:
            if way == FROM_DEVICE:
                drop_from_page_cache(folder)
            found = ask(args, length, None if way == COMPUTED else folder)
            note(length, way, found)
            check(length, way, found, written)
            ways[way].append(found)
    return row_of(
        length, {way: [asdict(each) for each in answers] for way, answers in ways.items()}
    )


def row_of(length: int, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What all runs of a length come to."""
    seconds = {way: [each["seconds_to_first_token"] for each in of] for way, of in runs.items()}
    return {
        "length": length,
        "seconds": {way: statistics.median(values) for way, values in seconds.items()},
        "computed_over": {
            way: statistics.median(a / b for a, b in zip(seconds[COMPUTED], values, strict=True))
            for way, values in seconds.items()
            if way not in (COMPUTED, WRITTEN)
        },
        "seconds_to_start": {
            way: statistics.median(each["seconds_to_start"] for each in of)
            for way, of in runs.items()
        },
        "nbytes_on_disk": runs[WRITTEN][0]["nbytes_on_disk"],
        "num_cached_tokens": runs[FROM_CACHE][0]["num_cached_tokens"],
        "runs": runs,
    }


def added_to(path: Path, setting: dict[str, Any], rows: list[dict[str, Any]]) -> list[Any]:
    """The rows of a file with the runs of these rows, which have to be of its setting."""
    kept = json.loads(path.read_text())
    for name, value in setting.items():
        if kept["setting"].get(name) != value:
            raise SystemExit(
                f"restart.py: {path} has {name}: {kept['setting'].get(name)}, and here it is "
                f"{value}; write to another file"
            )
    runs: dict[int, dict[str, list[dict[str, Any]]]] = {
        row["length"]: row["runs"] for row in kept["results"]
    }
    for row in rows:
        known = runs.setdefault(row["length"], {})
        for way, answers in row["runs"].items():
            known[way] = [*known.get(way, []), *answers]
    return [row_of(length, runs[length]) for length in sorted(runs)]


def check(length: int, way: str, found: Answer, written: Answer) -> None:
    if found.token_ids != written.token_ids:
        raise SystemExit(
            f"restart.py: {length} tokens, {way}: answered {found.token_ids}, and "
            f"{written.token_ids} when it was written"
        )
    num_expected = 0 if way == COMPUTED else (length - 1) // 16 * 16
    if found.num_cached_tokens != num_expected:
        raise SystemExit(
            f"restart.py: {length} tokens, {way}: {found.num_cached_tokens} came from the cache, "
            f"not {num_expected}"
        )


def note(length: int, what: str, found: Answer) -> None:
    print(f"{length}: {what}: {found.seconds_to_first_token:.3f} s", file=sys.stderr, flush=True)


def print_lengths(rows: list[dict[str, Any]]) -> None:
    ways = [way for way in (FROM_CACHE, FROM_DEVICE) if way in rows[0]["seconds"]]
    print_table(
        ["tokens", "MB on disk", "computed ms"]
        + [f"{what} {way}" for way in ways for what in ("ms from", "computed / from")]
        + ["start ms, without and with a folder"],
        [
            [
                f"{row['length']:,}",
                f"{row['nbytes_on_disk'] / 1e6:.1f}",
                f"{1e3 * row['seconds'][COMPUTED]:.0f}",
                *(
                    text
                    for way in ways
                    for text in (
                        f"{1e3 * row['seconds'][way]:.1f}",
                        f"{row['computed_over'][way]:.1f}",
                    )
                ),
                f"{1e3 * row['seconds_to_start'][COMPUTED]:.0f}, "
                f"{1e3 * row['seconds_to_start'][FROM_CACHE]:.0f}",
            ]
            for row in rows
        ],
    )


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--model", default="demo", help="demo, qwen3-0.6b, a folder or a hub id")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of random weights")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of the prompts")
    parser.add_argument("--turns", type=int, default=5, help="processes of each way and length")
    parser.add_argument("--add", action="store_true", help="to the runs that --out has already")
    parser.add_argument("--folder", type=Path, help="for the files; a temporary one")
    parser.add_argument("--quick", action="store_true", help="two short prompts, one turn")
    # Of the processes that it starts.
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    if args.length is not None:
        print(json.dumps(asdict(answer(args))))
        return
    if args.quick:
        args.lengths, args.turns = args.lengths or [40, 100], 1
    if args.add and (args.out is None or not args.out.is_file()):
        raise SystemExit("restart.py: --add needs an --out that is there")
    lengths = args.lengths or LENGTHS.get(args.model, LENGTHS["qwen3-0.6b"])
    with tempfile.TemporaryDirectory(prefix="restart", dir=args.folder) as folder:
        setting = machine_card() | {
            "model": args.model + (", quick: its figures say nothing" if args.quick else ""),
            "shape": shape_of(load_model(args.model, args.dtype)),
            "timed": "add_request to the first token, in a fresh process",
        }
        print_card("A prefix after a restart", setting)
        rows = [measure(args, length, Path(folder) / str(length)) for length in lengths]
    if args.add:
        rows = added_to(args.out, setting, rows)
    print_lengths(rows)
    print_json("restart", setting, rows, args.out)


if __name__ == "__main__":
    main()
