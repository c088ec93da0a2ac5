"""Slabs whose offsets fit no integer of 32 bits, neither in elements nor in pieces of 16 bytes.

Only the pages that are touched take memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import METAL
from helpers.kernel_checks import assert_same_bits, checked_metal, random_array
from helpers.numpy_attention import before_the_step, make_problem, raw
from helpers.quantised_problems import quantised
from metal_emulator import LargeArray
from paged_testing.by_hand import dense_handle, slots_of, step_of

from mlx_paged.ops import AttentionMetadata, AttentionParams, KVHandle, kernels
from mlx_paged.ops.metadata import Rows

NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, DTYPE = 2, 8, 32, mx.float16
# The block whose first piece of 16 bytes is number 2^32. In 32 bits it is block 0, and the next one
# block 1.
FAR = 8 * 2**32 // (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM)
BLOCKS = (0, 1, 2, 3, FAR, FAR + 1, FAR + 2, FAR + 3)


# Takes a handle, and what says which number a block has there.
Operation = Callable[[KVHandle, Callable[[int], int]], tuple[mx.array, ...] | None]


class Slabs:
    """A large handle, and a small one with the same blocks under the numbers 0 to 7."""

    def __init__(self, large: KVHandle, small: KVHandle):
        self.large, self.small = large, small

    @classmethod
    def random(cls, stack: ExitStack) -> Slabs:
        rng = np.random.default_rng(0)
        shape = (NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        small = dense_handle(*(random_array(rng, (len(BLOCKS), *shape), DTYPE) for _ in "kv"))
        mx.eval(small.slabs)
        slabs = [stack.enter_context(LargeArray.zeros((FAR + 4, *shape), DTYPE)) for _ in "kv"]
        for slab, content in zip(slabs, small.slabs, strict=True):
            for index, block in enumerate(BLOCKS):
                slab[block][:] = np.array(content[index])
        return cls(dense_handle(*slabs), small)

    def both(self, operation: Operation) -> None:
        """The operation comes to the same results and slabs on both handles."""
        large = operation(self.large, lambda block: block)
        small = operation(self.small, BLOCKS.index)
        for one, other in zip(large or (), small or (), strict=True):
            assert_same_bits(one, other)
        for slab, expected in zip(self.large.slabs, self.small.slabs, strict=True):
            blocks = np.stack([slab[block] for block in BLOCKS]).view(np.uint16)
            np.testing.assert_array_equal(blocks, raw(expected))


@pytest.fixture
def slabs(compiler: None) -> Iterator[Slabs]:
    with ExitStack() as stack:
        try:
            large_and_small = Slabs.random(stack)
        except MemoryError as error:
            pytest.skip(str(error))
        with checked_metal():
            yield large_and_small


def rows(num_tokens: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    shape = (num_tokens, NUM_KV_HEADS, HEAD_DIM)
    return random_array(rng, shape, DTYPE), random_array(rng, shape, DTYPE)


def write(kv: KVHandle, block: Callable[[int], int]) -> None:
    slots = [block(FAR + 1) * BLOCK_SIZE + 3, block(2) * BLOCK_SIZE, block(FAR) * BLOCK_SIZE + 7]
    METAL.update(*rows(3, seed=1), kv, slots_of(slots, BLOCK_SIZE))


def gather(kv: KVHandle, block: Callable[[int], int]) -> tuple[mx.array, mx.array]:
    return METAL.gather_blocks(kv, list(map(block, [FAR + 1, 0, FAR + 3, 2])), 30)


def copy(kv: KVHandle, block: Callable[[int], int]) -> None:
    pairs = [(0, FAR + 1), (FAR + 2, 3), (FAR + 3, FAR)]
    METAL.copy_blocks(kv, [(block(source), block(to)) for source, to in pairs])


def step(block: Callable[[int], int]) -> tuple[mx.array, AttentionMetadata]:
    tables = [list(map(block, table)) for table in ([FAR + 2, 1, FAR], [3, FAR + 3])]
    query = random_array(np.random.default_rng(2), (4, 2 * NUM_KV_HEADS, HEAD_DIM), DTYPE)
    return query, step_of(tables, [20, 13], [1, 3], BLOCK_SIZE)


def attend(kv: KVHandle, block: Callable[[int], int]) -> tuple[mx.array]:
    query, metadata = step(block)
    return (METAL.attend(query, kv, metadata, AttentionParams(HEAD_DIM**-0.5)),)


def write_and_attend(kv: KVHandle, block: Callable[[int], int]) -> tuple[mx.array]:
    query, metadata = step(block)
    k, v = rows(4, seed=3)
    return (METAL.update_and_attend(query, k, v, kv, metadata, AttentionParams(HEAD_DIM**-0.5)),)


OPERATIONS = {
    "reshape_and_cache": write,
    "gather_blocks": gather,
    "copy_blocks": copy,
    "paged_attention": attend,
    "update_and_attend": write_and_attend,
}
operations = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


@operations
def test_blocks_behind_the_first_4_billion_pieces_are_like_any_others(
    operation: Operation,
    slabs: Slabs,
) -> None:
    slabs.both(operation)


LOADS = "row_formats.h", "row * (WIDTH / LOAD_SIZE)", "uint(row) * (WIDTH / LOAD_SIZE)"
MISTAKES = {
    "reshape_and_cache": (write, "reshape_and_cache.metal", "const size_t to", "const uint to"),
    "gather_blocks": (gather, "gather_blocks.metal", "const size_t row", "const uint row"),
    "copy_blocks_source": (copy, "copy_blocks.metal", "const size_t source", "const uint source"),
    "copy_blocks_destination": (
        *(copy, "copy_blocks.metal"),
        *("const size_t destination", "const uint destination"),
    ),
    "paged_attention": (attend, *LOADS),
    "update_and_attend": (write_and_attend, *LOADS),
}


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "name", "text", "other"), MISTAKES.values(), ids=MISTAKES)
def test_an_offset_of_32_bits_is_seen(
    operation: Operation,
    name: str,
    text: str,
    other: str,
    slabs: Slabs,
    plant: Callable[..., None],
) -> None:
    plant(name, text, other)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        slabs.both(operation)


@pytest.mark.parametrize("widths", [(64, 32), (32, 64)], ids=["keys", "values"])
@pytest.mark.parametrize("bits", [None, 8])
def test_either_of_k_and_v_alone_takes_an_index_of_64_bits(
    widths: tuple[int, int], bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem((40,), 1, head_dim=widths[0], value_dim=widths[1], dtype=DTYPE)
    kv = problem.kv if bits is None else quantised(problem, bits, bits).kv
    largest = max(kv.k[0].nbytes, kv.v[0].nbytes)
    assert largest > min(kv.k[0].nbytes, kv.v[0].nbytes)
    for least_large, index in ((largest, mx.uint64), (largest + 1, mx.uint32)):
        monkeypatch.setattr(kernels, "LARGE_SLAB_BYTES", least_large)
        assert dict(kernels._format(kv))["Index"] == index


def test_no_index_of_32_bits_counts_more_loads_than_it_can() -> None:
    """The smallest loads are eight numbers of 4 bits."""
    assert kernels.LARGE_SLAB_BYTES == 2**32 * (8 * 4 // 8)


@pytest.mark.slow
@pytest.mark.parametrize("operation", [attend, write_and_attend])
def test_large_slabs_need_an_index_of_64_bits(
    operation: Operation, slabs: Slabs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LARGE_SLAB_BYTES", 2**62)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        slabs.both(operation)


@pytest.mark.slow
def test_an_index_of_64_bits_leaves_the_same_bits_of_quantised_rows(
    compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(
        (40, 9), 2, num_kv_heads=2, group=3, head_dim=64, dtype=DTYPE, poison="large"
    )
    problem = quantised(problem, 8, 4)
    found = []
    for least_large in (kernels.LARGE_SLAB_BYTES, 0):
        monkeypatch.setattr(kernels, "LARGE_SLAB_BYTES", least_large)
        with checked_metal():
            kv, k, v = before_the_step(problem)
            out = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
            gathered = METAL.gather_step(kv, problem.metadata)
            found.append([out, *kv.slabs, *(row for rows in gathered for row in rows)])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)
