"""Attention for long query runs, against the float64 formula and the decode operation."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import DECODING, GATHERING
from helpers.numpy_attention import (
    DTYPES,
    ORDERS,
    RAGGED_LENGTHS,
    assert_matches_formula,
    make_problem,
    to_float64,
)
from paged_testing.by_hand import step_of

from mlx_paged.ops import AttentionParams, KVHandle

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@dtypes
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_chunks_at_the_end_of_a_context_match_the_formula_for_every_head_dim(head_dim, dtype):
    problem = make_problem(
        [9, 17, 100, 257], [9, 12, 40, 33], head_dim=head_dim, dtype=dtype, seed=head_dim
    )
    assert_matches_formula(GATHERING.attend(*problem.args), problem)


@dtypes
@pytest.mark.parametrize(
    ("num_kv_heads", "group"),
    [(1, 1), (8, 1), (4, 2), (1, 3), (3, 5), (1, 7), (2, 8), (1, 16)],
    ids=str,
)
def test_every_group_size_matches_the_formula(num_kv_heads, group, dtype):
    problem = make_problem(
        [70, 17], [20, 17], num_kv_heads=num_kv_heads, group=group, dtype=dtype, seed=group
    )
    assert_matches_formula(GATHERING.attend(*problem.args), problem)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_every_block_size_and_order_matches_the_formula(block_size, order):
    problem = make_problem(RAGGED_LENGTHS, 13, block_size=block_size, order=order, seed=block_size)
    assert_matches_formula(GATHERING.attend(*problem.args), problem)


@pytest.mark.parametrize("context_len", [n for n in RAGGED_LENGTHS if n < 300])
def test_a_whole_prompt_matches_the_formula(context_len):
    problem = make_problem([context_len], context_len, group=1)
    assert_matches_formula(GATHERING.attend(*problem.args), problem)


@pytest.mark.parametrize("query_len", [1, 2, 8, 9, 15, 16, 17, 40])
def test_every_length_of_a_run_matches_the_formula(query_len):
    problem = make_problem([query_len, 41, 64, 333], query_len, seed=query_len)
    assert_matches_formula(GATHERING.attend(*problem.args), problem)


@dtypes
@pytest.mark.parametrize("sinks", [False, True], ids=["no_sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 2, 16, 17, 39, 40, 41, 99, 100, 1000])
def test_windows_and_sinks_match_the_formula(window, sinks, dtype):
    problem = make_problem([12, 40, 100], [12, 40, 30], window=window, sinks=sinks, dtype=dtype)
    assert_matches_formula(GATHERING.attend(*problem.args), problem)


@pytest.mark.parametrize("scale", [0.02, 0.5, 1.0])
def test_any_scale_matches_the_formula(scale):
    problem = make_problem([40, 100], [40, 30], scale=scale)
    assert_matches_formula(GATHERING.attend(*problem.args), problem)


@dtypes
@pytest.mark.parametrize("poison", ["nan_keys", "nan_values"])
@pytest.mark.parametrize("order", ["adjacent", "shuffled"])
def test_nan_and_infinity_in_unused_slots_are_never_seen(order, poison, dtype):
    problem = make_problem(
        [9, 33, 100], [9, 20, 30], order=order, poison=poison, window=50, dtype=dtype
    )
    assert_matches_formula(GATHERING.attend(*problem.args), problem)


@dtypes
@pytest.mark.parametrize("window", [None, 20], ids=["no_window", "window_20"])
def test_prefill_and_decode_are_the_same_operation_within_rounding(window, dtype):
    problem = make_problem(
        [8, 33, 100, 300], [8, 20, 3, 30], window=window, sinks=True, dtype=dtype
    )
    prefilled = to_float64(GATHERING.attend(*problem.args))
    decoded = to_float64(DECODING.attend(*problem.args))
    for seq in range(4):
        rows = problem.rows(seq)
        assert np.abs(prefilled[rows] - decoded[rows]).max() <= problem.allowed_errors[seq]


def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch():
    # Sequences are computed one by one here, so nothing else in the batch can change even the
    # rounding.
    problem = make_problem([40, 33, 100], [40, 20, 30])
    batch = GATHERING.attend(*problem.args)
    alone = mx.concatenate([GATHERING.attend(*problem.alone(seq)) for seq in range(3)])
    assert mx.array_equal(batch, alone).item()


@pytest.mark.parametrize("q_dtype", DTYPES.values(), ids=[f"q_{name}" for name in DTYPES])
@pytest.mark.parametrize("kv_dtype", DTYPES.values(), ids=[f"kv_{name}" for name in DTYPES])
def test_the_result_has_the_dtype_of_the_queries(q_dtype, kv_dtype):
    q, *rest = make_problem([33, 12], [20, 12], dtype=kv_dtype).args
    assert GATHERING.attend(q.astype(q_dtype), *rest).dtype == q_dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": mx.zeros((12, 4, 32))},
            r"\[attend\] q: expected .* = \[13, \*, 32\], got \[12, 4, 32\]",
        ),
        (
            {"q": mx.zeros((13, 3, 32))},
            r"\[attend\] q: 3 query heads are not a multiple of 2 KV heads",
        ),
        (
            {"params": AttentionParams(1.0, window=0)},
            r"\[attend\] window: must be at least 1 .*, got 0",
        ),
        (
            {"params": AttentionParams(1.0, sinks=mx.zeros((4, 1)))},
            r"\[attend\] sinks: expected \[num_heads\] = \[4\], got \[4, 1\]",
        ),
        (
            {"step": step_of([[0, 9]], [20], [13], 16)},
            r"\[attend\] step: block 9 is out of range, the slabs have 4 blocks",
        ),
        (
            {"step": step_of([[0]], [20], [13], 32)},
            r"\[attend\] step: built for blocks of 32, the slabs hold 16",
        ),
    ],
    ids=[
        "too_few_queries",
        "heads_not_a_multiple",
        "window_of_zero",
        "sinks_shape",
        "block_range",
        "block_size",
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, message):
    metadata = step_of([[3, 1]], [20], [13], 16)
    arguments = {
        "q": mx.zeros((13, 4, 32)),
        "kv": KVHandle.allocate(4, 2, 16, 32, 32),
        "step": metadata,
        "params": AttentionParams(1.0),
    }
    with pytest.raises(ValueError, match=message):
        GATHERING.attend(**arguments | change)
