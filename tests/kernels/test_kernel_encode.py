"""Rows that a kernel encodes: the bits of plain MLX on a CPU, in the slots of the step and nowhere
else, whatever else is in the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import METAL, REFERENCE
from helpers.fast_lane import mostly_slow
from helpers.fence_order import disorders
from helpers.kernel_checks import (
    assert_same_bits,
    assert_same_slabs,
    checked_metal,
    copy_of,
    random_array,
)
from helpers.numpy_attention import DTYPES, before_the_step, make_problem
from helpers.quantised_problems import BITS_OF_K_AND_V, affine, quantised
from metal_emulator import ForbiddenWrite, MemoryFault
from paged_testing.by_hand import slots_of, step_of

from mlx_paged.ops import AttentionParams, KVHandle

WIDTHS = (32, 64, 96, 128, 192, 256, 512)
# Each width and dtype, and each of them with each pair of bits.
SHAPES = [
    (width, BITS_OF_K_AND_V[(i + j) % 4], dtype)
    for i, width in enumerate(WIDTHS)
    for j, dtype in enumerate(DTYPES)
]
each_shape = mostly_slow(
    ("width", "bits", "dtype"),
    SHAPES,
    ids=[f"{t}-d{w}-K{b[0]}V{b[1]}" for w, b, t in SHAPES],
    quick=range(0, len(SHAPES), 4),
)


def empty(
    width: int,
    bits: tuple[int, int],
    dtype: str,
    num_kv_heads: int = 3,
    value_width: int | None = None,
) -> KVHandle:
    form = affine(width, *bits, DTYPES[dtype], value_width)
    return KVHandle.allocate(6, num_kv_heads, 8, width, value_width or width, form)


def hard_rows(rng: np.random.Generator, width: int, dtype: mx.Dtype) -> mx.array:
    """``[8, 3, width]``: numbers far from zero and near it, of one sign, alike, and outliers."""
    rows = rng.standard_normal((8, 3, width), dtype=np.float32)
    rows[1] += 30
    rows[2] = -(rows[2] ** 2) - 1
    rows[3] *= 1e-6
    rows[4] = 0
    rows[5] = -1.5
    rows[6, :, 5] = 1000
    rows[7] = np.round(rows[7] * 4) / 4  # ties between two steps
    return mx.array(rows).astype(dtype)


@each_shape
def test_the_bits_are_those_of_plain_mlx(width, bits, dtype, metal, value_width=None):
    kv = empty(width, bits, dtype, value_width=value_width)
    rng, twin = np.random.default_rng(width), copy_of(kv)
    k, v = (hard_rows(rng, dim, kv.dtype) for dim in (kv.key_dim, kv.value_dim))
    slots = slots_of([3, -1, 8, 47, 17, 0, 30, 12], 8)
    METAL.update(k, v, kv, slots)
    REFERENCE.update(k, v, twin, slots)
    assert_same_slabs(kv, twin)
    assert [call.kernel for call in metal] == ["mlx_paged_encode_and_cache"]
    assert disorders(metal) == []


@mostly_slow(
    "widths", [(96, 64), (64, 96), (512, 64), (32, 512), (192, 128)], ids=str, quick=(0, 2)
)
def test_the_bits_of_k_and_v_of_different_widths_are_those_of_plain_mlx(widths, metal):
    # Both sides in 8 and in 4 bits, and K and V apart.
    for bits, dtype in (((8, 4), "f16"), ((4, 8), "bf16"), ((4, 4), "f32")):
        metal.clear()
        test_the_bits_are_those_of_plain_mlx(widths[0], bits, dtype, metal, widths[1])


# Each width with one dtype, and one of 12 parts with all.
ROTATED = [
    *((96, dtype) for dtype in DTYPES),
    *zip((32, 64, 128, 192, 256, 512), 2 * list(DTYPES), strict=True),
]


@mostly_slow(("width", "dtype"), ROTATED, quick=range(3))
def test_queries_are_rotated_as_by_plain_mlx_beside_rows_and_alone(width, dtype, metal):
    kv, rng = empty(width, (4, 4), dtype, num_kv_heads=2), np.random.default_rng(width)
    q = random_array(rng, (3, 6, width), kv.dtype)
    k, v = (random_array(rng, (3, 2, width), kv.dtype) for _ in "kv")
    alone = METAL._store(q, None, kv, None)
    beside = METAL._store(q, (k, v), kv, slots_of([1, 9, 20], 8))
    for rotated in (alone, beside):
        assert_same_bits(rotated, kv.format.rotated(q))
    assert len(metal) == 2


@mostly_slow("bits", BITS_OF_K_AND_V, ids=lambda bits: f"K{bits[0]}V{bits[1]}", quick=(1,))
def test_a_token_has_the_same_bits_alone_in_a_batch_and_in_a_chunk(bits, metal):
    rng, num_tokens = np.random.default_rng(0), 19
    k, v, q = (random_array(rng, (num_tokens, n, 64), mx.bfloat16) for n in (2, 2, 8))
    kv = empty(64, bits, "bf16", num_kv_heads=2)
    twin = copy_of(kv)
    params, slots = AttentionParams(0.125), list(range(8, 8 + num_tokens))
    METAL.update(k, v, kv, slots_of(slots, 8))
    for token in range(num_tokens):
        one = slice(token, token + 1)
        METAL.update(k[one], v[one], twin, slots_of(slots[one], 8))
    assert_same_slabs(kv, twin)
    # Decodes, of which each writes its own row, and the same queries over what is written.
    whole = METAL.attend(q[16:], kv, step_of([[1, 2, 3]], [19], [3], 8), params)
    outs = [
        METAL.update_and_attend(
            q[t : t + 1], k[t : t + 1], v[t : t + 1], twin, step_of([[1, 2, 3]], [t + 1], [1], 8),
            params,
        )
        for t in range(16, 19)
    ]  # fmt: skip
    assert mx.abs(mx.concatenate(outs) - whole).max().item() < 0.02
    step = step_of([[1, 2, 3], [1, 2, 3]], [19, 18], [1, 1], 8)
    both = METAL.attend(mx.concatenate([q[18:], q[17:18]]), twin, step, params)
    assert_same_bits(both[:1], outs[2])
    assert_same_bits(both[1:], outs[1])


@pytest.mark.parametrize("bits", [(8, 4), (4, 4)], ids=["K8V4", "K4V4"])
def test_a_step_whose_last_rows_alone_are_wanted_has_their_bits(bits, metal):
    problem = quantised(make_problem([300, 33], [1, 20], group=4, dtype=mx.float16), *bits)
    kv, k, v = before_the_step(problem)
    METAL.update(k, v, kv, problem.metadata.slot_mapping)
    assert_same_slabs(kv, problem.kv)
    one = step_of([list(problem.tables[0])], [300], [1], 16)
    alone = METAL.attend(problem.q[:1], kv, one, problem.params)
    kv, k, v = before_the_step(problem)
    whole = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_same_bits(alone, whole[:1])


ENCODE, ROWS, FORMATS = "encode_and_cache.metal", "encoded_rows.h", "affine_rows.h"
MISTAKES: dict[str, tuple[int, tuple[int, int], str, str, str]] = {
    "no_rotation": (64, (4, 4), ENCODE, "if (ROTATES)", "if (false)"),
    "values_of_another_token": (64, (4, 4), ENCODE, "slice - num_tokens", "slice / 2"),
    "values_in_the_place_of_keys": (64, (8, 8), ENCODE, "is_key ? key_rows", "is_key ? value_rows"),
    "a_difference_the_wrong_way_round": (64, (4, 8), ROWS, "other - row[i]", "row[i] - other"),
    "a_sum_of_eleven_parts": (96, (4, 8), ROWS, "part < 12; part++", "part < 11; part++"),
    "a_matrix_that_is_transposed": (96, (4, 8), ROWS, "{0x002, 0xaab", "{0xffd, 0xaab"),
    "no_scale_of_the_rotation": (64, (4, 8), ROWS, "row[i] *= scale", "row[i] *= 1"),
    "a_range_of_half_a_group": (
        *(64, (8, 8), FORMATS),
        *("high = max_over_lanes<1, REST_LOADS>", "high = max_over_lanes<1, REST_LOADS / 2>"),
    ),
    "a_range_of_two_groups": (
        *(128, (8, 8), FORMATS),
        *("max_over_lanes<1, REST_LOADS>(-low)", "max_over_lanes<1, 2 * REST_LOADS>(-low)"),
    ),
    "steps_that_do_not_meet_zero": (64, (8, 8), FORMATS, "step : whole", "step : step"),
    "the_nearer_end": (64, (8, 8), FORMATS, "max(low, -low) > max", "max(low, -low) < max"),
    "sixteen_steps": (64, (8, 4), FORMATS, "(low - high) / 15", "(low - high) / 16"),
    "numbers_cut_off": (64, (8, 4), FORMATS, "rint((values", "floor((values"),
    "nibbles_the_wrong_way_round": (64, (8, 4), FORMATS, "n[0] | n[1] << 4", "n[1] | n[0] << 4"),
    "bytes_the_wrong_way_round": (64, (8, 8), FORMATS, "n[0] | n[1] << 8", "n[1] | n[0] << 8"),
    "one_scale_for_a_row": (128, (8, 8), FORMATS, "at % REST_LOADS == 0", "at == 0"),
}


@mostly_slow(
    ("width", "bits", "name", "text", "other"),
    MISTAKES.values(),
    ids=MISTAKES,
    quick=range(0, len(MISTAKES), 5),
)
def test_a_mistake_is_seen(
    width: int,
    bits: tuple[int, int],
    name: str,
    text: str,
    other: str,
    plant: Callable[..., None],
    compiler: None,
) -> None:
    with checked_metal() as trace:
        plant(name, text, other)
        with pytest.raises(AssertionError, match="Arrays are not equal"):
            test_the_bits_are_those_of_plain_mlx(width, bits, "f32", trace)


@pytest.mark.parametrize(
    ("text", "other"),
    [("slot >= 0", "true"), ("slot_mapping[token]", "slot_mapping[token] + 1")],
    ids=["padding", "the_next_slot"],
)
def test_a_row_in_another_slot_is_a_forbidden_write(text, other, plant, compiler):
    with checked_metal() as trace:
        plant(ENCODE, text, other)
        with pytest.raises((ForbiddenWrite, MemoryFault), match="encode_and_cache"):
            test_the_bits_are_those_of_plain_mlx(64, (8, 8), "f32", trace)


def test_the_shapes_cover_each_width_dtype_and_pair_of_bits():
    assert {(w, t) for w, _, t in SHAPES} == set(itertools.product(WIDTHS, DTYPES))
    assert {(b, t) for _, b, t in SHAPES} == set(itertools.product(BITS_OF_K_AND_V, DTYPES))
