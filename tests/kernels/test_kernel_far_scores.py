"""Scores far from 0: the maximum begins below all, sees no hidden one and misses none that is late.

Each test is held against the mistakes that it is there for, planted into the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from helpers.fast_lane import mostly_slow
from helpers.kernel_checks import attend_and_compare, checked_metal
from helpers.kernel_grid import Case
from helpers.numpy_attention import PagedProblem

# Four streams of keys, and rows cut over simdgroups and threadgroups.
DECODE = Case("f32", 32, 8, 1, 1, ((40, 1), (257, 1)), None, False, "shuffled", "nan_values")
RUNS = Case("f32", 32, 8, 1, 10, ((300, 2), (16, 2)), None, False, "shuffled", "nan_values")
HALF = replace(DECODE, dtype="bf16")
NUM_PARTITIONS = 33  # one more than merge_partitions has lanes


def all_near_minus_320(context_len: int) -> np.ndarray:
    return np.full(context_len, -320.0)


def all_but_one(index: int, score: float) -> Callable[[int], np.ndarray]:
    """Scores near 0, and one near ``score``."""

    def offsets(context_len: int) -> np.ndarray:
        scores = np.zeros(context_len)
        scores[index] = score
        return scores

    return offsets


def low_scores(case: Case, *seqs: tuple[int, int]) -> PagedProblem:
    # Every chunk is full and every key is visible: nothing near 0 is there to raise the maximum.
    return replace(case, seqs=seqs).problem(score_offsets=all_near_minus_320)


def low_scores_of_runs() -> PagedProblem:
    return low_scores(RUNS, (300, 2), (16, 2))


def low_scores_and_low_sinks() -> PagedProblem:
    problem = low_scores_of_runs()
    sinks = mx.full((problem.q.shape[1],), -321.0)
    return replace(problem, params=replace(problem.params, sinks=sinks))


def a_hidden_later_token() -> PagedProblem:
    # The last query of each run sees the last key, those before it don't.
    return RUNS.problem(score_offsets=all_but_one(-1, 640.0))


def a_hidden_earlier_token() -> PagedProblem:
    # The first query of the run sees as far back as the window lets it, the second one no longer.
    case = replace(RUNS, seqs=((300, 2),), window=20)
    return case.problem(score_offsets=all_but_one(300 - 2 - 20 + 1, 640.0))


def a_late_maximum() -> PagedProblem:
    case = replace(DECODE, seqs=((256 * NUM_PARTITIONS, 1),))
    return case.problem(score_offsets=all_but_one(-5, 190.0))


PROBLEMS = {
    "low_scores": lambda: low_scores(DECODE, (40, 1), (8, 1), (256, 1)),
    "low_scores_in_several_partitions": lambda: low_scores(DECODE, (512, 1), (1024, 1)),
    "low_scores_in_half_precision": lambda: low_scores(HALF, (40, 1), (8, 1), (256, 1)),
    "low_scores_of_runs": low_scores_of_runs,
    "low_scores_and_low_sinks": low_scores_and_low_sinks,
    "a_hidden_later_token": a_hidden_later_token,
    "a_hidden_earlier_token": a_hidden_earlier_token,
    "a_late_maximum": a_late_maximum,
}


@mostly_slow("problem", PROBLEMS.values(), ids=PROBLEMS, quick=(3,))
def test_scores_far_from_zero_match_the_formula(
    problem: Callable[[], PagedProblem],
    compiler: None,
) -> None:
    with checked_metal():
        attend_and_compare(problem())


ATTENTION, MERGE, HEADER = "paged_attention.metal", "merge_partitions.metal", "paged_kv.h"
MISTAKES = {
    "a_maximum_that_begins_at_0": (
        "low_scores",
        ATTENTION,
        "highest[i] = NOTHING_SEEN;",
        "highest[i] = 0;",
    ),
    "the_same_for_runs": (
        "low_scores_of_runs",
        ATTENTION,
        "highest[i] = NOTHING_SEEN;",
        "highest[i] = 0;",
    ),
    "the_same_in_half_precision": (
        "low_scores_in_half_precision",
        ATTENTION,
        "highest[i] = NOTHING_SEEN;",
        "highest[i] = 0;",
    ),
    "the_same_where_partitions_are_merged": (
        "low_scores_in_several_partitions",
        MERGE,
        "float highest = LOWEST;",
        "float highest = 0;",
    ),
    "no_sink_taken_for_a_sink_of_0": (
        "low_scores",
        HEADER,
        "max(sink, LOWEST / 2) * LOG2_E",
        "max(sink, 0.0f)",
    ),
    "a_low_sink_taken_for_one_of_0": (
        "low_scores_and_low_sinks",
        HEADER,
        "max(sink, LOWEST / 2) * LOG2_E",
        "max(sink, 0.0f)",
    ),
    "a_masked_score_counts_as_0": (
        "low_scores_of_runs",
        ATTENTION,
        "visible ? score : LOWEST",
        "visible ? score : 0",
    ),
    "a_maximum_over_hidden_later_scores": (
        "a_hidden_later_token",
        ATTENTION,
        "seen = visible ? score : LOWEST;\n    const float top = max(highest[i], seen)",
        "seen = visible ? score : LOWEST;\n    const float top = max(highest[i], score)",
    ),
    "a_maximum_over_hidden_earlier_scores": (
        "a_hidden_earlier_token",
        ATTENTION,
        "max_over_lanes<SHARERS / STEPS, SHARERS>(seen)",
        "max_over_lanes<SHARERS / STEPS, SHARERS>(score)",
    ),
    "a_maximum_of_the_first_32_partitions": (
        "a_late_maximum",
        MERGE,
        "p = lane; p < num_partitions; p += SIMDGROUP_LANES",
        "p = lane; p < min(num_partitions, SIMDGROUP_LANES); p += SIMDGROUP_LANES",
    ),
    "a_maximum_of_one_lane": ("a_late_maximum", MERGE, "highest = simd_max(highest);", ""),
    "partitions_that_are_not_rescaled": (
        "a_late_maximum",
        MERGE,
        "fast::exp2(partial[HEAD_DIM] - highest)",
        "1",
    ),
    "no_shrinking_of_the_sum": (
        "a_late_maximum",
        ATTENTION,
        "fma(sum[i], factor, mine)",
        "sum[i] + mine",
    ),
    "streams_that_are_not_rescaled": (
        "a_late_maximum",
        ATTENTION,
        "fast::exp2(stream_highest[other] - top)",
        "1",
    ),
    "lanes_that_are_not_rescaled": (
        "a_late_maximum",
        ATTENTION,
        "share = fast::exp2(highest[i] - top);",
        "share = 1;",
    ),
    "an_accumulator_that_is_not_rescaled": (
        "a_late_maximum",
        ATTENTION,
        "acc[i][u] *= factor;",
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "name", "text", "other"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_maximum_is_seen(
    problem: str,
    name: str,
    text: str,
    other: str,
    plant: Callable[..., None],
    compiler: None,
) -> None:
    with checked_metal():
        plant(name, text, other)
        with pytest.raises(AssertionError, match=r"sequence \d"):
            attend_and_compare(PROBLEMS[problem]())
