"""The attention kernels against the float64 formula: every instance, length, window, sink, scale
and dtype.
"""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import METAL
from helpers.fast_lane import mostly_slow
from helpers.kernel_checks import (
    assert_same_bits,
    attend_and_compare,
    nan_before_the_window,
)
from helpers.kernel_grid import (
    BLOCK_SIZES,
    CAPACITIES,
    GRID,
    HEAD_DIMS,
    Case,
    each_case_of_the_grid,
)
from helpers.numpy_attention import DTYPES, assert_matches_formula, make_problem
from paged_testing.by_hand import dense_handle, step_of

from mlx_paged.ops import AttentionParams
from mlx_paged.ops.attention_plan import cut_rows
from mlx_paged.ops.metal import MetalBackend

LENGTHS = (1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1000, 5000)
WINDOWS = (None, 1, 2, 16, 100, 255, 256, 257, 300, 5000)

# Settings whose instances several tests share. Runs of one query, and of up to eight in simdgroups
# that share the rows.
DECODE = Case("bf16", 80, 8, 2, 16, ((1000, 1),), None, False, "shuffled", "nan_values")
RUNS = Case("f16", 80, 16, 2, 9, ((1000, 8),), None, False, "shuffled", "nan_values")
SMALL = Case("f32", 96, 8, 2, 1, ((300, 1),), None, True, "shuffled", "nan_keys")


def attend_over_slabs(problem):
    assert_matches_formula(METAL.attend(*problem.args), problem)


# The grid


def test_the_grid_covers_what_it_says():
    axes = {
        "dtype": set(DTYPES),
        "head_dim": set(HEAD_DIMS),
        "block_size": set(BLOCK_SIZES),
        "group": set(range(1, 17)),
        "capacity": set(CAPACITIES),
        "is_merged": {False, True},
    }
    missing = {}
    for one, other in itertools.combinations(axes, 2):
        there = {(getattr(case, one), getattr(case, other)) for case in GRID}
        missing[one, other] = len(set(itertools.product(axes[one], axes[other])) - there)
    assert {pair: count for pair, count in missing.items() if count} == {("head_dim", "group"): 47}
    # The rest costs nothing to compile, and each value of it meets partitions that are merged and
    # ones that are not.
    others = {field.name for field in fields(Case)} - axes.keys() - {"seqs"}
    assert others == {"num_kv_heads", "window", "sinks", "order", "poison"}
    for name, values in {
        "window": set(WINDOWS),
        "num_kv_heads": {1, 2, 3},
        "sinks": {False, True},
    }.items():
        assert {(getattr(case, name), case.is_merged) for case in GRID} == set(
            itertools.product(values, (False, True))
        )
    lengths = {(length, case.is_merged) for case in GRID for length, _ in case.seqs}
    assert lengths >= set(itertools.product(LENGTHS[:-1], (False, True)))
    assert {query_len for case in GRID for _, query_len in case.seqs} == set(range(1, 9))
    assert len({(case.dtype, case.head_dim) for case in GRID if case.is_merged}) == 18


