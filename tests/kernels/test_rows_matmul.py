"""rows_matmul on Metal: the bits of plain MLX in every format, whatever the number of rows, their
place, neighbours and strides; values against float64.
"""

from __future__ import annotations

import re
import warnings
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from helpers.fast_lane import mostly_slow
from helpers.kernel_checks import assert_same_bits, checked_metal, random_array
from metal_emulator import Checks, EmulatorError
from paged_testing.emulated_metal import emulated_metal

from mlx_paged.ops import choose
from mlx_paged.ops.rows_matmul import MODES, rows_matmul, try_rows_matmul


class Problem(NamedTuple):
    """Rows and a weight; ``options`` are the named ones of ``rows_matmul``."""

    x: mx.array
    weights: list[mx.array]
    options: dict

    def product(self, x: mx.array | None = None) -> mx.array:
        return rows_matmul(self.x if x is None else x, *self.weights, **self.options)

    def in_plain_mlx(self) -> mx.array:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choose, "is_metal_available", lambda: False)
            return self.product()


def problem(
    mode: str,
    bits: int,
    group_size: int,
    dtype: mx.Dtype,
    *,
    num_rows: int = 4,
    num_columns: int = 21,
    width: int = 2176,
) -> Problem:
    """By default several simdgroups share K, lanes are left over in the last turn, and columns."""
    rng = np.random.default_rng(bits)
    x = random_array(rng, (num_rows, width), dtype)
    weights = [random_array(rng, (num_columns, width), dtype)]
    if mode == "affine":
        weights = [*mx.quantize(weights[0], group_size, bits)]
    elif mode != "dense":
        weights = [*mx.quantize(weights[0].astype(mx.float32), group_size, bits, mode)]
    return Problem(x, weights, {"mode": mode, "bits": bits, "group_size": group_size})


FORMATS = [
    (mode, bits, group_size)
    for mode, (_, all_bits, group_sizes) in MODES.items()
    for bits in all_bits
    for group_size in group_sizes
]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# Each mode and number of bits once.
QUICK = [
    FORMATS.index(next(each for each in FORMATS if each[:2] == kind))
    for kind in dict.fromkeys(each[:2] for each in FORMATS)
]


def exact_product(case: Problem) -> tuple[np.ndarray, np.ndarray]:
    """In float64, and the sum of the absolute products."""
    weight, *parts = case.weights
    if parts:
        options = dict(case.options, dtype=mx.float32)
        if case.options["mode"] == "affine":
            # Plain MLX would round between scale * number and bias.
            scales, biases = (np.array(part.astype(mx.float32), np.float64) for part in parts)
            ones, zeros = mx.ones(scales.shape), mx.zeros(scales.shape)
            numbers = np.array(mx.dequantize(weight, ones, zeros, **options), np.float64)
            numbers = numbers.reshape(*scales.shape, -1)
            wide = (numbers * scales[..., None] + biases[..., None]).reshape(len(numbers), -1)
        else:
            wide = np.array(mx.dequantize(weight, *parts, **options), np.float64)
    else:
        wide = np.array(weight.astype(mx.float32), np.float64)
    x = np.array(case.x.astype(mx.float32), np.float64)
    return x @ wide.T, np.abs(x) @ np.abs(wide).T


def assert_right(case: Problem) -> None:
    """The bits of plain MLX, which are within one rounding to the dtype and those of the sums."""
    found = case.product()
    assert_same_bits(found, case.in_plain_mlx())
    exact, size = exact_product(case)
    # A chain of fmas in each lane, and one rounding of each weight.
    num_roundings = case.x.shape[-1] // 32 + 12
    allowed = np.abs(exact) * mx.finfo(found.dtype).eps + size * num_roundings * 2.0**-24
    assert (np.abs(np.array(found.astype(mx.float32), np.float64) - exact) <= allowed).all()


