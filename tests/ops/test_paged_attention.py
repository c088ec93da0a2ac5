"""Attention over block tables, decodes and longer runs, held against the float64 formula."""

import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import DECODING, GATHERING
from helpers.numpy_attention import (
    DTYPES,
    ORDERS,
    RAGGED_LENGTHS,
    assert_matches_formula,
    attention,
    make_problem,
    to_float64,
)
from paged_testing.by_hand import dense_handle, step_of

from mlx_paged.ops import AttentionParams, KVHandle

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
backends = pytest.mark.parametrize("backend", [DECODING, GATHERING], ids=["decode", "gather"])

# The formula itself, by hand


def written(values, num_kv_heads=1, head_dim=32, keys=0.0):
    """Slabs whose block 0 holds tokens with these values in every channel, and equal keys."""
    kv = dense_handle(
        mx.full((1, num_kv_heads, 8, head_dim), keys), mx.full((1, num_kv_heads, 8, head_dim), 1e4)
    )
    for offset, value in enumerate(values):
        kv.v[0][0, :, offset] = mx.broadcast_to(
            mx.array(value).reshape(-1, 1), (num_kv_heads, head_dim)
        )
    mx.eval(kv.k[0], kv.v[0])
    return kv


def decode(kv, context_len, num_heads=1, query_len=1, **kwargs):
    q = mx.ones((query_len, num_heads, kv.key_dim))
    metadata = step_of([[0]], [context_len], [query_len], kv.block_size)
    return DECODING.attend(q, kv, metadata, AttentionParams(1.0, **kwargs))[:, :, 0].tolist()


def test_a_single_token_returns_its_own_value():
    assert decode(written([3.0]), context_len=1) == [[3.0]]


def test_equal_keys_return_the_mean_of_the_values():
    assert decode(written([1.0, 2.0, 6.0, 7.0]), context_len=4) == [[4.0]]


def test_each_query_of_a_run_sees_itself_and_what_came_before():
    assert decode(written([1.0, 3.0, 8.0]), context_len=3, query_len=3) == [[1.0], [2.0], [4.0]]


def test_a_window_of_one_is_the_current_token_and_a_window_of_two_adds_the_one_before():
    kv = written([1.0, 3.0, 8.0])
    assert decode(kv, context_len=3, query_len=3, window=1) == [[1.0], [3.0], [8.0]]
    assert decode(kv, context_len=3, query_len=3, window=2) == [[1.0], [2.0], [5.5]]


def test_a_sink_takes_its_share_of_the_weight_and_brings_no_value():
    kv = written(
        [4.0, 8.0, 12.0]
    )  # all scores are 0, and so is the first head's sink: 3 of 4 equal shares remain
    out = decode(kv, context_len=3, num_heads=3, sinks=mx.array([0.0, -mx.inf, 1000.0]))
    assert out == [[6.0, 8.0, 0.0]]


def test_adjacent_query_heads_share_a_kv_head():
    kv = written([[1.0, 2.0]], num_kv_heads=2)
    assert decode(kv, context_len=1, num_heads=6) == [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]]


def test_the_scale_multiplies_the_scores():
    kv = written([0.0, 1.0], head_dim=32)
    kv.k[0][0, :, 1] = mx.full((1, 32), 1 / 32)  # q @ k is 0 and 1
    metadata = step_of([[0]], [2], [1], 8)
    out = DECODING.attend(mx.ones((1, 1, 32)), kv, metadata, AttentionParams(scale=3.0))
    assert out[0, 0, 0].item() == pytest.approx(1 / (1 + np.exp(-3.0)), rel=1e-6)


@pytest.mark.parametrize("sinks", [False, True], ids=["no_sinks", "sinks"])
def test_the_numpy_formula_agrees_with_mlx_own_attention(sinks):
    problem = make_problem([37], [5], sinks=sinks)
    q, k, v = (rows.swapaxes(0, 1)[None] for rows in problem.dense[0])
    theirs = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=problem.params.scale, mask="causal", sinks=problem.params.sinks
    )
    np.testing.assert_allclose(
        to_float64(theirs[0].swapaxes(0, 1)), problem.exact[0], rtol=1e-4, atol=1e-6
    )


