"""Decode speed of one stream: no cache, basic, paged, and mlx-lm's own KVCache, on the same weights
in one run.

    python -m benchmarks decode                        # layers as Qwen3-0.6B's, random weights
    python -m benchmarks decode --model demo           # the demo model: nearly all overhead
    python -m benchmarks decode --model gemma3-layers  # mlx-lm's model; or llama-, qwen3-moe-layers
    python -m benchmarks decode --model PATH_OR_REPO   # a real model

For each context length every cache is filled to it. Then the caches take turns, one decode step
each, so that a machine that speeds up or slows down does so for all. Ratios of time are medians
over these turns. "Scattered" is a paged cache in which no two blocks of the sequence are adjacent,
so that every block has to be gathered. The cost of an append alone follows (K/V rows of one token,
all layers, evaluated), as the context grows and as the pool grows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from benchmarks.lib.models import SHAPES, load_both, shape_of
from mlx_paged import Sequences, make_kv_cache, run_step
from mlx_paged.cache import KVCache, LayerSpec, PagedKVCache, group_layers

# K and V of each layer, [num_tokens, num_kv_heads, width].
LayersRows: TypeAlias = tuple[list[mx.array], list[mx.array]]


def random_rows(cache: KVCache, num_tokens: int) -> LayersRows:
    def rows(spec: LayerSpec, width: int) -> mx.array:
        return mx.random.normal((num_tokens, spec.num_kv_heads, width)).astype(spec.format.dtype)

    specs = [layer.spec for layer in cache.layers]
    keys = [rows(spec, spec.key_dim) for spec in specs]
    values = [rows(spec, spec.value_dim) for spec in specs]
    mx.eval(keys, values)
    return keys, values


def filled_mlx_lm_caches(model: nn.Module, rows: LayersRows) -> list[Any]:
    """The caches that mlx-lm makes for a model, one for each layer."""
    caches = make_prompt_cache(model)
    append_to_mlx_lm(caches, rows)
    mx.eval([cache.state for cache in caches])
    return caches


def append_to_mlx_lm(caches: list[Any], rows: LayersRows) -> None:
    for cache, keys, values in zip(caches, *rows, strict=True):
        cache.update_and_fetch(keys.swapaxes(0, 1)[None], values.swapaxes(0, 1)[None])


def timed(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def take_turns(steps: dict[str, Callable[[], Any]], num_turns: int) -> dict[str, np.ndarray]:
    """Seconds per step, ``[num_turns]`` for each."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(num_turns):
        for name, step in steps.items():
            times[name].append(timed(step))
    return {name: np.array(values) for name, values in times.items()}