@mostly_slow("dtype", DTYPES, str)
@mostly_slow(("mode", "bits", "group_size"), FORMATS, quick=QUICK)
def test_a_product_has_the_bits_of_plain_mlx(mode, bits, group_size, dtype, compiler):
    with checked_metal():
        assert_right(problem(mode, bits, group_size, dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_products_in_16_bits_have_them_too(dtype, compiler):
    with checked_metal(("ascending", "random")):
        assert_right(problem("affine", 4, 64, dtype))


@mostly_slow(("mode", "bits", "group_size"), FORMATS, quick=[FORMATS.index(("affine", 4, 64))])
def test_the_bits_of_a_row_depend_on_no_other(mode, bits, group_size, compiler):
    """At every number of rows up to 16, at another place among others, in a prompt, and in rows
    that are not contiguous.
    """
    case = problem(mode, bits, group_size, mx.float32, num_rows=23, width=640, num_columns=9)
    rows = case.x
    with checked_metal():
        whole = case.product()
        assert_same_bits(whole, case.in_plain_mlx())
        for num_rows in range(1, 17):
            assert_same_bits(case.product(rows[:num_rows]), whole[:num_rows])
        mixed = mx.concatenate([rows[7:8] * 1000, rows[3:4], rows[5:6] * 0])
        assert_same_bits(case.product(mixed)[1:2], whole[3:4])
        strided = mx.stack([rows, rows], axis=-1)[..., 0]
        assert_same_bits(case.product(strided[::2]), whole[::2])
        batch = rows[:22].reshape(2, 11, -1)
        assert_same_bits(case.product(batch), whole[:22].reshape(2, 11, -1))


@mostly_slow(
    ("num_columns", "width"),
    [(8, 32), (9, 608), (8, 4096), (4100, 1056), (37, 16384)],
    quick=(0, 1, 2),
)
def test_every_cut_of_k_has_the_bits_of_plain_mlx(num_columns, width, compiler):
    with checked_metal():
        assert_right(problem("affine", 4, 32, mx.float32, num_columns=num_columns, width=width))


@mostly_slow("num_rows", [5, 1, 4, 8])
def test_a_pass_loads_each_weight_once(num_rows, compiler):
    case = problem("affine", 4, 64, mx.float32, num_rows=num_rows, num_columns=64, width=1024)
    with emulated_metal(Checks.quick(count_accesses=True)) as trace:
        mx.eval(case.product())
    num_passes = 1 + (num_rows > 5)
    assert trace[-1].loaded_bytes["weight"] == num_passes * case.weights[0].nbytes
    # Each row once for eight columns.
    assert trace[-1].loaded_bytes["x"] == 64 // 8 * case.x.nbytes


def test_no_rows_are_no_product(compiler):
    case = problem("affine", 4, 64, mx.float16, num_rows=2, width=64)
    with checked_metal() as trace:
        assert case.product(case.x[:0]).shape == (0, 21)
        assert trace == []


# Planted faults, in float32: in 16 bits another order of sums has the same bits nearly everywhere.

FAULTS = {
    "chunks_of_other_lanes": (
        "rows_matmul.metal",
        "split * SIMDGROUP_LANES + lane;",
        "split * SIMDGROUP_LANES + lane / 2 + lane % 2 * 16;",
    ),
    "a_chunk_from_its_end": (
        "rows_matmul.metal",
        "(int first = 0; first < CHUNK; first += 8)",
        "(int first = CHUNK - 8; first >= 0; first -= 8)",
    ),
    "simdgroups_from_the_last": (
        "rows_matmul.metal",
        "(int other = 1; other < splits; other++)",
        "(int other = splits - 1; other > 0; other--)",
    ),
    "a_rounded_product": (
        "rows_matmul.metal",
        "sums[r][c] = fma(factor, inputs[r][i], sums[r][c]);",
        "sums[r][c] += factor * inputs[r][i];",
    ),
    "a_weight_that_is_rounded_twice": (
        "weight_formats.h",
        "fma(number, step, float(load.bias))",
        "number * step + float(load.bias)",
    ),
    "no_tail_of_k": ("rows_matmul.metal", "chunk < row_chunks;", "chunk < row_chunks - 2;"),
    "the_group_of_the_next_chunk": (
        "rows_matmul.metal",
        "(chunk * CHUNK >> log2_group_size)",
        "((chunk + 1) * CHUNK >> log2_group_size)",
    ),
    "half_of_the_numbers_twice": ("weight_formats.h", "ushort(part >> 8)", "part"),
    "rows_behind_the_last": (
        "rows_matmul.metal",
        "min(first_new_row, num_rows - ROWS)",
        "first_new_row",
    ),
    "columns_behind_the_last": (
        "rows_matmul.metal",
        "min(first_new_column, num_columns - COLUMNS)",
        "first_new_column",
    ),
    "columns_stored_twice": (
        "rows_matmul.metal",
        "row >= first_new_row && column >= first_new_column",
        "row >= first_new_row",
    ),
}


def faulty_problem() -> Problem:
    """Four simdgroups share K; lanes, rows and columns are left over."""
    return problem("affine", 4, 32, mx.float32, num_rows=7, width=4640)


def test_without_a_fault_bits_are_those_of_plain_mlx(compiler):
    with checked_metal(("ascending", "random")):
        assert_right(faulty_problem())


@mostly_slow(("name", "text", "other"), FAULTS.values(), FAULTS, quick=(0, 2, 5, 6))
def test_a_planted_fault_is_seen(name, text, other, plant, compiler):
    # Two threadgroups that store the same number show only to a run that is watched.
    is_race = other == FAULTS["columns_stored_twice"][2]
    orders = ("ascending", "random") if is_race else ("ascending",)
    with checked_metal(orders):
        plant(name, text, other)
        with pytest.raises((AssertionError, EmulatorError)):
            assert_right(faulty_problem())


# The check of the kernel on a device


@mostly_slow(("mode", "bits", "group_size"), FORMATS, quick=[FORMATS.index(("affine", 4, 64))])
def test_the_kernel_passes_its_check(mode, bits, group_size, compiler):
    with checked_metal() as trace:
        assert try_rows_matmul("bfloat16", bits, group_size, mode)
        tried = {tuple(call.template.items()) for call in trace}
        trace.clear()
        case = problem(mode, bits, group_size, mx.bfloat16, num_rows=16, width=256)
        for num_rows in range(1, 17):
            mx.eval(case.product(case.x[:num_rows]))
        assert {tuple(call.template.items()) for call in trace} == tried


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        (FAULTS["half_of_the_numbers_twice"], "of 1 rows has other bits than plain MLX"),
        (("weight_formats.h", "ushort parts[", "unknown parts["), "raised CompileError"),
    ],
    ids=["other_bits", "no_library"],
)
def test_a_kernel_that_fails_its_check_is_named_once(fault, failure, plant, compiler):
    failed = re.escape("[metal] rows_matmul (float32, affine, 4 bits) ") + failure
    with checked_metal():
        plant(*fault)
        with pytest.warns(UserWarning, match=failed):
            assert not try_rows_matmul("float32", 4, 32, "affine")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not try_rows_matmul("float32", 4, 32, "affine")
