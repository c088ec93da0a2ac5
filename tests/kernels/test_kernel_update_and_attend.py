"""One layer of one step on the kernels: rows into their slots and attention over them."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import METAL, REFERENCE
from helpers.kernel_checks import (
    assert_same_bits,
    assert_same_slabs,
    copy_of,
    random_array,
    random_handle,
)
from helpers.kernel_grid import SETTINGS, Case, each_setting
from helpers.numpy_attention import assert_matches_formula, before_the_step, make_problem
from paged_testing.by_hand import dense_handle, step_of

from mlx_paged.ops import AttentionParams

STEPS = {
    "decodes": ([1, 16, 17, 300], [1, 1, 1, 1]),
    "runs": ([300, 17, 8, 260], [5, 8, 8, 6]),
    "decodes_and_runs": ([300, 17, 300, 9, 40], [1, 8, 3, 2, 1]),
    "decodes_beside_a_prefill_from_empty": ([17, 40, 1], [1, 40, 1]),
    "runs_beside_a_prefill_with_history": ([300, 70], [12, 7]),
    "prefills_from_empty": ([20, 9], [20, 9]),
    "prefills_with_and_without_history": ([300, 33], [9, 33]),
    "prefills_with_history": ([300, 20, 33], [9, 12, 30]),
}


def kernels_of(trace):
    return [call.kernel.removeprefix("mlx_paged_") for call in trace]


@pytest.mark.parametrize(
    "extras",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"window": 20, "sinks": True}, id="window_sinks"),
    ],
)
@each_setting
@pytest.mark.parametrize(("context_lens", "query_lens"), STEPS.values(), ids=STEPS)
def test_every_mix_of_decodes_and_prefills_matches_the_formula(
    context_lens, query_lens, setting, extras, metal
):
    problem = make_problem(
        context_lens, query_lens, **setting, **extras, poison="nan_values", order="shared"
    )
    kv, k, v = before_the_step(problem)
    slabs = kv.slabs
    out = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_matches_formula(out, problem)
    assert_same_slabs(kv, problem.kv)
    assert all(now is before for now, before in zip(kv.slabs, slabs, strict=True))
    # The same as the two operations one after the other, and as plain MLX with zeros in the unused
    # slots.
    kv, _, _ = before_the_step(problem)
    METAL.update(k, v, kv, problem.metadata.slot_mapping)
    assert_same_bits(out, METAL.attend(problem.q, kv, *problem.args[2:]))
    assert_same_slabs(kv, problem.kv)
    kv, _, _ = before_the_step(problem)
    finite = dense_handle(
        *(mx.where(mx.isfinite(slab), slab, mx.zeros_like(slab)) for slab in kv.slabs)
    )
    plain = REFERENCE.update_and_attend(problem.q, k, v, finite, *problem.args[2:])
    assert_matches_formula(plain, problem)
    for ours, theirs in zip(problem.kv.slabs, finite.slabs, strict=True):
        assert_same_bits(mx.where(mx.isfinite(ours), ours, mx.zeros_like(ours)), theirs)


@pytest.mark.parametrize(
    ("step", "kernels"),
    [
        ("decodes", ["paged_attention", "merge_partitions"]),
        ("decodes_beside_a_prefill_from_empty", ["paged_attention", "reshape_and_cache"]),
        (
            "runs_beside_a_prefill_with_history",
            ["reshape_and_cache", "gather_blocks", "paged_attention"],
        ),
        ("prefills_from_empty", ["reshape_and_cache"]),
        (
            "prefills_with_and_without_history",
            ["reshape_and_cache", "gather_blocks"],
        ),
        ("prefills_with_history", ["reshape_and_cache", "gather_blocks"]),
    ],
)
def test_a_decode_is_one_dispatch_and_a_prefill_gathers_only_what_lies_before_it(
    step, kernels, metal
):
    problem = make_problem(*STEPS[step], **SETTINGS["f16-d64-b16-2x4"])
    kv, k, v = before_the_step(problem)
    METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert kernels_of(metal) == kernels


def test_a_step_that_shares_new_blocks_gathers_only_what_has_a_history(metal):
    # The first sequence is prefilled from empty; the second one reads its first block.
    problem = make_problem([40, 30], [40, 14], block_size=16, order="shared")
    tables = problem.tables
    tables = [list(tables[0]), [tables[0][0], *tables[1][1:]]]
    step = step_of(tables, [40, 30], [40, 14], 16, shares_new_blocks=True)
    kv, k, v = before_the_step(problem)
    out = METAL.update_and_attend(problem.q, k, v, kv, step, problem.params)
    assert kernels_of(metal) == ["reshape_and_cache", "gather_blocks"]
    assert metal[1].outputs["keys"].shape == (30 * 2, 64)
    expected = REFERENCE.update_and_attend(
        problem.q, k, v, dense_handle(kv.k[0] * 1, kv.v[0] * 1), step, problem.params
    )
    assert mx.abs(out - expected).max().item() < 1e-5


@pytest.mark.parametrize("window", [None, 5], ids=["no_window", "window_5"])
def test_a_sequence_that_is_decoded_over_the_border_of_a_partition_matches_the_formula(
    window, metal
):
    # 245 tokens of prompt, then 24 decodes: the first and the second half of them in different
    # partitions.
    setting = SETTINGS["f16-d64-b16-2x4"]
    problem = make_problem([269], [24], **setting, window=window, poison="nan_values")
    kv, _, _ = before_the_step(problem)
    q, k, v = problem.dense[0]
    outs = []
    for n in range(246, 270):
        metadata = step_of(problem.tables, [n], [1], 16)
        new = slice(n - 1, n)
        outs.append(
            METAL.update_and_attend(
                q[n - 246 : n - 245],
                k[new],
                v[new],
                kv,
                metadata,
                AttentionParams(problem.params.scale, window, None),
            )
        )
    assert_matches_formula(mx.concatenate(outs), problem)
    assert_same_slabs(kv, problem.kv)


def test_a_run_that_is_taken_back_is_overwritten_by_the_next(metal):
    problem = make_problem([300], [4], **SETTINGS["f16-d64-b16-2x4"])
    kv, k, v = before_the_step(problem)
    # Eight drafts of which none is kept: positions 296 to 303, the last four behind the context
    # that is compared.
    metadata = step_of(problem.tables, [304], [8], 16)
    drafts = mx.full((8, 2, 64), mx.nan, mx.float16)
    METAL.update_and_attend(
        mx.ones((8, 8, 64), mx.float16), drafts, drafts, kv, metadata, AttentionParams(1.0)
    )
    out = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_same_bits(out, METAL.attend(*problem.args))


def test_rows_that_are_views_of_projections_give_the_same_bits(metal):
    # A model cuts q, k and v out of one product, or swaps heads and tokens to apply its rotary
    # embedding.
    problem = make_problem([300, 17], [2, 2], **SETTINGS["f16-d64-b16-2x4"])
    expected = METAL.attend(*problem.args)
    kv, k, v = before_the_step(problem)
    joined = mx.concatenate([problem.q, k, v], axis=1)
    heads_first = mx.contiguous(joined.swapaxes(0, 1))
    mx.eval(joined, heads_first)
    for whole in (joined, heads_first.swapaxes(0, 1)):
        kv, _, _ = before_the_step(problem)
        q, k, v = whole[:, :8], whole[:, 8:10], whole[:, 10:]
        assert_same_bits(METAL.update_and_attend(q, k, v, kv, *problem.args[2:]), expected)
        assert_same_slabs(kv, problem.kv)


def test_one_metadata_serves_every_layer_with_its_own_slabs_window_and_sinks(metal):
    metadata = None
    for seed, extras in enumerate(
        [{}, {"window": 20}, {"sinks": True}, {"window": 300}, {"window": 20}, {}]
    ):
        problem = make_problem(
            *STEPS["decodes_and_runs"],
            **SETTINGS["f16-d64-b16-2x4"],
            **extras,
            seed=seed,
            order="adjacent",
        )
        metadata = metadata or problem.metadata
        kv, k, v = before_the_step(problem)
        q, _, _, *rest = problem.args
        assert_matches_formula(METAL.update_and_attend(q, k, v, kv, metadata, *rest), problem)
        assert_same_slabs(kv, problem.kv)


def test_a_plan_that_reads_slabs_is_not_taken_for_one_that_writes_them(metal):
    # The same metadata first for an attention over the slabs, then for a write, then for an
    # attention again.
    problem = make_problem([300, 17], [2, 2], **SETTINGS["f16-d64-b16-2x4"])
    kv, k, v = before_the_step(problem)
    assert mx.isnan(METAL.attend(problem.q, kv, *problem.args[2:])).all().item()
    out = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_same_bits(METAL.attend(problem.q, kv, *problem.args[2:]), out)
    assert_matches_formula(out, problem)


def test_nan_in_the_new_rows_of_one_sequence_does_not_reach_another(metal):
    case = Case(
        "f16", 64, 16, 2, 4, ((300, 1), (17, 1), (40, 1)), None, False, "shuffled", "nan_keys"
    )
    problem = case.problem()
    expected = METAL.attend(*problem.args)
    kv, k, v = before_the_step(problem)
    bad = mx.array([0, mx.nan, 0], mx.float16)[:, None, None]
    out = METAL.update_and_attend(problem.q, k + bad, v + bad, kv, *problem.args[2:])
    assert mx.isnan(out[1]).all().item()
    assert_same_bits(out[::2], expected[::2])


def test_slabs_in_a_handle_that_grew_are_written_where_they_are_now(metal):
    case = Case("f16", 64, 16, 2, 4, ((300, 1), (17, 1)), None, False, "shuffled", "nan_values")
    problem = replace(case).problem()
    kv, k, v = before_the_step(problem)
    num_blocks = kv.num_blocks
    kv.grow(3)
    out = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    mx.eval(out, *kv.arrays)
    assert_matches_formula(out, problem)
    assert_same_slabs(dense_handle(kv.k[0][:num_blocks], kv.v[0][:num_blocks]), problem.kv)
    assert mx.all(kv.k[0][num_blocks:] == 0).item() and mx.all(kv.v[0][num_blocks:] == 0).item()


@pytest.mark.parametrize(
    "query_lens", [(8, 1), (32, 1), (32, 9)], ids=["runs", "prefill_decode", "prefills"]
)
def test_a_sequence_sees_rows_that_another_one_writes_in_the_same_step(query_lens, metal):
    # The second sequence begins with blocks of the first, which the first fills in this very step.
    rng = np.random.default_rng(0)
    context_lens = (32, 32 + query_lens[1])
    tables = [[1, 2], [1, 2, 3]]
    metadata = step_of(tables, context_lens, query_lens, 16, shares_new_blocks=True)
    q, k, v = (random_array(rng, (sum(query_lens), heads, 64), mx.float32) for heads in (4, 2, 2))
    slabs = random_handle(rng, 5, 2, 16, 64)
    expected_slabs = copy_of(slabs)
    expected = REFERENCE.update_and_attend(
        q, k, v, expected_slabs, metadata, AttentionParams(0.125)
    )
    out = METAL.update_and_attend(q, k, v, slabs, metadata, AttentionParams(0.125))
    np.testing.assert_allclose(np.array(out), np.array(expected), rtol=0, atol=16 * 2.0**-23)
    assert_same_slabs(slabs, expected_slabs)
    assert metal[0].kernel == "mlx_paged_reshape_and_cache"
