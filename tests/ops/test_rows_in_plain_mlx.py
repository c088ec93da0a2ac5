"""``rows_matmul`` in plain MLX: its fma, its order of sums, and what it refuses."""

from __future__ import annotations

from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.ops.rows_matmul import _fma, refusal, rows_matmul

# An fma that is rounded once


def rounded_once(exact: Fraction) -> np.float32:
    """To the nearest float, or the even one of two."""
    near = np.float32(float(exact))
    candidates = [
        near,
        np.nextafter(near, np.float32(-np.inf)),
        np.nextafter(near, np.float32(np.inf)),
    ]
    return min(
        candidates, key=lambda each: (abs(Fraction(float(each)) - exact), each.view(np.uint32) & 1)
    )


def fma_in_mlx(*operands: np.ndarray) -> np.ndarray:
    with mx.stream(mx.cpu):
        wide = [mx.array(each.astype(np.float64), mx.float64) for each in operands]
        return np.array(_fma(*wide).astype(mx.float32))


def test_an_fma_is_rounded_once():
    """Random sums, and products that lie near the middle between two floats."""
    rng, num = np.random.default_rng(0), 2000
    a, b, c = rng.standard_normal((3, num), np.float32)
    c *= 2.0 ** rng.integers(-10, 30, num).astype(np.float32)
    half = num // 2
    step = rng.integers(-3, 4, half) * 2.0**-23
    a[:half] = (1 + step) * rng.choice([-1, 1], half)
    b[:half] = (1 - step) * 2.0**-24
    c[:half] = rng.integers(2**23, 2**24, half) * 2.0**-23 * rng.choice([-1, 1], half)
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    expected = np.array([rounded_once(each) for each in exact])
    np.testing.assert_array_equal(fma_in_mlx(a, b, c), expected)
    # Rounding to 53 bits first would be another number in many of them.
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice != expected).sum() > 100


def test_infinities_and_nan_stay():
    a, b = np.float32([np.inf, np.inf, np.nan, 1e38, -np.inf]), np.float32([1, -1, 1, 100, 1])
    found = fma_in_mlx(a, b, np.float32([1, np.inf, 1, 0, 1]))
    np.testing.assert_array_equal(found, np.float32([np.inf, np.nan, np.nan, np.inf, -np.inf]))


# The order of sums


def test_lanes_take_chunks_in_order_and_are_added_as_a_tree():
    """Two turns of 32 lanes of 8 dense weights, with floats in which each addition is rounded."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 512), np.float32), rng.standard_normal((8, 512), np.float32)
    expected = np.zeros((2, 8), np.float32)
    for row in range(2):
        for column in range(8):
            lanes = np.zeros(32, np.float32)
            for k in range(512):
                lane = k // 8 % 32
                product = Fraction(float(x[row, k])) * Fraction(float(weight[column, k]))
                lanes[lane] = rounded_once(product + Fraction(float(lanes[lane])))
            while len(lanes) > 1:
                lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
            expected[row, column] = lanes[0]
    found = rows_matmul(mx.array(x), mx.array(weight))
    np.testing.assert_array_equal(np.array(found), expected)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_a_row_is_the_same_alone_and_among_others(dtype):
    weights = mx.quantize(mx.random.normal((24, 2176)).astype(dtype), 64, 4)
    x = mx.random.normal((2, 9, 2176)).astype(dtype)
    options = {"bits": 4, "group_size": 64, "mode": "affine"}
    whole = rows_matmul(x, *weights, **options)
    assert whole.shape == (2, 9, 24) and whole.dtype == dtype
    assert mx.array_equal(rows_matmul(x[1, 4:5], *weights, **options), whole[1, 4:5])
    weight, *parts = weights
    wide = mx.dequantize(weight, *(part.astype(mx.float32) for part in parts), 64, 4)
    assert mx.allclose(whole, x.astype(mx.float32) @ wide.T, rtol=0.01, atol=0.01)
    assert rows_matmul(x[:, :0], *weights, **options).shape == (2, 0, 24)


# Refusals

DENSE, PACKED = mx.zeros((8, 64), mx.float16), mx.zeros((8, 8), mx.uint32)
AFFINE = {"mode": "affine", "bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    ("weight", "dtype", "options", "reason"),
    [
        (DENSE, mx.float16, {}, None),
        (PACKED, mx.bfloat16, AFFINE, None),
        (DENSE, mx.int32, {}, "rows are mlx.core.int32; float16, bfloat16 or float32 is needed"),
        (DENSE, mx.bfloat16, {}, "the weight is mlx.core.float16; mlx.core.bfloat16 is needed"),
        (DENSE, mx.float16, AFFINE, "the weight is mlx.core.float16; mlx.core.uint32 is needed"),
        (DENSE[:7], mx.float16, {}, "the weight has the shape (7, 64)"),
        (DENSE[None], mx.float16, {}, "the weight has the shape (1, 8, 64)"),
        (DENSE[:, :60], mx.float16, {}, "rows have 60 elements; a multiple of 8 is needed"),
        (PACKED[:, :6], mx.float16, AFFINE, "rows have 48 elements; a multiple of 32 is needed"),
        (PACKED, mx.float16, AFFINE | {"bits": 7}, "affine weights of 7 bits in groups of 64 are"),
        (
            PACKED,
            mx.float16,
            AFFINE | {"group_size": 16},
            "affine weights of 4 bits in groups of 16",
        ),
        (PACKED, mx.float16, AFFINE | {"mode": "mxfp4"}, "mxfp4 weights of 4 bits in groups of 64"),
        (PACKED, mx.float16, AFFINE | {"mode": "q4_0"}, "q4_0 weights of 4 bits"),
    ],
)
def test_a_weight_that_no_kernel_multiplies_is_refused_with_the_reason(
    weight, dtype, options, reason
):
    found = refusal(weight, dtype, **options)
    if reason is None:
        assert found is None
        return
    assert found is not None and found.startswith(reason)
    with pytest.raises(ValueError) as refused:
        rows_matmul(mx.zeros((1, 64), dtype), weight, **options)
    assert str(refused.value) == f"[rows_matmul] {found}"


def test_rows_and_scales_that_do_not_fit_the_weight_are_refused():
    scales = mx.zeros((8, 1), mx.bfloat16)
    for x, parts, reason in (
        (mx.zeros((1, 32), mx.float16), (DENSE,), "rows have 32 elements, those of the weight 64"),
        (
            DENSE,
            (PACKED, scales, scales),
            "scales are mlx.core.bfloat16; mlx.core.float16 is needed",
        ),
        (DENSE, (PACKED,), "scales are None; mlx.core.float16 is needed"),
        (DENSE, (DENSE, scales), "scales are mlx.core.bfloat16; None is needed"),
        (
            mx.zeros((1, 64), mx.bfloat16),
            (PACKED, scales),
            "affine weights have biases, and no others",
        ),
    ):
        options = AFFINE if parts[0] is PACKED else {}
        with pytest.raises(ValueError, match="rows_matmul") as refused:
            rows_matmul(x, *parts, **options)
        assert str(refused.value) == f"[rows_matmul] {reason}"