def test_the_numpy_formula_does_not_depend_on_a_shift_of_all_logits():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, 1, 8)) for _ in range(3))
    shifted = (
        np.concatenate([k, np.full((6, 1, 1), 7.0)], axis=2),
        np.concatenate([q, np.ones((6, 1, 1))], axis=2),
    )
    values = np.concatenate([v, v[:, :, :1]], axis=2)
    out = attention(shifted[1], shifted[0], values, 1.0, sinks=np.array([1.5 + 7.0]))
    np.testing.assert_allclose(
        out[:, :, :8], attention(q, k, v, 1.0, sinks=np.array([1.5])), atol=1e-12
    )


# Against the formula: blocks that are read where they lie, and gathered ones

AXES = {
    "dtype": list(DTYPES),
    "head_dim": [32, 64, 80, 96, 128, 256],
    "num_kv_heads": [1, 2, 3, 4],
    "group": [1, 2, 3, 4, 5, 6, 7, 8, 12, 16],
    "block_size": [8, 16, 32, 64],
    "order": list(ORDERS),
    "window": [None, None, 1, 9, 16, 63, 300],
    "sinks": [False, True],
}
GROUPS = [(1, 1), (8, 1), (4, 2), (8, 2), (1, 3), (2, 4), (3, 5), (1, 7), (2, 8), (1, 16), (2, 16)]
DECODES, RUNS = ([300, 17, 1], [1, 3, 1]), ([12, 40, 100], [12, 40, 30])


def one_thing_after_the_other() -> Iterator[tuple[list[int], list[int] | int, dict[str, Any]]]:
    """Context lengths, query runs, and what else there is to set."""
    for dtype in DTYPES:
        for head_dim in AXES["head_dim"]:
            yield RAGGED_LENGTHS, 1, {"head_dim": head_dim, "dtype": dtype}
            yield [9, 17, 100, 257], [9, 12, 40, 33], {"head_dim": head_dim, "dtype": dtype}
        for num_kv_heads, group in GROUPS:
            yield *DECODES, {"num_kv_heads": num_kv_heads, "group": group, "dtype": dtype}
        for query_len in (*range(1, 10), 15, 16, 17, 40):
            yield [query_len, 41, 64, 257], query_len, {"dtype": dtype}
        for window in (None, 1, 2, 16, 17, 39, 40, 41, 99, 100, 1000):
            for sinks in (False, True):
                yield *RUNS, {"window": window, "sinks": sinks, "dtype": dtype}
        for order in ORDERS:
            for window in (None, 100):
                settings = {"order": order, "window": window, "dtype": dtype}
                yield [300, 1, 64, 77], [2, 1, 4, 1], settings
        yield [1, 33, 300], [1, 2, 4], {"group": 4, "sinks": True, "window": 20, "dtype": dtype}
    for order in ORDERS:
        for block_size in AXES["block_size"]:
            yield RAGGED_LENGTHS, 1, {"block_size": block_size, "order": order}
            yield RAGGED_LENGTHS, 13, {"block_size": block_size, "order": order, "dtype": "bf16"}
    for context_len in RAGGED_LENGTHS:
        for order in ("adjacent", "shuffled"):
            yield [context_len], 1, {"order": order}
    for context_len in RAGGED_LENGTHS[:-1]:
        yield [context_len], context_len, {"group": 1}
    for window in (1, 2, 7, 15, 16, 17, 31, 100, 256, 999, 1000, 5000):
        for order in ("adjacent", "shuffled"):
            yield RAGGED_LENGTHS, 3, {"window": window, "order": order}
    yield [8, 1, 70, 33, 256, 5], [8, 1, 3, 7, 2, 5], {}
    for scale in (0.02, 0.5, 1.0):
        yield [1, 33, 300], [1, 2, 4], {"scale": scale}
        yield [40, 100], [40, 30], {"scale": scale}


def random_settings(count: int, max_query_len: int) -> Iterator[tuple[list, list, dict]]:
    rng = random.Random(max_query_len)
    for seed in range(count):
        setting = {name: rng.choice(values) for name, values in AXES.items()}
        lengths = [
            rng.choice([*RAGGED_LENGTHS, rng.randint(1, 400)]) for _ in range(rng.randint(1, 6))
        ]
        yield (
            lengths,
            [min(n, rng.randint(1, max_query_len)) for n in lengths],
            setting | {"seed": seed},
        )


