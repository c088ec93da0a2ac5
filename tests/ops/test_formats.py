"""What rows of K and V look like: parts, bytes, bits, and the rotation of keys."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from helpers.numpy_attention import DTYPES
from helpers.quantised_problems import numbers

from mlx_paged.errors import ArgumentError
from mlx_paged.ops import AffineFormat, DenseFormat, KVFormat
from mlx_paged.options.config import KVBits

# Bits, group size, width.
AFFINE = [(8, 64, 128), (4, 64, 128), (8, 32, 96), (4, 32, 32), (8, 64, 64), (4, 64, 256)]


def random_rows(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    rng = np.random.default_rng(0)
    return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("bits", "group_size", "width"), AFFINE)
def test_affine_rows_are_three_parts_whose_bytes_are_counted(
    bits: int, group_size: int, width: int, dtype: mx.Dtype
):
    rows = AffineFormat(str(dtype).removeprefix("mlx.core."), bits, group_size)
    parts = rows.encode(random_rows(5, 3, width))
    num_groups = width // group_size
    assert [(part.shape, part.dtype) for part in parts] == [
        ((5, 3, width * bits // 32), mx.uint32),
        ((5, 3, num_groups), dtype),
        ((5, 3, num_groups), dtype),
    ]
    zeros = rows.zeros((5, 3, width))
    assert [(p.shape, p.dtype) for p in zeros] == [(p.shape, p.dtype) for p in parts]
    assert mx.all(rows.decode(zeros) == 0).item()
    assert sum(part.nbytes for part in parts) == 15 * rows.row_nbytes(width)
    assert rows.width(parts) == width and len(parts) == rows.num_parts == 3


@pytest.mark.parametrize(
    ("bits", "share"), [((8, 8), 0.53125), ((8, 4), 0.40625), ((4, 4), 0.28125)], ids=str
)
def test_a_quantised_row_of_128_takes_this_share_of_a_16_bit_one(bits: tuple, share: float):
    form = KVFormat.quantised(KVBits(*bits), 128, 128, "float16")
    assert form.key.row_nbytes(128) + form.value.row_nbytes(128) == share * 4 * 128


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("bits", "group_size", "width"), AFFINE)
def test_decoded_rows_are_those_of_the_definition_and_near_what_was_encoded(
    bits: int, group_size: int, width: int, dtype: mx.Dtype
):
    rows = AffineFormat(str(dtype).removeprefix("mlx.core."), bits, group_size)
    given = random_rows(7, 2, width, dtype=dtype)
    parts = rows.encode(given)
    decoded = rows.decode(parts)
    assert decoded.dtype == dtype
    exact = np.array(numbers(rows, parts), dtype=np.float64)
    eps = float(mx.finfo(dtype).eps)
    scale = np.repeat(np.array(parts[1].astype(mx.float32)), group_size, -1)
    # A product and a sum are rounded.
    largest = np.abs(exact).max() + 2**bits * np.abs(scale).max()
    assert np.abs(np.array(decoded.astype(mx.float32)) - exact).max() <= 2 * eps * largest
    # Half a step. At 8 bits up to one at an end of the range, which MLX moves until zero is a step.
    # Then the rounding of scale and bias, over the whole range.
    error = np.abs(np.array(given.astype(mx.float32)) - exact)
    assert (error <= (0.501 if bits == 4 else 1) * np.abs(scale) + eps * largest).all()
    assert error.mean() <= 0.27 * np.abs(scale).mean() + eps * largest


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_groups_of_one_number_of_zeros_and_of_tiny_numbers_are_kept(bits: int, dtype: mx.Dtype):
    rows = AffineFormat(str(dtype).removeprefix("mlx.core."), bits, 32)
    given = mx.zeros((1, 128), dtype)
    given[:, 32:64], given[:, 64:96] = -1.5, 1e-12
    given[:, 96:] = mx.arange(32).astype(dtype) * 1e-3
    decoded = rows.decode(rows.encode(given)).astype(mx.float32)
    assert not decoded[:, :32].any().item() and mx.abs(decoded[:, 64:96]).max().item() < 1e-5
    assert mx.all(decoded[:, 32:64] == -1.5).item()
    step = 0.031 / (2**bits - 1)
    assert mx.abs(decoded - given.astype(mx.float32)).max().item() < step + 0.031 * 2**-7


@pytest.mark.parametrize("width", [32, 64, 96, 128, 160, 192, 224, 256])
def test_rotated_keys_and_queries_have_the_scores_of_those_that_are_not(width: int):
    form = KVFormat.quantised(KVBits(4, 4), width, 64, "float32")
    q, k = random_rows(6, 2, width), random_rows(9, 2, width) * 3
    k[..., 5] = 100.0  # an outlier, which the rotation spreads
    rotated = form.rotated(k)
    assert mx.abs(rotated).max() < mx.abs(k).max()
    scores, expected = (
        np.einsum("qhd,khd->hqk", np.array(a, dtype=np.float64), np.array(b, dtype=np.float64))
        for a, b in ((form.rotated(q), rotated), (q, k))
    )
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert mx.abs(form.unrotated(rotated) - k).max().item() < 1e-3


@pytest.mark.parametrize("bits", [(8, 8), (8, 4)], ids=str)
def test_8_bit_keys_are_not_rotated(bits: tuple[int, int]):
    form = KVFormat.quantised(KVBits(*bits), 64, 64, "float32")
    rows = random_rows(2, 2, 64)
    assert form.rotated(rows) is rows and form.unrotated(rows) is rows


@pytest.mark.parametrize("width", [8, 72, 80, 48, 1])
def test_a_width_that_no_group_divides_is_refused_by_name(width: int):
    with pytest.raises(
        ArgumentError, match=rf"kv_format .* {width} numbers, .* \(64 or 32\) divides"
    ) as error:
        KVFormat.quantised(KVBits(8, 8), 64, width, "float16")
    assert error.value.argument == "kv_format"


def test_4_bits_of_k_without_a_hadamard_matrix_are_refused_and_8_are_not():
    with pytest.raises(ArgumentError, match="no Hadamard matrix for rows of 288"):
        KVFormat.quantised(KVBits(4, 8), 288, 64, "float16")
    assert KVFormat.quantised(KVBits(8, 4), 288, 64, "float16").key.group_size == 32


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (KVFormat.dense("bfloat16"), "bfloat16"),
        (KVFormat.quantised(KVBits(8, 8), 128, 128, "float16"), "8 bits in groups of 64"),
        (
            KVFormat.quantised(KVBits(8, 4), 64, 96, "float16"),
            "K 8 bits in groups of 64, V 4 bits in groups of 32",
        ),
    ],
    ids=["dense", "alike", "each"],
)
def test_a_format_says_what_it_is(form: KVFormat, text: str):
    assert str(form) == text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AffineFormat("float16", 3), r"bits of K/V must be one of \(8, 4\), got 3"),
        (lambda: AffineFormat("float16", 8, 16), "group_size of K/V must be one of .*, got 16"),
        (lambda: AffineFormat("int8"), "dtype must be one of .*, got 'int8'"),
        (
            lambda: KVFormat(DenseFormat("float16"), DenseFormat()),
            "must both have the dtype .* float16 and float32",
        ),
        (
            lambda: AffineFormat("float16").part_shapes(96),
            "96 numbers can't be divided into groups of 64",
        ),
    ],
    ids=["bits", "group_size", "dtype", "two_dtypes", "width"],
)
def test_a_format_that_can_not_be_is_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
