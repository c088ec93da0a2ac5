"""What `approaches.py` says of what it measured: figures, a table, and whether each approach kept
what it should.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.cache.approach_measures import FirstTokens, LongestContext, Prediction
from benchmarks.cache.approach_sides import Approach
from benchmarks.lib.card import print_table

MIB = 2**20
# In float32 exact approaches differ in the order of sums only.
MAX_ROUNDING = 1e-4
# In half precision rounding decides between tokens that are equally likely.
MAX_ROUNDING_HALF = 5e-3


@dataclass
class Turns:
    """What was seen of one approach."""

    together: list[float] = field(default_factory=list)  # tokens per second
    alone: list[float] = field(default_factory=list)
    first: list[FirstTokens] = field(default_factory=list)
    nbytes_held: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)  # of the last turn


def row_of(
    approach: Approach,
    turns: Turns,
    theirs: Turns,
    context: LongestContext,
    budget: int,
    prediction: Prediction,
    expected: Prediction,
) -> dict[str, Any]:
    """The figures of one approach, beside mlx-lm's."""
    speeds, ratios = {}, {}
    for name in ("together", "alone"):
        own, others = getattr(turns, name), getattr(theirs, name)
        speeds[name] = statistics.median(own)
        ratios[name] = median_ratio(own, others)
    seconds, first_ratios = {}, {}
    for name in ("cold", "warm", "restarted"):
        first = [getattr(each, name) for each in turns.first]
        seconds[name] = statistics.median(first)
        first_ratios[name] = median_ratio(first, [getattr(each, name) for each in theirs.first])
    return {
        "longest_context": asdict(context) | {"of_budget": context.nbytes_held / budget},
        "tokens_per_second": speeds,
        "tokens_per_second_over_mlx_lm": ratios,
        "ttft": seconds,
        "ttft_over_mlx_lm": first_ratios,
        "survives": approach.survives,
        "kv_nbytes": turns.nbytes_held,
        "perplexity": prediction.perplexity,
        "perplexity_change": prediction.perplexity / expected.perplexity - 1,
        "same_choice": prediction.same_choice(expected),
        "found_again": prediction.found_again,
        "same_tokens": share_of_same(turns.tokens, theirs.tokens),
        "same_tokens_alone": share_of_same({"alone": turns.tokens["alone"]}, theirs.tokens),
        "turns": asdict(turns) | {"tokens": None},
    }


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """The median, over the turns, of the ratio within a turn."""
    return statistics.median(a / b for a, b in zip(values, others, strict=True))


def share_of_same(tokens: dict[str, list[int]], expected: dict[str, list[int]]) -> float:
    """Of the tokens that were given, however many."""
    pairs = [
        pair for name, given in tokens.items() for pair in zip(given, expected[name], strict=False)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def checks_of(
    approach: Approach, row: dict[str, Any], is_float32: bool, has_enough_text: bool
) -> list[dict[str, Any]]:
    """What an approach should keep, and whether it did.

    Args:
        has_enough_text: whether the text is long enough for the bounds of lossy ones.
    """
    longest, change = row["longest_context"], abs(row["perplexity_change"])
    checks = [_at_most("K/V of the longest context, over the budget", longest["of_budget"], 1.0)]
    if longest["num_tokens"] is not None:
        refused = float(longest["refused_beyond"])
        checks.append(_at_least("one token more does not fit", refused, 1.0))
    if approach.keeps_prefixes:
        checks.append(_at_least("blocks of documents found again", row["found_again"], 1.0))
    if approach.is_exact:
        tolerance = MAX_ROUNDING if is_float32 else MAX_ROUNDING_HALF
        checks.append(_at_most("perplexity change, either way", change, tolerance))
        if is_float32:
            checks.append(_at_least("same tokens as mlx-lm's", row["same_tokens"], 1.0))
    elif approach.bound is None and is_float32:  # a window, within which nothing has left
        same = row["same_tokens_alone"]
        checks.append(_at_least("same tokens as mlx-lm's, alone", same, 1.0))
    elif approach.bound is not None and has_enough_text:
        bound = approach.bound
        checks.append(_at_most("perplexity change, either way", change, bound.perplexity_change))
        checks.append(_at_least("same choice as mlx-lm's", row["same_choice"], bound.same_choice))
    return checks


def _at_most(what: str, value: float, bound: float) -> dict[str, Any]:
    return {"what": f"{what}: at most", "value": value, "bound": bound, "met": value <= bound}


def _at_least(what: str, value: float, bound: float) -> dict[str, Any]:
    return {"what": f"{what}: at least", "value": value, "bound": bound, "met": value >= bound}


def print_approaches(rows: dict[str, dict[str, Any]]) -> None:
    print_table(*table_of(rows))


def table_of(rows: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The header and the cells of all approaches."""

    def with_ratio(value: str, ratio: float) -> str:
        return f"{value} ({ratio:.2f}x)"

    return (
        [
            "approach",
            "longest context",
            "tok/s together",
            "tok/s alone",
            "TTFT ms: cold",
            "warm",
            "after a restart",
            "K/V MiB",
            "perplexity",
            "same choice",
            "same tokens",
        ],
        [
            [
                name,
                shown_context(row["longest_context"]),
                *(
                    with_ratio(
                        f"{row['tokens_per_second'][key]:.0f}",
                        row["tokens_per_second_over_mlx_lm"][key],
                    )
                    for key in ("together", "alone")
                ),
                *(
                    with_ratio(f"{1e3 * row['ttft'][key]:.0f}", row["ttft_over_mlx_lm"][key])
                    for key in ("cold", "warm", "restarted")
                ),
                f"{row['kv_nbytes'] / MIB:.1f}",
                f"{row['perplexity_change']:+.3%}",
                f"{row['same_choice']:.2%}",
                f"{row['same_tokens']:.1%}",
            ]
            for name, row in rows.items()
        ],
    )


def shown_context(longest: dict[str, Any]) -> str:
    if longest["num_tokens"] is None:
        return f"any ({longest['num_run']:,} run)"
    return f"{longest['num_tokens']:,}"


def print_checks(checks: dict[str, list[dict[str, Any]]]) -> None:
    print_table(
        ["approach", "what it should keep", "bound", "measured", "met"],
        [
            [
                name,
                each["what"],
                f"{each['bound']:g}",
                f"{each['value']:.6g}",
                "yes" if each["met"] else "NO",
            ]
            for name, made in checks.items()
            for each in made
        ],
    )