@pytest.mark.parametrize(
    ("context_lens", "query_lens", "setting"),
    [*one_thing_after_the_other(), *random_settings(60, max_query_len=8)],
    ids=lambda each: "-".join(map(str, each.values())) if isinstance(each, dict) else "",
)
def test_a_ragged_batch_matches_the_formula(context_lens, query_lens, setting):
    changes = {"dtype": DTYPES[setting.get("dtype", "f32")]}
    problem = make_problem(context_lens, query_lens, **setting | changes)
    for backend in (DECODING, GATHERING):
        assert_matches_formula(backend.attend(*problem.args), problem)


@dtypes
@pytest.mark.parametrize("poison", ["nan_keys", "nan_values"])
@pytest.mark.parametrize("order", ["adjacent", "shuffled"])
def test_nan_and_infinity_in_unused_slots_are_never_gathered(order, poison, dtype):
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


def test_long_products_of_f16_do_not_overflow_before_the_scale():
    # q @ k is 115,200, above the 65,504 of f16; scaled it is 10,182, and MLX's own attention scales
    # first.
    kv = dense_handle(
        mx.full((1, 1, 8, 128), 30.0, mx.float16), mx.full((1, 1, 8, 128), 2.0, mx.float16)
    )
    metadata = step_of([[0]], [5], [1], 8)
    out = DECODING.attend(
        mx.full((1, 1, 128), 30.0, mx.float16), kv, metadata, AttentionParams(128**-0.5)
    )
    assert out.tolist() == mx.full((1, 1, 128), 2.0).tolist()


def test_a_decode_reads_blocks_of_float32_where_they_lie():
    problem = make_problem([4000], 1, order="shuffled")
    mx.eval(problem.args[0], problem.kv.k[0], problem.kv.v[0])
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(DECODING.attend(*problem.args))
    assert mx.get_peak_memory() - before < problem.kv.k[0].nbytes // 2


# Alone and in a batch


@dtypes
@pytest.mark.parametrize("order", ["adjacent", "shuffled", "shared"])
def test_a_sequence_gets_the_same_result_alone_and_in_a_batch_within_rounding(order, dtype):
    # The plain-MLX path may read and reduce in another order alone, so it promises rounding and not
    # the same bits.
    problem = make_problem(RAGGED_LENGTHS, 3, order=order, dtype=dtype)
    batch = to_float64(DECODING.attend(*problem.args))
    for seq in range(len(problem.context_lens)):
        alone = to_float64(DECODING.attend(*problem.alone(seq)))
        assert np.abs(alone - batch[problem.rows(seq)]).max() <= problem.allowed_errors[seq]


def test_a_gathered_sequence_gets_the_same_bits_alone_and_in_a_batch():
    # Sequences are computed one by one here, so nothing else in the batch can change even the
    # rounding.
    problem = make_problem([40, 33, 100], [40, 20, 30])
    batch = GATHERING.attend(*problem.args)
    alone = mx.concatenate([GATHERING.attend(*problem.alone(seq)) for seq in range(3)])
    assert mx.array_equal(batch, alone).item()


def test_what_else_is_in_the_batch_does_not_leak_into_a_sequence():
    problem = make_problem([33, 50, 100], 2)
    before = DECODING.attend(*problem.args)
    mx.eval(before)
    for block in problem.tables[1]:
        problem.kv.k[0][block], problem.kv.v[0][block] = mx.array(9.0), mx.array(9.0)
    after = DECODING.attend(*problem.args)
    same = [
        mx.array_equal(before[problem.rows(seq)], after[problem.rows(seq)]).item()
        for seq in range(3)
    ]
    assert same == [True, False, True]


# One step, many layers


def test_one_metadata_serves_every_layer_with_its_own_slabs_window_and_sinks():
    metadata = None
    for seed, settings in enumerate([{}, {}, {"window": 20}, {"sinks": True}, {"window": 3}, {}]):
        problem = make_problem([33, 50, 100], 2, seed=seed, order="adjacent", **settings)
        metadata = metadata or problem.metadata
        q, kv, _, *rest = problem.args
        assert_matches_formula(DECODING.attend(q, kv, metadata, *rest), problem)


