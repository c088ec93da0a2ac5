"""ggml's blocks in MLX's affine layout are what the gguf package decodes them to."""

from __future__ import annotations

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from helpers.gguf_files import dequantise, quantise

from mlx_paged.loading.gguf.affine import AFFINE_TYPES, GROUP_SIZE

# Where a block's float16 numbers are.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
EXACT = [name for name in HALVES if name != "Q6_K"]


def random_rows(kind: str, num_rows: int = 24, row_length: int = 1024) -> np.ndarray:
    """Rows of any bits, but for their float16 numbers, which are finite and of all sizes."""
    rng = np.random.default_rng(sum(map(ord, kind)))
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (num_rows, row_length // block_size, block_bytes), np.uint8)
    for at in HALVES[kind]:
        shape = (*blocks.shape[:2], 1)
        halves = (rng.standard_normal(shape) * 10.0 ** rng.integers(-8, 2, shape)).astype("<f2")
        halves[0, 0] = 0
        halves[1, 0] = np.float16(6e-8)  # the smallest of all
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def decoded_by_mlx(kind: str, data: np.ndarray) -> np.ndarray:
    rows = AFFINE_TYPES[kind].rows(data)
    arrays = [mx.array(part) for part in rows]
    bits = AFFINE_TYPES[kind].bits
    return np.array(mx.dequantize(*arrays, group_size=GROUP_SIZE, bits=bits))


def test_every_type_is_known_with_the_bytes_of_its_block():
    sizes = {name: GGML_QUANT_SIZES[GGMLQuantizationType[name]][1] for name in HALVES}
    assert {name: kind.block_bytes for name, kind in AFFINE_TYPES.items()} == sizes


@pytest.mark.parametrize("kind", EXACT)
def test_every_weight_of_an_affine_type_stays_what_it_is(kind):
    data = random_rows(kind)
    assert np.array_equal(decoded_by_mlx(kind, data), dequantise(data, kind))


def test_the_weights_of_q6_k_move_by_half_a_step_of_8_bits():
    data = random_rows("Q6_K")
    weights = dequantise(data, "Q6_K")
    groups = weights.reshape(-1, GROUP_SIZE)
    half_steps = np.repeat((groups.max(-1) - groups.min(-1)) / 255 / 2, GROUP_SIZE)
    error = np.abs(decoded_by_mlx("Q6_K", data) - weights).reshape(-1)
    # Rounding of the product and of the sum in float32.
    assert (error <= 1.0001 * half_steps + 1e-6 * np.abs(groups).max(-1).repeat(GROUP_SIZE)).all()
    assert error.max() > 0


@pytest.mark.parametrize("kind", HALVES)
def test_rows_are_repacked_in_pieces_like_all_at_once(kind, monkeypatch):
    data = random_rows(kind)
    at_once = AFFINE_TYPES[kind].rows(data)
    monkeypatch.setattr("mlx_paged.loading.gguf.affine._PIECE_BYTES", 5 * data.shape[1])
    for part, expected in zip(AFFINE_TYPES[kind].rows(data), at_once, strict=True):
        assert np.array_equal(part, expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_types_that_mlx_reads_itself_come_out_as_it_reads_them(kind, tmp_path):
    weights = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x.weight", quantise(weights, kind), raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = mx.load(str(tmp_path / "x.gguf"))
    ours = AFFINE_TYPES[kind].rows(quantise(weights, kind))
    for name, part in zip(("weight", "scales", "biases"), ours, strict=True):
        expected = theirs[f"x.{name}"]
        if expected.dtype != mx.uint32:
            expected = expected.astype(mx.float32)
        assert np.array_equal(part, np.array(expected))


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 4), ("Q5_K", 5), ("Q6_K", 6)])
def test_the_quantisers_of_these_tests_lose_what_a_k_quant_loses(kind, bits):
    weights = np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32)
    error = np.abs(dequantise(quantise(weights, kind), kind) - weights)
    # A step of the widest group, and as much again for the rounding of its scales.
    assert error.max() <= 2 * (weights.max() - weights.min()) / (2**bits - 1)
    assert error.max() > 0
