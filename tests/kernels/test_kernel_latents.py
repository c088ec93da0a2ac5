"""Multi-head latent attention (DeepSeek-V2, 2024) on slabs of latents and of their rotated keys:
one kernel for decodes and short runs, which reads them where they lie.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from helpers.backends import METAL
from helpers.fast_lane import mostly_slow
from helpers.kernel_checks import assert_same_bits, assert_same_slabs, checked_metal
from helpers.numpy_attention import (
    DTYPES,
    PagedProblem,
    before_the_step,
    make_problem,
)
from helpers.quantised_problems import quantised

from mlx_paged.ops import KVHandle, PlanKey, kernels
from mlx_paged.ops.attention_plan import AttentionPlan

LATENTS, ROPE, HEADS = 512, 64, 6


def problem_of(
    context_lens=(300, 17), run=1, dtype=mx.float16, heads=HEADS, latents=LATENTS, **changes
) -> PagedProblem:
    """What the formula sees are keys of both parts, and the latents as values."""
    problem = make_problem(
        context_lens,
        run,
        num_kv_heads=1,
        group=heads,
        head_dim=latents,
        value_dim=ROPE,
        dtype=dtype,
        scale=(128 + ROPE) ** -0.5 / 2,
        **changes,
    )
    rope_queries = mx.random.normal((*problem.q.shape[:2], ROPE), key=mx.random.key(1))
    q = mx.concatenate([problem.q, rope_queries.astype(dtype)], axis=-1)
    dense = tuple(
        (q[problem.rows(seq)], mx.concatenate([k, v], axis=-1), k)
        for seq, (_, k, v) in enumerate(problem.dense)
    )
    return replace(problem, q=q, dense=dense)


def attend(problem: PagedProblem, kv: KVHandle, rows=None, run: int = 1) -> mx.array:
    plan = AttentionPlan.of(problem.metadata, PlanKey.of(problem.params.window, kv))
    sinks = kernels.sink_logits(None, problem.q.shape[1])
    params = replace(problem.params, holds_latents=True)
    out, kv.fence = kernels.attention(problem.q, rows, kv, plan, run, params, sinks)()
    if plan.num_partial_rows:
        (out,) = kernels.merge(out, problem.q, plan, sinks)()
    return out


def check(problem: PagedProblem, run: int = 1) -> None:
    matches(attend(problem, problem.kv, run=run), problem)
    kv, k, v = before_the_step(problem)
    matches(attend(problem, kv, (k, v), run), problem)
    assert_same_slabs(kv, problem.kv)


def matches(out: mx.array, problem: PagedProblem) -> None:
    # The formula's values are as wide as the latents, its slabs as the rotated keys.
    assert out.shape == (*problem.q.shape[:2], problem.kv.key_dim)
    for seq in range(len(problem.context_lens)):
        exact, allowed = problem.exact[seq], problem.allowed_errors[seq]
        error = abs(out[problem.rows(seq)].astype(mx.float32) - mx.array(exact)).max().item()
        assert error <= allowed, f"sequence {seq}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_decodes_match_the_formula(dtype, metal):
    check(problem_of(dtype=dtype, poison="nan_keys"))


def test_rotated_keys_of_unused_slots_are_never_seen(metal):
    check(problem_of(poison="nan_values"))


def quantised_problem(bits: tuple[int, int], **settings) -> PagedProblem:
    """Latents and rotated keys as the format stores them, and what they stand for."""
    problem = problem_of(**settings)
    apart = [
        (q, k[..., : problem.kv.key_dim], k[..., problem.kv.key_dim :]) for q, k, _ in problem.dense
    ]
    stored = quantised(replace(problem, dense=tuple(apart)), *bits)
    dense = tuple((q, mx.concatenate([k, v], axis=-1), k) for q, k, v in stored.dense)
    return replace(stored, dense=dense)


def check_backend(problem: PagedProblem) -> None:
    """By what a layer calls, so that new rows are encoded on the way."""
    params = replace(problem.params, holds_latents=True)
    whole = METAL.attend(problem.q, problem.kv, problem.metadata, params)
    matches(whole, problem)
    kv, k, v = before_the_step(problem)
    out = METAL.update_and_attend(problem.q, k, v, kv, problem.metadata, params)
    assert_same_bits(out, whole)
    assert_same_slabs(kv, problem.kv)
    for seq in range(len(problem.context_lens)):
        q, _, metadata, _ = problem.alone(seq)
        assert_same_bits(METAL.attend(q, kv, metadata, params), whole[problem.rows(seq)])


# Each two of a width, a pair of bits and a dtype meet.
@mostly_slow(
    ("latents", "bits", "dtype"),
    [
        *((512, (8, 4), dtype) for dtype in ("f16", "bf16")),
        *((256, (8, 8), dtype) for dtype in ("f16", "bf16")),
        *((512, (8, 8), "f32"), (256, (8, 4), "f32")),
    ],
    ids=lambda each: str(each).replace(" ", ""),
)
def test_quantised_latents_match_the_formula(latents, bits, dtype, metal):
    check_backend(
        quantised_problem(bits, latents=latents, dtype=DTYPES[dtype], context_lens=(300, 17, 1))
    )
    assert {call.kernel.removeprefix("mlx_paged_") for call in metal} == {
        "paged_attention_affine",
        "merge_partitions",
        "encode_and_cache",
    }


@pytest.mark.slow
@pytest.mark.parametrize("run", [2, 4])
def test_runs_on_quantised_latents_match_the_formula(run, metal):
    check_backend(quantised_problem((8, 8), context_lens=(300, 20), run=run, dtype=mx.bfloat16))


@pytest.mark.parametrize("run", [2, 4])
def test_runs_match_the_formula(run, metal):
    check(problem_of((300, 20), run), run)


@pytest.mark.parametrize(("heads", "latents"), [(1, 512), (20, 512), (16, 256)], ids=str)
def test_any_number_of_heads_matches_the_formula(heads, latents, metal):
    check(problem_of(heads=heads, latents=latents))


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(metal):
    problem = problem_of()
    together = attend(problem, problem.kv)
    for seq in range(2):
        q, _, metadata, _ = problem.alone(seq)
        alone = attend(replace(problem, q=q, metadata=metadata), problem.kv)
        assert_same_bits(alone, together[problem.rows(seq)])


FAULTS = {
    "rotated_keys": ("Rope::load(rows.rope_keys, row, ", "Rope::load(rows.rope_keys, row ^ 1, "),
    "rotated_keys_of_another_lane": (
        "const int rope_place = lane / MAX_SHARERS",
        "const int rope_place = lane % ROPE_LOADS",
    ),
    "rotated_queries_of_another_lane": ("from[lane / MAX_SHARERS *", "from[lane % ROPE_LOADS *"),
    "power_of_rotated_queries": ("rest.rope) / factor;", "rest.rope);"),
    "rotated_keys_not_stored": (
        "Rope::store(rows.rope_keys, row, lane / MAX_SHARERS, rest.rope_load)",
        "",
    ),
    "new_rotated_keys_from_the_slab": (
        "Rope::newest(has_rows, rows.rope_keys",
        "Rope::newest(false, rows.rope_keys",
    ),
    "rotated_keys_of_another_row": (
        "Rope::load(rows.rope_keys, row, rope_place)",
        "Rope::load(rows.rope_keys, row ^ 1, rope_place)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "other"), FAULTS.values(), ids=FAULTS)
def test_a_mistake_is_seen(text, other, plant, compiler):
    with checked_metal():
        plant("latent_rows.h", text, other)
        with pytest.raises(AssertionError, match=r"sequence \d|Arrays are not equal"):
            check(problem_of((40, 17), dtype=mx.bfloat16))


QUANTISED_FAULTS = {
    "scales_of_another_rotated_key": (
        "Rope::rest(rows.rope_keys, row, ",
        "Rope::rest(rows.rope_keys, row ^ 1, ",
    ),
    "scales_of_another_latent": (
        "Latent::rest(rows.latents, row, ",
        "Latent::rest(rows.latents, row ^ 1, ",
    ),
    "a_sum_of_rotated_queries_over_two_lanes": (
        "prepare_query<LANES, 1>",
        "prepare_query<LANES, 8>",
    ),
    "rotated_products_without_a_scale": ("Rope::scaled(rope, rest.rope, query_rest.rope)", "rope"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "other"), QUANTISED_FAULTS.values(), ids=QUANTISED_FAULTS)
def test_a_mistake_in_quantised_latents_is_seen(text, other, plant, compiler):
    problem = quantised_problem((8, 4), context_lens=(40, 17), dtype=mx.float16)
    with checked_metal():
        plant("latent_rows.h", text, other)
        with pytest.raises(AssertionError, match=r"sequence \d"):
            check_backend(problem)
