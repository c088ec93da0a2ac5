"""Quantised K and V in the kernels: against float64 of what the slabs stand for, and bit for bit
where bits are promised.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import METAL, REFERENCE
from helpers.fast_lane import mostly_slow
from helpers.fence_order import disorders
from helpers.kernel_checks import (
    assert_same_alone,
    assert_same_bits,
    assert_same_slabs,
    attend_and_compare,
    checked_metal,
    copy_of,
    nan_before_the_window,
    random_array,
)
from helpers.kernel_grid import BLOCK_SIZES, CAPACITIES, Case
from helpers.numpy_attention import (
    DTYPES,
    assert_matches_formula,
    before_the_step,
    eps,
    make_problem,
    raw,
    to_float64,
)
from helpers.quantised_problems import BITS_OF_K_AND_V, affine, numbers, quantised
from metal_emulator import ForbiddenWrite, LargeArray, MemoryFault
from paged_testing.by_hand import slots_of, step_of

from mlx_paged.ops import (
    AffineFormat,
    AttentionParams,
    DenseFormat,
    KVFormat,
    KVHandle,
    kernels,
)
from mlx_paged.ops.metal import MetalBackend

HEAD_DIMS = (32, 64, 96, 128, 256)  # 80 is no multiple of a group

# dtype, head_dim, block_size, num_kv_heads, group, (context, run) of each sequence, window, sinks,
# order, poison (which quantised slabs have of their own); bits of K and V
GRID = tuple(
    (Case(*setting, "shuffled", "large"), bits)
    for setting, bits in (
        (("f16", 128, 16, 2, 4, ((300, 1), (17, 1)), None, False), (8, 8)),
        (("bf16", 128, 16, 1, 2, ((40, 1), (513, 1)), 100, True), (8, 4)),
        (("bf16", 64, 8, 2, 8, ((300, 1), (1, 1)), None, True), (4, 4)),
        (("f32", 96, 32, 2, 3, ((33, 1), (257, 1)), 5000, False), (4, 8)),
        (("f16", 32, 8, 3, 1, ((511, 1), (16, 1)), 100, False), (8, 4)),
        (("f32", 256, 16, 1, 16, ((300, 1), (15, 1)), None, True), (8, 8)),
        (("f16", 64, 64, 2, 5, ((513, 1), (100, 1)), 2, False), (4, 4)),
        (("bf16", 256, 32, 1, 7, ((17, 1), (300, 1)), 16, False), (4, 8)),
        (("f16", 96, 16, 2, 4, ((15, 2), (100, 2)), None, True), (8, 8)),
        (("f32", 32, 64, 1, 15, ((100, 2), (256, 2)), 256, False), (4, 4)),
        (("bf16", 128, 8, 2, 3, ((16, 2), (2, 2)), 255, True), (8, 4)),
        (("f16", 256, 8, 1, 2, ((255, 2), (17, 2)), None, False), (4, 8)),
        (("bf16", 32, 16, 3, 2, ((257, 4), (3, 3)), 2, True), (8, 8)),
        (("f16", 128, 32, 2, 6, ((255, 4), (17, 3)), 300, False), (4, 4)),
        (("f32", 64, 8, 1, 9, ((100, 4), (16, 3)), None, False), (8, 4)),
        (("bf16", 96, 64, 1, 11, ((511, 3), (4, 4)), 16, True), (4, 8)),
        (("f16", 128, 16, 1, 13, ((255, 5), (257, 8)), None, False), (8, 8)),
        (("bf16", 64, 32, 2, 10, ((300, 8), (7, 7)), 100, True), (8, 4)),
        (("f32", 128, 64, 1, 12, ((60, 7), (8, 8)), 5000, False), (4, 4)),
        (("f16", 32, 32, 2, 14, ((16, 8), (512, 5)), 1, False), (4, 8)),
    )
)
each_case = pytest.mark.parametrize(
    ("case", "bits"),
    [
        pytest.param(
            case,
            bits,
            id=f"K{bits[0]}V{bits[1]}-{case}",
            marks=() if index == 0 else pytest.mark.slow,
        )
        for index, (case, bits) in enumerate(GRID)
    ],
)
DECODE = Case("f16", 128, 16, 2, 4, ((300, 1), (17, 1)), None, False, "shuffled", "large")
RUNS = Case("bf16", 64, 8, 2, 3, ((300, 2), (257, 2)), None, True, "shuffled", "large")


def test_the_grid_covers_what_it_says():
    for name, values in {
        "head_dim": set(HEAD_DIMS),
        "block_size": set(BLOCK_SIZES),
        "group": set(range(1, 17)),
    }.items():
        assert {getattr(case, name) for case, _ in GRID} == values
    for name, values in {
        "dtype": set(DTYPES),
        "capacity": set(CAPACITIES),
        "is_merged": {False, True},
        "sinks": {False, True},
    }.items():
        met = {(getattr(case, name), bits) for case, bits in GRID}
        assert met == set(itertools.product(values, BITS_OF_K_AND_V)), name


# Attention


@each_case
def test_attention_matches_the_formula_over_what_the_slabs_stand_for(case, bits, metal):
    problem = quantised(case.problem(), *bits)
    whole = attend_and_compare(problem)
    assert_same_alone(problem, whole)
    if case.window is not None:
        hidden = nan_before_the_window(problem)
        assert_same_bits(METAL.attend(problem.q, hidden, *problem.args[2:]), whole)


@pytest.mark.parametrize("context_len", [17, 32], ids=["unused_slots", "full_block"])
def test_lanes_behind_the_end_of_a_row_take_no_scale_from_behind_it(context_len, metal):
    # A row of 96 numbers is 12 loads for 16 lanes, and has three groups of 32.
    problem = make_problem(
        [context_len], 1, num_kv_heads=1, group=1, head_dim=96, dtype=mx.float16, order="adjacent"
    )
    attend_and_compare(quantised(problem, 8, 4))


STEPS = {
    "decodes_beside_a_prefill_from_empty": ([17, 40, 1], [1, 40, 1]),
    "runs_beside_a_prefill_with_history": ([300, 70], [12, 7]),
    "prefills_with_and_without_history": ([300, 33], [9, 33]),
}


@pytest.mark.parametrize(("context_lens", "query_lens"), STEPS.values(), ids=STEPS)
@mostly_slow("bits", [(8, 8), (8, 4)], ids=["K8V8", "K8V4"], quick=(1,))
def test_prefills_read_what_they_write(bits, context_lens, query_lens, metal):
    problem = quantised(
        make_problem(context_lens, query_lens, group=4, dtype=mx.float16, window=20), *bits
    )
    kv, k, v = before_the_step(problem)
    out = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_matches_formula(out, problem)
    assert_same_slabs(kv, problem.kv)
    assert_same_bits(out, METAL.attend(*problem.args))
    assert disorders(metal) == []


@mostly_slow("exponent", [-12, 6])
@mostly_slow("bits", [(8, 8), (4, 4)], ids=["K8V8", "K4V4"], quick=(1,))
def test_queries_of_any_size_match_the_formula_when_the_scale_makes_up_for_it(
    bits, exponent, metal
):
    # Queries of 4-bit keys are kept as float16 times a power of two, from which no bits are lost.
    problem = quantised(DECODE.problem(scale=128**-0.5 * 2.0**-exponent), *bits)
    q = problem.q * 2.0**exponent
    dense = tuple((rows[0] * 2.0**exponent, *rows[1:]) for rows in problem.dense)
    attend_and_compare(replace(problem, q=q, dense=dense))


def test_keys_and_values_far_from_zero_match_the_formula(metal):
    # Biases are a hundred times the range of a group.
    problem = DECODE.problem()
    dense = tuple((q, k + 30, v - 50) for q, k, v in problem.dense)
    attend_and_compare(quantised(replace(problem, dense=dense), 8, 8))


def test_rows_of_zeros_and_blocks_of_zeros_are_zero(metal):
    problem = quantised(DECODE.problem(), 8, 4)
    kv = KVHandle.allocate(problem.kv.num_blocks, 2, 16, 128, 128, problem.kv.format)
    out = METAL.attend(problem.q, kv, *problem.args[2:])
    assert mx.all(out == 0).item()


# Blocks

SHAPES = [
    (head_dim, BLOCK_SIZES[i % 4], list(DTYPES)[i % 3], BITS_OF_K_AND_V[i % 4])
    for i, head_dim in enumerate(HEAD_DIMS)
]
each_shape = mostly_slow(
    ("head_dim", "block_size", "dtype", "bits"),
    SHAPES,
    ids=[f"{dtype}-d{d}-b{b}-K{bits[0]}V{bits[1]}" for d, b, dtype, bits in SHAPES],
    quick=(2,),
)


def random_blocks(head_dim: int, block_size: int, dtype: str, bits: tuple[int, int]) -> KVHandle:
    format, rng = affine(head_dim, *bits, DTYPES[dtype]), np.random.default_rng(head_dim)
    k, v = (
        rows.encode(random_array(rng, (6, 2, block_size, head_dim), DTYPES[dtype]))
        for rows in (format.key, format.value)
    )
    kv = KVHandle(k, v, format)
    mx.eval(kv.arrays)
    return kv


@each_shape
def test_blocks_of_every_shape_are_gathered_as_they_are_and_as_numbers(
    head_dim, block_size, dtype, bits, metal
):
    kv = random_blocks(head_dim, block_size, dtype, bits)
    table, num_tokens = [4, 1, 2, 0], 3 * block_size + 1
    stored = METAL.gather_parts(kv, table, num_tokens)
    expected = REFERENCE.gather_parts(copy_of(kv), table, num_tokens)
    for ours, theirs in zip(stored, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_same_bits(one, other)
    dense = METAL.gather_blocks(kv, table, num_tokens)
    for rows, parts, ours in zip((kv.format.key, kv.format.value), stored, dense, strict=True):
        exact = to_float64(numbers(rows, parts))
        assert (ours.dtype, ours.shape) == (kv.dtype, (2, num_tokens, head_dim))
        # Rounded once to float and once to the dtype.
        allowed = eps(kv.dtype) / 2 * (1 + 2.0**-10) * np.abs(exact) + 2.0**-23
        assert np.all(np.abs(to_float64(ours) - exact) <= allowed)


@each_shape
def test_rows_and_blocks_of_every_shape_are_written_bit_for_bit(
    head_dim, block_size, dtype, bits, metal
):
    kv = random_blocks(head_dim, block_size, dtype, bits)
    rng = np.random.default_rng(0)
    k, v = (
        rows.encode(random_array(rng, (4, 2, head_dim), kv.dtype))
        for rows in (kv.format.key, kv.format.value)
    )
    twin = copy_of(kv)
    for handle, backend in ((kv, METAL), (twin, REFERENCE)):
        slots = slots_of([3, -1, block_size, 2 * block_size - 1], block_size)
        backend.reshape_and_cache(k, v, handle, slots)
        backend.copy_blocks(handle, [(1, 4), (0, 5)])
    assert_same_slabs(kv, twin)
    assert disorders(metal) == []


@pytest.mark.slow
def test_a_device_that_writes_by_scatter_reads_quantised_rows_too(metal):
    problem = quantised(make_problem([300, 33, 9], [1, 20, 2], group=4), 8, 4)
    kv, k, v = before_the_step(problem)
    out = MetalBackend(writes_in_place=False).update_and_attend(
        problem.q, k, v, kv, *problem.args[2:]
    )
    assert_matches_formula(out, problem)
    assert_same_slabs(kv, problem.kv)
    written = {name for call in metal for name in call.written_inputs}
    assert written == set()


@pytest.mark.slow
def test_blocks_behind_the_first_4_gib_are_like_any_others(compiler):
    rng, shape = np.random.default_rng(0), (2, 8, 32)
    format = affine(32, 8, 8, "float16")
    far = 2**32 // (2 * 8 * 32)
    blocks = (0, 1, far, far + 1)
    parts = [
        part
        for rows in (format.key, format.value)
        for part in rows.encode(random_array(rng, (4, *shape), mx.float16))
    ]
    small = KVHandle(tuple(parts[:3]), tuple(parts[3:]), format)
    step = step_of([[3, 1, 2], [0]], [20, 7], [1, 2], 8)
    there = step_of([[far + 1, 1, far], [0]], [20, 7], [1, 2], 8)
    query = random_array(rng, (3, 4, 32), mx.float16)
    k, v = (random_array(rng, (3, 2, 32), mx.float16) for _ in "kv")
    params = AttentionParams(32**-0.5)
    # So many blocks that each slab fills whole pages: a large array has no margins around it.
    num_blocks = far + 128
    with ExitStack() as stack:
        try:
            slabs = [
                stack.enter_context(LargeArray.zeros((num_blocks, *part.shape[1:]), part.dtype))
                for part in parts
            ]
        except MemoryError as error:
            pytest.skip(str(error))
        for slab, part in zip(slabs, parts, strict=True):
            for index, block in enumerate(blocks):
                slab[block][:] = np.array(part[index])
        large = KVHandle(tuple(slabs[:3]), tuple(slabs[3:]), format)
        with checked_metal():
            out = METAL.update_and_attend(query, k, v, large, there, params)
            assert_same_bits(out, METAL.update_and_attend(query, k, v, small, step, params))
            for ours, theirs in zip(
                METAL.gather_blocks(large, [far, 0, far + 1], 20),
                METAL.gather_blocks(small, [2, 0, 3], 20),
                strict=True,
            ):
                assert_same_bits(ours, theirs)
        for slab, part in zip(slabs, small.slabs, strict=True):
            for index, block in enumerate(blocks):
                np.testing.assert_array_equal(slab[block].view(raw(part).dtype), raw(part)[index])


# What has no kernel

EIGHT, FOUR = AffineFormat("float16", 8), AffineFormat("float16", 4)


@pytest.mark.parametrize(
    ("format", "lack"),
    [
        (KVFormat(EIGHT, FOUR), None),
        (KVFormat.dense("float16"), None),
        (KVFormat(EIGHT, DenseFormat("float16")), "both dense or both quantised"),
        (KVFormat(EIGHT, AffineFormat("float16", 8, 32)), None),
    ],
    ids=str,
)
def test_formats_without_a_kernel_are_named(format, lack):
    found = kernels.why_unsupported(128, 128, 16, format)
    assert found is None if lack is None else found is not None and lack in found


# Mistakes

FORMATS, ATTENTION = "affine_rows.h", "paged_attention.metal"
MISTAKES: dict[str, tuple[Case, tuple[int, int], str, str, str]] = {
    "no_bias_of_keys": (DECODE, (8, 8), FORMATS, "rest.bias * query_rest.sum", "0"),
    "a_query_sum_over_fewer_lanes": (
        *(DECODE, (8, 8), FORMATS),
        *("sum_over_lanes<1, SHARERS>(sums", "sum_over_lanes<1, SHARERS / 2>(sums"),
    ),
    "no_bias_of_values": (DECODE, (8, 8), FORMATS, "weight * rest.bias", "0"),
    "a_bias_that_does_not_shrink": (
        *(DECODE, (8, 8), FORMATS),
        *("fma(sum, factor, weight * rest.bias)", "sum + weight * rest.bias"),
    ),
    "the_scaling_of_the_next_group": (
        *(DECODE, (8, 8), FORMATS),
        *("place / REST_LOADS;", "(place / REST_LOADS ^ 1);"),
    ),
    "the_scaling_of_another_key": (
        *(DECODE, (8, 8), ATTENTION),
        *("Keys::rest(stored_keys, scored_row", "Keys::rest(stored_keys, to_row + block_begin"),
    ),
    "values_with_the_scaling_of_another_key": (
        *(DECODE, (8, 8), ATTENTION),
        *(
            "Values::rest(stored_values, scored_row",
            "Values::rest(stored_values, to_row + block_begin",
        ),
    ),
    "groups_that_are_not_added_up": (
        *(DECODE, (8, 8), ATTENTION),
        "sum_over_lanes<SHARERS, LANES>(Keys::scaled(product",
        "sum_over_lanes<SHARERS, SHARERS>(Keys::scaled(product",
    ),
    "odd_keys_too_large": (
        *(DECODE, (4, 8), FORMATS),
        *("query[n], float4(1, 1.0f / ODD, 1, 1.0f / ODD)", "query[n], float4(1)"),
    ),
    "odd_values_too_large": (
        *(DECODE, (8, 4), FORMATS),
        *("return fma(sum, float4(1, 1.0f / ODD, 1, 1.0f / ODD)", "return fma(sum, float4(1)"),
    ),
    "bytes_out_of_order": (
        *(DECODE, (8, 8), FORMATS),
        *("float(even.x), float(odd.x)", "float(odd.x), float(even.x)"),
    ),
    "nibbles_out_of_order": (
        *(DECODE, (4, 4), FORMATS),
        *("float(b.x), float(c.x)", "float(c.x), float(b.x)"),
    ),
    "new_values_without_their_bias": (
        *(RUNS, (8, 8), ATTENTION),
        *("add_bias(bias_sum[i], factor, counted", "add_bias(bias_sum[i], factor, 0"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "bits", "name", "text", "other"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_format_is_seen(
    case: Case,
    bits: tuple[int, int],
    name: str,
    text: str,
    other: str,
    plant: Callable[..., None],
    compiler: None,
) -> None:
    problem = quantised(case.problem(), *bits)
    with checked_metal():
        plant(name, text, other)
        with pytest.raises(AssertionError, match=r"sequence \d|Arrays are not equal"):
            attend_and_compare(problem)


@pytest.mark.slow
def test_a_scaling_in_the_slot_of_another_row_is_a_forbidden_write(plant, compiler):
    problem = quantised(RUNS.problem(), 8, 8)
    biases = "slab_to_write(rows.biases)["
    with checked_metal():
        plant(FORMATS, biases, f"{biases}1 + ")
        # The last row of the slab has none behind it.
        with pytest.raises((ForbiddenWrite, MemoryFault), match="encode_and_cache"):
            attend_and_compare(problem)