def test_reading_leaves_the_slabs_as_they_were():
    problem = make_problem([33, 50], 2)
    before = [np.array(slab) for slab in problem.kv.arrays]
    mx.eval(DECODING.attend(*problem.args))
    assert all(
        np.array_equal(old, np.array(new))
        for old, new in zip(before, problem.kv.arrays, strict=True)
    )


@backends
@pytest.mark.parametrize("q_dtype", DTYPES.values(), ids=[f"q_{name}" for name in DTYPES])
@pytest.mark.parametrize("kv_dtype", DTYPES.values(), ids=[f"kv_{name}" for name in DTYPES])
def test_the_result_has_the_dtype_of_the_queries(q_dtype, kv_dtype, backend):
    problem = make_problem([33, 5], 2, dtype=kv_dtype)
    q, *rest = problem.args
    # Queries that all three dtypes hold exactly.
    out = backend.attend(q.astype(mx.bfloat16).astype(q_dtype), *rest)
    assert out.dtype == q_dtype
    coarse = max(problem.allowed_errors) + 2.0**-7 * 4
    assert (
        np.abs(to_float64(out) - np.concatenate([problem.exact[0], problem.exact[1]])).max()
        <= coarse
    )


# Refusals

KV = KVHandle.allocate(4, 2, 16, 32, 32)
METADATA = step_of([[3, 1], [2]], [20, 5], [2, 1], 16)
Q = mx.zeros((3, 4, 32))


@backends
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": mx.zeros((2, 4, 32))},
            r"q: expected \[num_tokens, num_heads, key_dim\] = \[3, \*, 32\], got \[2, 4, 32\]",
        ),
        ({"q": mx.zeros((3, 4, 64))}, r"q: expected .* = \[3, \*, 32\], got \[3, 4, 64\]"),
        ({"q": mx.zeros((3, 128))}, r"q: expected .*, got \[3, 128\]"),
        ({"q": mx.zeros((3, 3, 32))}, r"q: 3 query heads are not a multiple of 2 KV heads"),
        ({"q": mx.zeros((3, 0, 32))}, r"q: 0 query heads are not a multiple of 2 KV heads"),
        ({"q": mx.zeros((3, 4, 32), mx.int32)}, r"q: must be floating, got .*int32"),
        (
            {"step": step_of([], [], [], 16), "q": mx.zeros((0, 4, 32))},
            r"step: the batch has no sequence",
        ),
        (
            {"step": step_of([[3, 1], [2]], [10, 5], [2, 1], 8)},
            r"step: built for blocks of 8, the slabs hold 16",
        ),
        (
            {"step": step_of([[3, 4], [2]], [20, 5], [2, 1], 16)},
            r"step: block 4 is out of range, the slabs have 4 blocks",
        ),
        ({"params": AttentionParams(1.0, window=0)}, r"window: must be at least 1 .*, got 0"),
        ({"params": AttentionParams(1.0, window=-3)}, r"window: must be at least 1 .*, got -3"),
        (
            {"params": AttentionParams(1.0, sinks=mx.zeros(2))},
            r"sinks: expected \[num_heads\] = \[4\], got \[2\]",
        ),
    ],
    ids=[
        "too_few_queries",
        "head_dim_of_the_queries",
        "queries_of_two_dimensions",
        "heads_not_a_multiple",
        "no_query_heads",
        "integer_queries",
        "empty_batch",
        "other_block_size",
        "block_out_of_range",
        "window_of_zero",
        "negative_window",
        "one_sink_per_kv_head",
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, message, backend):
    arguments = {"q": Q, "kv": KV, "step": METADATA, "params": AttentionParams(1.0)} | change
    with pytest.raises(ValueError, match=rf"\[attend\] {message}"):
        backend.attend(**arguments)


def test_a_reserved_block_after_the_context_is_not_read():
    metadata = step_of([[3, 1, 999], [2]], [20, 5], [2, 1], 16)
    assert DECODING.attend(Q, KV, metadata, AttentionParams(1.0)).shape == (3, 4, 32)