@each_case_of_the_grid
def test_every_instance_matches_the_formula_over_slabs_and_with_new_rows(case, metal):
    attend_and_compare(case.problem())
    names = ["mlx_paged_paged_attention"] + ["mlx_paged_merge_partitions"] * case.is_merged
    assert [call.kernel for call in metal] == 2 * names
    call, with_rows = metal[0], metal[len(names)]
    assert call.template == with_rows.template  # one instance, compiled once, does both
    assert (call.template["RUN"], call.template["PARTIAL"]) == (case.capacity, case.is_merged)
    cut = cut_rows(case.capacity * case.group, case.row_bytes)
    assert call.threadgroup == (cut.num_threads, 1, 1)
    assert call.grid[:2] == (cut.num_threads, case.num_kv_heads * cut.row_parts)
    # In threadgroup memory each stream leaves its rows, and two floats for each.
    simdgroup_rows = -(-case.capacity * case.group // (cut.row_splits * cut.row_parts))
    rows = cut.streams * cut.row_splits * simdgroup_rows
    assert call.counts["threadgroup_bytes"] == rows * 4 * (case.head_dim + 2) <= 32 * 1024


# Lengths and windows


@mostly_slow("case", [DECODE, SMALL], ids=["bf16", "f32"])
@mostly_slow("context_len", LENGTHS, quick=(6,))
def test_a_sequence_alone_matches_the_formula_at_every_length(context_len, case, metal):
    attend_over_slabs(replace(case, seqs=((context_len, 1),)).problem())


@pytest.mark.parametrize("poison", ["nan_keys", "nan_values"])
@pytest.mark.parametrize(
    "extras", [{}, {"window": 20, "sinks": True}], ids=["plain", "window_sinks"]
)
def test_runs_of_any_length_match_the_formula_when_their_blocks_are_gathered(extras, poison, metal):
    problem = make_problem(
        [300, 1, 40, 17], [100, 1, 40, 9], group=4, dtype=mx.float16, poison=poison, **extras
    )
    gathering = MetalBackend(decode_runs={4: ()})
    assert_matches_formula(gathering.attend(*problem.args), problem)
    assert [call.kernel for call in metal] == ["mlx_paged_gather_blocks"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [DECODE, RUNS], ids=["decodes", "runs"])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_window_matches_the_formula_at_every_length(window, case, metal):
    # Windows that begin in the middle of a block, of a chunk and of a partition, and runs that
    # reach over its border.
    lengths = [max(length, case.capacity) for length in LENGTHS]
    case = replace(
        case,
        seqs=tuple((n, case.capacity) for n in lengths),
        window=window,
        sinks=True,
        num_kv_heads=1,
    )
    attend_over_slabs(case.problem())


@pytest.mark.parametrize("order", ["adjacent", "shuffled", "reversed", "shared"])
def test_every_order_of_blocks_matches_the_formula(order, metal):
    attend_over_slabs(
        replace(DECODE, seqs=((1000, 1), (257, 1), (999, 1), (16, 1)), order=order).problem()
    )


@mostly_slow("query_len", [5, 6, 7, 8], quick=(1,))
def test_a_run_whose_border_is_that_of_a_partition_matches_the_formula(query_len, metal):
    seqs = tuple((context_len, query_len) for context_len in range(255, 265))
    attend_over_slabs(replace(RUNS, seqs=seqs, num_kv_heads=1).problem())


@pytest.mark.slow
def test_runs_of_every_length_share_a_batch(metal):
    problem = make_problem(
        [300, 1, 40, 257, 8, 33, 70, 100, 5, 600],
        [5, 1, 3, 2, 8, 6, 7, 4, 1, 1],
        group=4,
        dtype=mx.float16,
        poison="nan_keys",
    )
    attend_over_slabs(problem)
    # The longest first, each kernel once, and all but the fours have a sequence of several
    # partitions.
    attention = [call.template for call in metal if call.kernel == "mlx_paged_paged_attention"]
    assert [(t["RUN"], t["PARTIAL"]) for t in attention] == [
        (8, True),
        (1, True),
        (4, False),
        (2, True),
    ]


# What must not be read


@mostly_slow("window", [1, 2, 13, 100, 256, 300], quick=(2,))
@mostly_slow("case", [DECODE, RUNS], ids=["decodes", "runs"], quick=(1,))
def test_nothing_before_the_window_is_read(case, window, metal):
    problem = replace(
        case, seqs=((1000, case.capacity), (17, case.capacity)), window=window, num_kv_heads=1
    ).problem()
    q, _, *rest = problem.args
    hidden = nan_before_the_window(problem)
    assert_matches_formula(METAL.attend(q, hidden, *rest), problem)


def test_unused_slots_of_k_and_v_may_both_hold_nan(metal):
    problems = [
        replace(DECODE, seqs=((1000, 1), (3, 1)), poison=f"nan_{name}").problem()
        for name in ("keys", "values")
    ]
    q, _, *rest = problems[0].args
    both = dense_handle(problems[0].kv.k[0], problems[1].kv.v[0])
    assert_same_bits(
        METAL.attend(q, both, *rest),
        METAL.attend(*problems[0].args),
    )


def test_reading_leaves_the_slabs_as_they_were(metal):
    problem = replace(RUNS, seqs=((300, 8), (9, 7))).problem(poison="large")
    before = [mx.array(np.array(slab)) for slab in problem.kv.slabs]
    mx.eval(METAL.attend(*problem.args))
    for slab, old in zip(problem.kv.slabs, before, strict=True):
        assert_same_bits(slab, old)


# Sinks and scales


@pytest.mark.parametrize("context_len", [33, 300], ids=["direct", "merged"])
@mostly_slow("num_heads", [1, 2, 3, 7, 8, 9], quick=(2, 4))
def test_sinks_of_any_number_of_heads_match_the_formula(num_heads, context_len, metal):
    # Fewer than eight are padded to eight, which is what makes them the same kernel.
    attend_over_slabs(
        replace(SMALL, num_kv_heads=num_heads, seqs=((context_len, 1), (1, 1))).problem()
    )


@pytest.mark.parametrize("context_len", [33, 300], ids=["direct", "merged"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_sink_takes_all_or_nothing_in_every_dtype(dtype, context_len, metal):
    problem = replace(SMALL, num_kv_heads=3, sinks=False, seqs=((context_len, 1),)).problem()
    without = METAL.attend(*problem.args)
    sinks = mx.array([-mx.inf, 1000, -1000], dtype)
    out = METAL.attend(*problem.args[:3], replace(problem.params, sinks=sinks))
    assert_same_bits(out[:, 0], without[:, 0])
    assert_same_bits(mx.abs(out[:, 1]), mx.zeros_like(out[:, 1]))
    assert_same_bits(out[:, 2], without[:, 2])


@pytest.mark.parametrize("scale", [0.0, 0.02, 1.0, -0.5], ids=str)
def test_any_scale_matches_the_formula(scale, metal):
    attend_over_slabs(replace(SMALL, seqs=((300, 1), (1, 1), (16, 1))).problem(scale=scale))


def test_long_products_of_f16_do_not_overflow_before_the_scale(metal):
    # q @ k is 115,200, above the 65,504 of f16; scaled it is 10,182.
    kv = dense_handle(
        mx.full((1, 1, 32, 128), 30.0, mx.float16), mx.full((1, 1, 32, 128), 2.0, mx.float16)
    )
    metadata = step_of([[0]], [30], [4], 32)
    q = mx.full((4, 6, 128), 30.0, mx.float16)
    out = METAL.attend(q, kv, metadata, AttentionParams(128**-0.5))
    assert_same_bits(out, mx.full((4, 6, 128), 2.0, mx.float16))


# Dtypes of the queries


@mostly_slow("dtype", DTYPES.values(), ids=DTYPES)
def test_queries_of_any_size_give_the_same_bits_when_the_scale_makes_up_for_it(dtype, metal):
    # The kernel keeps bfloat16 queries as float16, which has less range.
    problem = replace(DECODE, seqs=((40, 1), (300, 1))).problem(dtype=dtype)
    _, kv, metadata, params = problem.args
    out = METAL.attend(*problem.args)
    for exponent in (-12, 10) if dtype == mx.float16 else (-80, -20, 20, 80):
        q = problem.q.astype(mx.float32) * 2.0**exponent
        scaled = replace(params, scale=params.scale * 2.0**-exponent)
        same = METAL.attend(q.astype(dtype), kv, metadata, scaled)
        if dtype != mx.float16:  # which rounds the small ones
            assert_same_bits(same, out)
        assert_matches_formula(same, problem)


def test_heads_of_very_different_size_and_none_keep_their_precision(metal):
    problem = replace(DECODE, seqs=((40, 1), (300, 1))).problem()
    sizes = np.array([2.0**n for n in range(-60, 4, 4)])[:, None]
    # One large element hides none of the others, and a row of zeros sees all keys alike.
    q = np.array(problem.q.astype(mx.float32)).reshape(2, 2, 16, 80) * sizes
    q[:, 0, 3, 5] = 2.0**8
    q[:, 1, 5] = 0
    queries = mx.array(q.reshape(2, 32, 80)).astype(mx.bfloat16)
    dense = tuple((queries[seq : seq + 1], *kv) for seq, (_, *kv) in enumerate(problem.dense))
    attend_over_slabs(replace(problem, q=queries, dense=dense))


@pytest.mark.parametrize("q_dtype", DTYPES.values(), ids=[f"q_{name}" for name in DTYPES])
@pytest.mark.parametrize("case", [DECODE, RUNS, SMALL], ids=["kv_bf16", "kv_f16", "kv_f32"])
def test_queries_of_another_dtype_are_cast_to_that_of_the_slabs_and_the_result_back(
    case, q_dtype, metal
):
    problem = replace(case, seqs=((300, case.capacity), (20, case.capacity))).problem()
    _, kv, *rest = problem.args
    q = problem.q.astype(q_dtype)
    out = METAL.attend(q, kv, *rest)
    expected = METAL.attend(q.astype(kv.dtype), kv, *rest)
    assert_same_bits(out, expected.astype(q_dtype))


def test_queries_that_are_a_transposed_view_give_the_same_bits(metal):
    problem = replace(RUNS, seqs=((300, 8), (20, 8))).problem()
    q, *rest = problem.args
    heads_first = mx.contiguous(q.swapaxes(0, 1))
    mx.eval(heads_first)
    out = METAL.attend(heads_first.swapaxes(0, 1), *rest)
    assert_same_bits(out, METAL.attend(*problem.args))