def measure_decode(
    ours: nn.Module, theirs: nn.Module, length: int, args: argparse.Namespace
) -> dict[str, Any]:
    num_groups = len(group_layers(ours.layer_specs, args.block_size))
    num_blocks = -(-(length + args.turns + 2) // args.block_size) * num_groups
    budget = f"{2 * num_blocks}blocks"
    held = {
        name: Sequences(
            make_kv_cache(ours, kind, block_size=args.block_size, kv_cache_bytes=budget)
        )
        for name, kind in (("basic", "basic"), ("paged", "paged"), ("scattered", "paged"))
    }
    rows = random_rows(held["basic"].cache, length)
    for name in ("basic", "paged"):
        held[name].append("s", *rows)
    # Block by block in turn with a second sequence: no two blocks of one sequence lie side by side.
    for start in range(0, length, args.block_size):
        chunk = [[each[start : start + args.block_size] for each in part] for part in rows]
        for seq in ("s", "other"):
            held["scattered"].append(seq, *chunk)
    mlx_lm_caches = filled_mlx_lm_caches(theirs, rows)
    token = mx.array([[5]])

    def without_cache() -> None:
        # What a step costs when nothing is kept: the whole context again.
        cache = make_kv_cache(ours, "basic", kv_cache_bytes=f"{num_blocks}blocks")
        run_step(ours, Sequences(cache), {"s": [5] * (length + 1)})

    steps: dict[str, Callable[[], Any]] = {
        "mlx-lm": lambda: mx.eval(theirs(token, cache=mlx_lm_caches)),
        **{name: partial(run_step, ours, each, {"s": [5]}) for name, each in held.items()},
    }
    times = take_turns(steps, args.turns)
    if length <= args.no_cache_up_to:
        times["no cache"] = np.array([timed(without_cache)])
    medians = {name: float(np.median(values)) for name, values in times.items()}
    return {
        "length": length,
        "tokens_per_second": {name: 1 / seconds for name, seconds in medians.items()},
        "paged_over_basic": float(np.median(times["paged"] / times["basic"])),
        "scattered_over_basic": float(np.median(times["scattered"] / times["basic"])),
        "basic_over_mlx_lm": float(np.median(times["basic"] / times["mlx-lm"])),
        "paged_over_mlx_lm": float(np.median(times["paged"] / times["mlx-lm"])),
        "kv_bytes": {
            "no cache": 0,
            "mlx-lm": sum(c.nbytes for c in mlx_lm_caches),
            "basic": held["basic"].stats().nbytes_held,
            "paged": held["paged"].stats().nbytes_used,
        },
    }


def measure_append(
    ours: nn.Module, theirs: nn.Module, length: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Microseconds to write one token's rows in all layers, at a context of ``length``."""
    num_groups = len(group_layers(ours.layer_specs, args.block_size))
    budget = f"{-(-(length + args.turns + 2) // args.block_size) * num_groups}blocks"
    held = {
        kind: Sequences(
            make_kv_cache(ours, kind, block_size=args.block_size, kv_cache_bytes=budget)
        )
        for kind in ("basic", "paged")
    }
    rows, row = (random_rows(held["basic"].cache, num_tokens) for num_tokens in (length, 1))
    for sequences in held.values():
        sequences.append("s", *rows)
    mlx_lm_caches = filled_mlx_lm_caches(theirs, rows)

    def mlx_lm_append() -> None:
        append_to_mlx_lm(mlx_lm_caches, row)
        mx.eval([cache.keys for cache in mlx_lm_caches], [cache.values for cache in mlx_lm_caches])

    times = take_turns(
        {
            "mlx-lm": mlx_lm_append,
            "basic": lambda: held["basic"].append("s", *row),
            "paged": lambda: held["paged"].append("s", *row),
        },
        args.turns,
    )
    return {
        "length": length,
        "microseconds": {name: float(np.median(t)) * 1e6 for name, t in times.items()},
    }


def measure_pools(model: nn.Module, args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds per append and per decode step at the same context, in pools of different sizes,
    taking turns.
    """
    config = make_kv_cache(model, kv_cache_bytes="1block").config
    runs: dict[str, tuple[Sequences, Any]] = {}
    for num_slots in args.pools:
        num_blocks = num_slots // args.block_size * len(config.groups)
        pool = replace(config, block_size=args.block_size, num_blocks=num_blocks)
        cache = PagedKVCache(pool, initial_blocks=num_blocks)
        sequences = Sequences(cache)
        sequences.append("s", *random_rows(cache, 256))
        runs[str(num_slots)] = (sequences, random_rows(cache, 1))
    appends = take_turns(
        {name: partial(each.append, "s", *row) for name, (each, row) in runs.items()},
        args.turns,
    )
    decodes = take_turns(
        {name: partial(run_step, model, each, {"s": [5]}) for name, (each, _) in runs.items()},
        args.turns,
    )
    return {
        name: {
            "append_microseconds": float(np.median(appends[name])) * 1e6,
            "decode_microseconds": float(np.median(decodes[name])) * 1e6,
        }
        for name in runs
    }


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument(
        "--model",
        default="qwen3-0.6b-layers",
        help=f"qwen3-0.6b-layers, {', '.join(SHAPES)}, demo, a folder or a hub id",
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[64, 256, 1024, 4096], help="context lengths"
    )
    parser.add_argument("--turns", type=int, default=32, help="decode steps per cache and length")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--no-cache-up-to",
        type=int,
        default=256,
        help="longest context to recompute without a cache",
    )
    parser.add_argument(
        "--pools", type=int, nargs="+", default=[1_000, 100_000], help="pool sizes in slots"
    )
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    ours, theirs = load_both(args.model)
    setting = machine_card() | {
        "model": args.model,
        "shape": shape_of(ours),
        "block_size": args.block_size,
        "turns": args.turns,
    }
    print_card("One decode stream", setting)
    decode = [measure_decode(ours, theirs, length, args) for length in args.lengths]
    names = ("no cache", "mlx-lm", "basic", "paged")
    print_table(
        [
            "context",
            *(f"{n} tok/s" for n in names),
            "paged / basic",
            "scattered / basic",
            "basic / mlx-lm",
            "paged / mlx-lm",
        ],
        [
            [
                row["length"],
                *(
                    f"{row['tokens_per_second'][n]:.2f}" if n in row["tokens_per_second"] else "-"
                    for n in names
                ),
                *(f"{row[f'{name}_over_basic']:.3f}" for name in ("paged", "scattered")),
                *(f"{row[f'{name}_over_mlx_lm']:.3f}" for name in ("basic", "paged")),
            ]
            for row in decode
        ],
    )
    print_table(
        ["context", *(f"{n} K/V MB" for n in names)],
        [[row["length"], *(f"{row['kv_bytes'][n] / 1e6:.2f}" for n in names)] for row in decode],
    )
    appends = [measure_append(ours, theirs, length, args) for length in args.lengths]
    print_table(
        ["context", *(f"{n} append us" for n in names[1:])],
        [[row["length"], *(f"{row['microseconds'][n]:.0f}" for n in names[1:])] for row in appends],
    )
    pools = measure_pools(ours, args)
    print_table(
        ["pool slots", "append us", "decode us"],
        [
            [n, f"{p['append_microseconds']:.0f}", f"{p['decode_microseconds']:.0f}"]
            for n, p in pools.items()
        ],
    )
    print_json("decode", setting, {"decode": decode, "append": appends, "pools": pools}, args.out)


if __name__ == "__main__":
    main()
