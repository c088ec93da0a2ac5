"""Attention for any step: decodes and prefills in one batch, each by its own operation, rows in
their order.
"""

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import DECODING, GATHERING, REFERENCE
from helpers.numpy_attention import (
    DTYPES,
    ORDERS,
    assert_matches_formula,
    before_the_step,
    make_problem,
    to_float64,
)
from paged_testing.by_hand import dense_handle, step_of

from mlx_paged.ops import AttentionParams, KVHandle, reference

STEPS = {
    "decodes": ([1, 16, 17, 300], [1, 1, 1, 1]),
    "prefills": ([20, 33, 257], [20, 9, 40]),
    "decodes_then_prefills": ([17, 300, 40, 100], [1, 2, 40, 10]),
    "prefills_then_decodes": ([40, 100, 17, 300], [40, 10, 1, 2]),
    "alternating": ([300, 40, 17, 100, 1, 9], [1, 40, 2, 10, 1, 9]),
    "around_the_limit": ([50, 50, 50, 50], [8, 9, 7, 10]),
    "one_of_each": ([33, 12], [1, 12]),
}
steps = pytest.mark.parametrize(("context_lens", "query_lens"), STEPS.values(), ids=STEPS)


@steps
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_mix_of_decodes_and_prefills_matches_the_formula(context_lens, query_lens, dtype):
    problem = make_problem(context_lens, query_lens, dtype=dtype)
    assert_matches_formula(REFERENCE.attend(*problem.args), problem)


@steps
@pytest.mark.parametrize("order", ORDERS)
def test_every_mix_matches_the_formula_in_every_block_order_with_window_and_sinks(
    context_lens, query_lens, order
):
    problem = make_problem(
        context_lens, query_lens, order=order, window=25, sinks=True, group=3, block_size=8
    )
    assert_matches_formula(REFERENCE.attend(*problem.args), problem)


@pytest.mark.parametrize(
    "context_lens", [[17], [16], [33], [1, 16, 17, 300]], ids=["one", "full", "new_block", "many"]
)
def test_a_decode_writes_its_row_after_the_earlier_tokens(context_lens):
    problem = make_problem(context_lens, [1] * len(context_lens))
    kv, written = problem.kv, [*problem.kv.slabs]
    size = kv.block_size
    # Of each sequence, where its last token lies by its table.
    places = [
        (table[(n - 1) // size], (n - 1) % size)
        for table, n in zip(problem.tables, context_lens, strict=True)
    ]
    blocks, offsets = map(list, zip(*places, strict=True))
    before = [mx.array(slab) for slab in written]
    rows = [slab[mx.array(blocks), :, mx.array(offsets)] for slab in written]
    for slab in before:
        slab[mx.array(blocks), :, mx.array(offsets)] = 77.0
    handle = dense_handle(*before)
    out = REFERENCE.update_and_attend(problem.q, *rows, handle, problem.metadata, problem.params)
    assert_matches_formula(out, problem)
    for slab, expected in zip(handle.slabs, written, strict=True):
        assert mx.array_equal(slab, expected, equal_nan=True)


def test_a_shuffled_batch_gives_the_shuffled_rows():
    context_lens, query_lens = STEPS["alternating"]
    problem = make_problem(context_lens, query_lens)
    out = REFERENCE.attend(*problem.args)
    order = [4, 1, 5, 0, 3, 2]
    metadata = step_of(
        [problem.tables[s] for s in order],
        [context_lens[s] for s in order],
        [query_lens[s] for s in order],
        16,
    )
    q = mx.concatenate([problem.dense[s][0] for s in order])
    shuffled = REFERENCE.attend(q, problem.kv, metadata, *problem.args[3:])
    expected = mx.concatenate([out[problem.rows(s)] for s in order])
    np.testing.assert_allclose(
        np.array(shuffled), np.array(expected), rtol=0, atol=8 * 2.0**-23 * 4
    )


@pytest.mark.parametrize(
    ("query_lens", "operations"),
    [
        ([1, 1], [("_decode", 2)]),
        ([2, 30], [("prefill", 32)]),
        ([9, 1, 30, 1], [("_decode", 2), ("prefill", 39)]),
    ],
    ids=["decodes", "prefills", "mixed"],
)
def test_single_tokens_are_decoded_and_longer_runs_prefilled(query_lens, operations, monkeypatch):
    called = []
    for name in ("_decode", "prefill"):
        operation = getattr(reference, name)

        def spy(q, *args, name=name, operation=operation):
            called.append((name, q.shape[0]))
            return operation(q, *args)

        monkeypatch.setattr(reference, name, spy)
    REFERENCE.attend(*make_problem([30] * len(query_lens), query_lens).args)
    assert sorted(called) == operations


@pytest.mark.parametrize("step", ["alternating", "decodes", "prefills"])
def test_one_metadata_serves_every_layer(step):
    metadata = None
    for seed, settings in enumerate([{}, {"window": 20}, {"sinks": True}, {}]):
        problem = make_problem(*STEPS[step], seed=seed, order="reversed", **settings)
        metadata = metadata or problem.metadata
        q, kv, _, *rest = problem.args
        assert_matches_formula(REFERENCE.attend(q, kv, metadata, *rest), problem)


@pytest.mark.parametrize(
    "query_lens", [[1, 1], [9, 12], [1, 12]], ids=["decodes", "prefills", "mixed"]
)
@pytest.mark.parametrize("extra", [-1, 1], ids=["one_query_missing", "one_query_too_many"])
def test_queries_that_are_not_one_per_token_are_refused(query_lens, extra):
    problem = make_problem([20, 20], query_lens)
    num_tokens = sum(query_lens) + extra
    with pytest.raises(ValueError, match=r"q: expected \[num_tokens, num_heads, key_dim\]"):
        REFERENCE.attend(mx.zeros((num_tokens, 4, 64)), *problem.args[1:])


@pytest.mark.parametrize(
    "query_lens", [[1, 1], [9, 12], [1, 12]], ids=["decodes", "prefills", "mixed"]
)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"params": AttentionParams(1.0, window=0)}, "window: must be at least 1"),
        (
            {"params": AttentionParams(1.0, sinks=mx.zeros(3))},
            r"sinks: expected \[num_heads\] = \[4\], got \[3\]",
        ),
        (
            {"kv": KVHandle.allocate(1, 2, 16, 64, 64)},
            "step: block 1 is out of range, the slabs have 1 blocks",
        ),
    ],
    ids=["window", "sinks", "block_range"],
)
def test_what_does_not_fit_is_refused_in_every_mix(query_lens, settings, message):
    metadata = step_of([[0, 1], [1, 0]], [20, 20], query_lens, 16)
    kv = KVHandle.allocate(2, 2, 16, 64, 64)
    arguments = {"kv": kv, "step": metadata, "params": AttentionParams(1.0)}
    with pytest.raises(ValueError, match=message):
        REFERENCE.attend(mx.zeros((sum(query_lens), 4, 64)), **arguments | settings)


