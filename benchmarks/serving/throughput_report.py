"""What `throughput.py` prints of a scenario, and whether ours reached what it should."""

from __future__ import annotations

from typing import Any

from benchmarks.lib.card import print_table
from benchmarks.serving.throughput_sides import OURS, THEIRS

MIB = 2**20

# What ours should reach against mlx-lm's BatchGenerator: scenario, what, figure, limit, whether
# more is better.
AIMS = [
    ("equal lengths", "tokens per second, over mlx-lm's", "tokens_per_second", 1.0, True),
    ("skewed lengths", "tokens per second, over mlx-lm's", "tokens_per_second", 2.0, True),
    ("skewed lengths", "K/V bytes at peak, over mlx-lm's", "kv_peak", 0.25, False),
    ("arrivals and departures", "tokens per second, over mlx-lm's", "tokens_per_second", 2.0, True),
    (
        "shared prefix, never seen",
        "time to first token, median, over mlx-lm's",
        "ttft_median",
        0.1,
        False,
    ),
    (
        "shared prefix, seen before",
        "time to first token, median, over mlx-lm's",
        "ttft_median",
        0.1,
        False,
    ),
    ("shared prefix, never seen", "K/V bytes at peak, over mlx-lm's", "kv_peak", 0.5, False),
    ("shared prefix, seen before", "K/V bytes at peak, over mlx-lm's", "kv_peak", 0.5, False),
]
MAX_WASTED = 0.04


def judge(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {result["name"]: result["sides"] for result in measured}
    verdicts = []
    for name, what, figure, limit, more_is_better in AIMS:
        sides = by_name.get(name, {})
        if OURS in sides and THEIRS in sides:
            ratio = sides[OURS][figure] / sides[THEIRS][figure]
            met = ratio >= limit if more_is_better else ratio <= limit
            bound = f"at {'least' if more_is_better else 'most'} {limit:g}"
            verdicts.append(
                {"scenario": name, "aim": f"{what}: {bound}", "value": ratio, "met": met}
            )
    for name, sides in by_name.items():
        if OURS in sides:
            share = sides[OURS]["wasted"]
            aim = f"slots wasted: under {MAX_WASTED:g}"
            verdicts.append(
                {"scenario": name, "aim": aim, "value": share, "met": share < MAX_WASTED}
            )
    return verdicts


def print_scenario(result: dict[str, Any]) -> None:
    print(f"## ({result['scenario']}) {result['name']}: {result['what']}\n")

    def row(name: str, side: dict[str, Any]) -> list[str]:
        return [
            name,
            f"{side['tokens_per_second']:.1f}",
            *(f"{side[key]:.3f}" for key in ("ttft_median", "ttft_p95")),
            f"{1000 * side['tpot_median']:.1f}",
            *(f"{side[key] / MIB:.1f}" for key in ("kv_peak", "active_peak", "peak_memory")),
            f"{side['wasted']:.1%}",
            f"{side['same_tokens']:.1%}" if "same_tokens" in side else "-",
        ]

    sides = result["sides"]
    rows = [row(name, side) for name, side in sides.items()]
    if OURS in sides:
        keys = (
            "tokens_per_second",
            "ttft_median",
            "ttft_p95",
            "tpot_median",
            "kv_peak",
            "active_peak",
            "peak_memory",
        )
        for name in sides:
            if name != OURS:
                ratios = [sides[OURS][key] / sides[name][key] for key in keys]
                rows.append([f"ratio to {name}", *(f"{ratio:.3f}x" for ratio in ratios), "", ""])
    print_table(
        [
            "side",
            "tok/s",
            "TTFT s",
            "p95 s",
            "TPOT ms",
            "K/V peak MiB",
            "active peak MiB",
            "peak memory MiB",
            "wasted",
            "same tokens",
        ],
        rows,
    )
    print(f"our pool: {result['pool_nbytes'] / MIB:.1f} MiB")
    for name, side in sides.items():
        spread = [run["tokens_per_second"] for run in side["runs"]]
        print(f"{name}: {min(spread):.1f}..{max(spread):.1f} tok/s; ", end="")
        print(
            ", ".join(
                f"{n} {v:.2f}" if isinstance(v, float) else f"{n} {v}"
                for n, v in side["notes"].items()
            )
        )
    print()


def print_aims(aims: list[dict[str, Any]]) -> None:
    if aims:
        header = ["scenario", "aim", "measured", "met"]
        print_table(
            header,
            [
                [a["scenario"], a["aim"], f"{a['value']:.3f}", "yes" if a["met"] else "no"]
                for a in aims
            ],
        )
