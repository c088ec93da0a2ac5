"""Scores that are capped, in the attention kernels: a constant that they are compiled with."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from helpers.backends import METAL
from helpers.fast_lane import mostly_slow
from helpers.kernel_checks import assert_same_alone, attend_and_compare, checked_metal
from helpers.kernel_grid import Case
from helpers.numpy_attention import DTYPES, make_problem
from helpers.quantised_problems import quantised
from metal_emulator import Checks
from paged_testing.emulated_metal import emulated_metal
from test_self_check import ALL, SHAPE

from mlx_paged.ops.self_check import try_kernels

# Scores are up to some 60 in both, and new keys and old ones, in partitions and in one.
SCALE, CAP = 2.0, 30.0
DECODES = Case("bf16", 64, 16, 2, 4, ((300, 1), (40, 1)), None, False, "shuffled", "nan_values")
RUNS = Case("f32", 32, 8, 2, 3, ((300, 3), (17, 2)), 200, True, "shuffled", "nan_keys")


def problem_of(case: Case, **changes):
    return case.problem(**{"scale": SCALE, "softcap": CAP} | changes)


@pytest.mark.parametrize("case", [DECODES, RUNS], ids=["decodes", "runs"])
def test_capped_scores_match_the_formula(case, metal):
    attend_and_compare(problem_of(case))
    caps = {call.template["SOFTCAP"] for call in metal if "SOFTCAP" in call.template}
    assert caps == {0x41F00000}, "the bits of 30.0"


@mostly_slow(
    ("softcap", "dtype"),
    [(50.0, "f32"), (50.0, "f16"), (50.0, "bf16"), (0.7, "f16"), (5.0, "bf16"), (1e4, "f32")],
)
def test_any_cap_matches_the_formula(softcap, dtype, metal):
    problem = problem_of(DECODES, softcap=softcap, dtype=DTYPES[dtype], scale=softcap / 10)
    attend_and_compare(problem)


@mostly_slow("bits", [(8, 8), (4, 4)], quick=(1,))
def test_capped_scores_of_quantised_rows_match_the_formula(bits, metal):
    attend_and_compare(quantised(problem_of(DECODES, dtype=mx.float16), *bits))


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(metal):
    problem = problem_of(DECODES)
    assert_same_alone(problem, METAL.attend(*problem.args))


def test_scores_far_above_the_cap_are_the_cap(metal):
    problem = make_problem([40], 1, scale=1e6, softcap=CAP, dtype=mx.float32)
    attend_and_compare(problem)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "other"),
    [
        ("paged_kv.h", "score * (2 * LOG2_E / cap)", "score * (LOG2_E / cap)"),
        ("paged_kv.h", "as_type<float>(CAP_BITS) * LOG2_E", "as_type<float>(CAP_BITS)"),
        ("paged_attention.metal", "capped<SOFTCAP>(sum_of_all", "capped<0>(sum_of_all"),
        (
            "paged_attention.metal",
            "capped<SOFTCAP>(sum_over_lanes",
            "capped<0>(sum_over_lanes",
        ),
    ],
    ids=["steepness", "base", "older_keys", "new_keys"],
)
def test_a_mistake_shows_in_the_result(name, text, other, plant, compiler):
    with checked_metal():
        plant(name, text, other)
        with pytest.raises(AssertionError, match=r"sequence \d"):
            attend_and_compare(problem_of(RUNS))


def test_the_check_at_start_up_tries_the_cap(compiler, plant):
    shape = replace(SHAPE, softcap=5.0)
    with emulated_metal(Checks.quick(), tries_kernels=True) as trace:
        assert try_kernels(shape) == ALL
        caps = {call.template["SOFTCAP"] for call in trace if "SOFTCAP" in call.template}
    assert caps == {0x40A00000}
    with emulated_metal(Checks.quick(), tries_kernels=True):
        plant("paged_attention.metal", "capped<SOFTCAP>(sum_of_all", "capped<0>(sum_of_all")
        with pytest.warns(UserWarning, match=r"scores capped at 5\) has .* times the error"):
            assert try_kernels(replace(shape, num_kv_heads=1)).decode_runs == ()
