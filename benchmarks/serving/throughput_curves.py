"""Serving as demand grows: our engine beside mlx-lm's BatchGenerator, on the same weights in one
run.

    python -m benchmarks throughput_curves               # some 5 minutes with OpenBLAS
    python -m benchmarks throughput_curves --model PATH_OR_REPO
    python -m benchmarks throughput_curves --quick       # does it run at all

Sides, figures and the random model are those of `throughput.py`. Two curves:

    requests at once    1, 2, 4 ... prompts of skewed lengths that come together: tokens per second,
                        and bytes of K/V at peak
    shared prefix       8 prompts with 0, 128, 256 ... tokens in common and 32 of their own that
                        come together: time to first token, median, and the same where a request
                        with the prefix was served before

Sides take turns, each time fresh ones; figures are medians over the turns.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import numpy as np

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from benchmarks.lib.models import shape_of
from benchmarks.serving.throughput import load_models, run
from benchmarks.serving.throughput_scenarios import SampleRequest, Scenario
from benchmarks.serving.throughput_sides import OURS, THEIRS, kv_nbytes_per_token

WITH_PROMPT_CACHE = "mlx-lm + prompt cache"
MIB = 2**20


@dataclass(frozen=True)
class Curves:
    """How far the curves go."""

    turns: int = 3
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    shortest: int = 64
    longest: int = 1024
    max_tokens: int = 32
    prefixes: tuple[int, ...] = (0, 128, 256, 512, 1024)
    num_sharing: int = 8
    own: int = 32


QUICK = Curves(1, (1, 3), 8, 32, 4, (0, 64), 2, 8)


def at_once(count: int, curves: Curves, vocab_size: int) -> Scenario:
    """Requests of lengths that are spread evenly over the quantiles of the skewed distribution of
    `throughput_scenarios.py`.
    """
    rng = np.random.default_rng(count)
    quantiles = (np.arange(count) + 0.5) / count
    lengths = curves.shortest / (1 - quantiles * (1 - curves.shortest / curves.longest))
    requests = [
        SampleRequest(f"r{i}", rng.integers(0, vocab_size, length).tolist(), curves.max_tokens)
        for i, length in enumerate(rng.permutation(np.rint(lengths).astype(int)))
    ]
    return Scenario(1, f"{count} at once", "", requests, pool_over_demand=1.2)


def sharing(prefix: int, is_seen: bool, curves: Curves, vocab_size: int) -> Scenario:
    rng = np.random.default_rng(prefix)

    def prompt(num_tokens: int) -> list[int]:
        token_ids: list[int] = rng.integers(0, vocab_size, num_tokens).tolist()
        return token_ids

    shared = prompt(prefix)
    requests = [
        SampleRequest(f"r{i}", shared + prompt(curves.own), 1) for i in range(curves.num_sharing)
    ]
    seen = [SampleRequest("seen", shared + prompt(curves.own), 1)] if is_seen else []
    name = f"{prefix} shared{', seen' if is_seen else ''}"
    return Scenario(2, name, "", requests, seen, pool_over_demand=1.5)


def medians(
    scenario: Scenario, models: dict[str, nn.Module], names: list[str], turns: int
) -> dict[str, dict[str, float]]:
    """Of each side over its turns: all figures that are numbers."""
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names if turn % 2 == 0 else names[::-1]:
            figures[name].append(run(name, models, scenario)[1])
    return {
        name: {
            key: float(np.median([run[key] for run in runs])) for key in runs[0] if key != "notes"
        }
        for name, runs in figures.items()
    }


def measure(models: dict[str, nn.Module], curves: Curves, turns: int) -> dict[str, Any]:
    vocab_size = models["ours"].args.vocab_size
    run(OURS, models, at_once(1, curves, vocab_size))  # kernels are compiled, threads started
    run(THEIRS, models, at_once(1, curves, vocab_size))
    counted = [
        {
            "num_requests": count,
            "sides": medians(at_once(count, curves, vocab_size), models, [OURS, THEIRS], turns),
        }
        for count in curves.counts
    ]
    shared = []
    for prefix in curves.prefixes:
        new, seen = (sharing(prefix, is_seen, curves, vocab_size) for is_seen in (False, True))
        row = {"prefix": prefix, "new": medians(new, models, [OURS, THEIRS], turns)}
        row["seen"] = medians(seen, models, [OURS, WITH_PROMPT_CACHE], turns)
        shared.append(row)
    return {"at_once": counted, "shared_prefix": shared}


def print_curves(results: dict[str, Any]) -> None:
    def row(each: dict[str, Any]) -> list[str]:
        ours, theirs = each["sides"][OURS], each["sides"][THEIRS]
        speeds = [side["tokens_per_second"] for side in (ours, theirs)]
        peaks = [side["kv_peak"] / MIB for side in (ours, theirs)]
        return [
            str(each["num_requests"]),
            *(f"{speed:.1f}" for speed in speeds),
            f"{speeds[0] / speeds[1]:.2f}",
            *(f"{peak:.1f}" for peak in peaks),
            f"{ours['live_kv_peak'] / MIB:.1f}",
        ]

    print_table(
        [
            "requests at once",
            *("tok/s", "mlx-lm's", "ratio"),
            *("K/V peak MiB", "mlx-lm's", "of tokens alone"),
        ],
        [row(each) for each in results["at_once"]],
    )
    print_table(
        ["shared prefix", "TTFT ms", "mlx-lm's", "seen before", f"{WITH_PROMPT_CACHE}'s"],
        [
            [
                str(each["prefix"]),
                *(
                    f"{1e3 * each[when][name]['ttft_median']:.0f}"
                    for when, name in (
                        ("new", OURS),
                        ("new", THEIRS),
                        ("seen", OURS),
                        ("seen", WITH_PROMPT_CACHE),
                    )
                ),
            ]
            for each in results["shared_prefix"]
        ],
    )


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument(
        "--model", default="random", help="random (weights), demo, a folder or a hub id"
    )
    parser.add_argument("--turns", type=int, help=f"of each side; {Curves().turns}")
    parser.add_argument("--quick", action="store_true", help="a small model, two short points")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    curves = QUICK if args.quick else Curves()
    turns = args.turns or curves.turns
    models = load_models(args)
    setting = machine_card() | {
        "model": args.model + (", quick: its figures say nothing" if args.quick else ""),
        "shape": shape_of(models["ours"]),
        "K/V per token": f"{kv_nbytes_per_token(models['ours'])} bytes",
        "at once": f"prompts of {curves.shortest}..{curves.longest} tokens, skewed, "
        f"{curves.max_tokens} more each",
        "shared prefix": f"{curves.num_sharing} prompts, {curves.own} tokens of their own",
        "turns": turns,
    }
    print_card("Serving as demand grows", setting)
    results = measure(models, curves, turns)
    print_curves(results)
    print_json("throughput_curves", setting, results, args.out)


if __name__ == "__main__":
    main()
