"""The Metal backend under a write rule, and what tests of its kernels compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
from metal_emulator import Checks
from metal_emulator.checks import Call
from paged_testing.by_hand import dense_handle
from paged_testing.emulated_metal import emulated_metal
from pytest import MonkeyPatch

from helpers.backends import METAL
from helpers.numpy_attention import PagedProblem, assert_matches_formula, before_the_step, raw
from helpers.write_rules import slots_of_the_step
from mlx_paged.ops import KVHandle, in_place


@contextmanager
def checked_metal(orders: tuple[str, ...] = ("ascending",)) -> Iterator[list[Call]]:
    """``backend="metal"`` inside, each call held to its own slots; yields the trace."""
    with MonkeyPatch.context() as patch:
        # The check at start-up takes longer than most of these tests, and has its own.
        patch.setattr(in_place, "check_writes_in_place", lambda: None)
        # Watching costs more than the other checks, so one order comes without it.
        checks = Checks(orders, writable=slots_of_the_step, watch_accesses=len(orders) > 1)
        with emulated_metal(checks) as trace:
            yield trace


def attend_and_compare(problem: PagedProblem) -> mx.array:
    """First over what the slabs hold, which is the result, then with the newest rows from the
    inputs: both match the formula, and have the same bits.
    """
    whole = METAL.attend(*problem.args)
    assert_matches_formula(whole, problem)
    kv, k, v = before_the_step(problem)
    out = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_matches_formula(out, problem)
    assert_same_slabs(kv, problem.kv)
    assert_same_bits(out, whole)
    return whole


def assert_same_alone(problem: PagedProblem, whole: mx.array) -> None:
    """Each sequence by itself has its bits of ``whole``, the result of the batch."""
    for seq in range(len(problem.tables)):
        assert_same_bits(METAL.attend(*problem.alone(seq)), whole[problem.rows(seq)])


def nan_before_the_window(problem: PagedProblem) -> KVHandle:
    """The slabs of a problem with every bit set (a float is NaN) in all slots that its window hides
    from every query.
    """
    window = problem.params.window
    assert window is not None
    kv = problem.kv
    slabs = [raw(slab).copy() for slab in kv.slabs]
    for table, context_len, query_len in zip(
        problem.tables, problem.context_lens, problem.query_lens, strict=True
    ):
        for position in range(max(0, context_len - query_len - window + 1)):
            index, offset = divmod(position, kv.block_size)
            for slab in slabs:
                slab[table[index], :, offset] = np.iinfo(slab.dtype).max
    return with_slabs(kv, slabs)


def with_slabs(kv: KVHandle, bits: Sequence[np.ndarray]) -> KVHandle:
    """A handle like ``kv``, with slabs of these bits in memory of their own."""
    slabs = [mx.array(b).view(slab.dtype) for b, slab in zip(bits, kv.slabs, strict=True)]
    twin = KVHandle(tuple(slabs[: len(kv.k)]), tuple(slabs[len(kv.k) :]), kv.format)
    mx.eval(*twin.arrays)
    return twin


def random_handle(
    rng: np.random.Generator,
    num_blocks: int,
    num_kv_heads: int = 2,
    block_size: int = 8,
    head_dim: int = 32,
    dtype: mx.Dtype = mx.float32,
) -> KVHandle:
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    kv = dense_handle(random_array(rng, shape, dtype), random_array(rng, shape, dtype))
    mx.eval(*kv.arrays)
    return kv


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)


def copy_of(kv: KVHandle) -> KVHandle:
    """The same content in memory of its own."""
    return with_slabs(kv, [raw(slab) for slab in kv.slabs])


def assert_same_bits(one: mx.array, other: mx.array) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    np.testing.assert_array_equal(raw(one), raw(other))


def assert_same_slabs(one: KVHandle, other: KVHandle) -> None:
    mx.eval(*one.arrays, *other.arrays)
    for ours, theirs in zip(one.slabs, other.slabs, strict=True):
        assert_same_bits(ours, theirs)