def test_a_batch_without_sequences_is_refused():
    metadata = step_of([], [], [], 16)
    with pytest.raises(ValueError, match="step: the batch has no sequence"):
        REFERENCE.attend(
            mx.zeros((0, 4, 64)),
            KVHandle.allocate(2, 2, 16, 64, 64),
            metadata,
            AttentionParams(1.0),
        )


# K and V of different widths, and the rows whose logits are wanted


@steps
@pytest.mark.parametrize(
    "extras", [{}, {"window": 25, "sinks": True, "order": "shared"}], ids=["plain", "window_sinks"]
)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 32), (64, 96)])
def test_v_may_be_narrower_or_wider_than_k(context_lens, query_lens, head_dim, value_dim, extras):
    problem = make_problem(
        context_lens, query_lens, head_dim=head_dim, value_dim=value_dim, group=3, **extras
    )
    q, kv, metadata, params = problem.args
    for operation in (
        REFERENCE.attend,
        DECODING.attend,
        GATHERING.attend,
    ):
        assert_matches_formula(operation(*problem.args), problem)
    before, k, v = before_the_step(problem)
    out = REFERENCE.update_and_attend(q, k, v, before, metadata, params)
    assert_matches_formula(out, problem)
    assert (
        mx.array_equal(before.k[0], kv.k[0]).item() and mx.array_equal(before.v[0], kv.v[0]).item()
    )


@pytest.mark.parametrize("value_dim", [64, 32], ids=["one_width", "two_widths"])
@pytest.mark.parametrize("extras", [{}, {"window": 25, "sinks": True}], ids=["plain", "window"])
@pytest.mark.parametrize(
    "num_logit_rows",
    [[1, 1, 1, 1], [0, 1, 0, 4], [20, 1, 0, 0], [3, 0, 12, 9]],
    ids=["one_each", "none_one_and_several", "a_whole_run", "several"],
)
def test_the_rows_of_logits_get_what_they_get_among_all_rows(num_logit_rows, extras, value_dim):
    context_lens, query_lens = [300, 17, 12, 40], [20, 1, 12, 9]
    problem = make_problem(context_lens, query_lens, value_dim=value_dim, **extras)
    step = step_of(problem.tables, context_lens, query_lens, 16, num_logit_rows=num_logit_rows)
    out = to_float64(
        REFERENCE.attend(problem.q[step.logit_rows], problem.kv, step.logit_queries, problem.params)
    )
    begin = 0
    for seq, count in enumerate(num_logit_rows):
        exact = problem.exact[seq][query_lens[seq] - count :]
        error = np.abs(out[begin : begin + count] - exact).max(initial=0)
        assert error <= problem.allowed_errors[seq]
        begin += count
    assert begin == out.shape[0]
