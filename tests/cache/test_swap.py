"""K/V that are copied out to host memory and back are the same bits; a device that gives less than
the budget.
"""

from __future__ import annotations

import warnings

import mlx.core as mx
import numpy as np
import pytest
from helpers.cache_helpers import (
    CONFIG,
    assert_holds,
    rows,
    scheduled_step,
    swap_in,
    swapped_out,
    uniform,
)
from paged_testing.integrity import check_manager

from mlx_paged.cache import PagedKVCache, Sequences
from mlx_paged.core import ComputedBlocks
from mlx_paged.ops import KVHandle
from mlx_paged.ops.formats import DENSE_DTYPES

BLOCK_SIZE = CONFIG.block_size
NAN = rows(40)[0] * float("nan")


def bits(seqs: Sequences, seq: str) -> list[np.ndarray]:
    """K and V of all layers, as unsigned integers."""
    kind = mx.uint32 if str(seqs.cache.layers[0].spec.format) == "float32" else mx.uint16
    arrays = [
        array for layer in range(len(seqs.cache.layers)) for array in seqs.materialize(seq, layer)
    ]
    return [np.array(array.view(kind)) for array in arrays]


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def swapped_back(seqs: Sequences, seq: str, num_tokens: int, start: int = 0) -> list[int]:
    """Swap a sequence out and in again, into whatever blocks come; from `start` on, the blocks are
    kept as hits.
    """
    table = seqs.manager.tables[seq]
    swapped = swapped_out(seqs, seq)
    assert swapped[0].num_tokens == num_tokens
    hits = table.blocks[: start // BLOCK_SIZE]
    seqs.cache.pool.touch(hits)
    seqs.free(seq)
    # Somebody else takes the blocks, leaves NaN in them and goes; the first of them is not to be
    # had then.
    seqs.append("other", NAN, NAN)
    seqs.free("other")
    held = seqs.cache.pool.get_new_blocks(1)
    assert mx.isnan(seqs.cache.layers[0].kv.k[0]).any().item()
    swap_in(seqs, seq, swapped, ComputedBlocks([hits], start))
    seqs.cache.pool.free_blocks([*held, *hits])
    seqs.trim(seq, num_tokens)
    return list(seqs.manager.tables[seq].block_ids)


@pytest.mark.parametrize("dtype", DENSE_DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 8, 13, 24])
def test_swapping_out_and_in_restores_every_bit_in_other_blocks(dtype: str, num_tokens: int):
    seqs = Sequences(PagedKVCache(uniform(dtype=dtype)))
    seqs.append("first", *rows(3))
    k, v = rows(num_tokens, seed=1)
    k[0, 0, 0, :4] = mx.array([float("inf"), -0.0, 1e-30, 65504.0])
    seqs.append("a", k, v)
    before, block_ids = bits(seqs, "a"), list(seqs.block_ids("a"))
    seqs.append("between", *rows(9, seed=2))
    seqs.free("first")
    after = swapped_back(seqs, "a", num_tokens)
    assert after != block_ids, "the test is of other blocks"
    assert_same(bits(seqs, "a"), before)
    check_manager(seqs.manager)


@pytest.mark.parametrize("dtype", DENSE_DTYPES)
@pytest.mark.parametrize("start", [8, 16])
def test_only_the_rows_behind_a_hit_are_copied_back(dtype: str, start: int):
    seqs = Sequences(PagedKVCache(uniform(dtype=dtype)))
    seqs.append("a", *rows(21))
    before = bits(seqs, "a")
    block_ids = list(seqs.block_ids("a"))
    num_kept = start // BLOCK_SIZE
    assert swapped_back(seqs, "a", 21, start)[:num_kept] == block_ids[:num_kept]
    assert_same(bits(seqs, "a"), before)


def test_what_is_swapped_out_does_not_change_with_the_blocks_it_came_from():
    seqs = Sequences(PagedKVCache(CONFIG))
    seqs.append("a", *rows(13))
    _, contents = swapped_out(seqs, "a")
    before = [[bytes(bytearray(block)) for block in blocks] for blocks in contents]
    seqs.free("a")
    seqs.append("b", NAN, NAN)
    assert contents == before


def test_a_sequence_goes_on_where_it_was_and_attends_to_no_nan_of_its_last_block():
    plain, seqs = Sequences(PagedKVCache(CONFIG)), Sequences(PagedKVCache(CONFIG))
    k, v = rows(14)
    for one in (plain, seqs):
        one.append("a", k[:, :13], v[:, :13])
    swapped = swapped_out(seqs, "a")
    seqs.free("a")
    seqs.append("other", NAN, NAN)
    seqs.free("other")
    # As a scheduler does: slots for what is restored and for the new token, then swap in, then the
    # step.
    swap_in(seqs, "a", swapped)
    q = mx.random.normal((1, 6, 8))
    outputs = []
    with scheduled_step(seqs, {"a": 1}):
        outputs += [
            seqs.cache.layers[layer].update_and_attend(q, k[layer, 13:], v[layer, 13:], scale=0.3)
            for layer in range(2)
        ]
        mx.eval(outputs, seqs.cache.arrays)
    with plain.step({"a": 1}):
        expected = [
            plain.cache.layers[layer].update_and_attend(q, k[layer, 13:], v[layer, 13:], scale=0.3)
            for layer in range(2)
        ]
        mx.eval(expected, plain.cache.arrays)
    assert_holds(seqs, "a", k, v)
    for one, other in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))
    # The rows after the last one are read by whole blocks, too.
    last = seqs.block_ids("a")[-1]
    assert all(
        not mx.isnan(array[last]).any().item()
        for layer in seqs.cache.layers
        for array in layer.kv.slabs
    )


def test_swapping_in_leaves_other_sequences_alone():
    seqs = Sequences(PagedKVCache(CONFIG))
    for seed, seq in enumerate("abc"):
        seqs.append(seq, *rows(13, seed))
    swapped_back(seqs, "b", 13)
    for seed, seq in enumerate("abc"):
        assert_holds(seqs, seq, *rows(13, seed))


# A device that gives less than the budget

SMALL = uniform(num_blocks=400)


def slab_lengths(seqs: Sequences) -> list[int]:
    """Blocks of the K and V slab of each layer."""
    return [slab.shape[0] for layer in seqs.cache.layers for slab in layer.kv.slabs]


@pytest.fixture
def failing_grow(monkeypatch):
    """`KVHandle.grow` that fails from some call on: half-way, where it is not the first layer's."""

    def install(fails_at: int) -> list[int]:
        calls: list[int] = []
        grow = KVHandle.grow

        def limited(handle: KVHandle, num_new_blocks: int) -> None:
            calls.append(num_new_blocks)
            if len(calls) >= fails_at:
                raise RuntimeError("[malloc] Unable to allocate")
            grow(handle, num_new_blocks)

        monkeypatch.setattr(KVHandle, "grow", limited)
        return calls

    return install


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_what_the_device_gives_is_the_budget_from_then_on(failing_grow, fails_at: int):
    seqs = Sequences(PagedKVCache(SMALL, initial_blocks=4))
    k, v = rows(29)
    seqs.append("a", k, v)
    calls = failing_grow(fails_at)
    with pytest.warns(
        UserWarning, match=r"no memory for more than \d+ blocks, which are the budget now"
    ):
        for num_blocks in (5, 10, 20):
            seqs.cache.make_room(num_blocks)
    # "a" holds 4 of 4 blocks. The first growth, of both layers, is by the 5 that shall be free.
    num_usable = 4 if fails_at <= 2 else 9
    assert seqs.cache.pool.num_usable_blocks == num_usable and seqs.cache.num_growable_blocks() == 0
    assert slab_lengths(seqs) == [num_usable + 1] * 4
    # Where twice as much can't be had, what is needed is asked for, and then nothing any more.
    assert len(calls) == (fails_at if fails_at <= 2 else fails_at + 1)
    check_manager(seqs.manager)
    assert_holds(seqs, "a", k, v)
    # And it works, up to its last block.
    more = rows(num_usable * BLOCK_SIZE - 29, seed=1)
    seqs.append("a", *more)
    assert_holds(
        seqs, "a", *(mx.concatenate(pair, axis=1) for pair in zip((k, v), more, strict=True))
    )
    assert seqs.max_seq_len("a") == num_usable * BLOCK_SIZE


def test_where_twice_as_much_can_not_be_had_what_is_needed_may_be(monkeypatch):
    grow = KVHandle.grow

    def limited(handle: KVHandle, num_new_blocks: int) -> None:
        if handle.num_blocks + num_new_blocks > 12:
            raise RuntimeError("[malloc] Unable to allocate")
        grow(handle, num_new_blocks)

    monkeypatch.setattr(KVHandle, "grow", limited)
    seqs = Sequences(PagedKVCache(SMALL, initial_blocks=7))
    seqs.cache.make_room(10)  # doubling would be 14
    assert (seqs.cache.pool.num_usable_blocks, seqs.cache.pool.num_empty_blocks) == (10, 10)
    assert seqs.cache.num_growable_blocks() == 390
    check_manager(seqs.manager)


def test_what_another_holder_of_the_kv_can_not_have_is_given_back():
    """As on several ranks: the pools of all of them stay alike."""
    seqs, asked = Sequences(PagedKVCache(SMALL, initial_blocks=4)), []
    k, v = rows(29)
    seqs.append("a", k, v)
    seqs.cache.all_can = lambda has_grown: asked.append(has_grown) or False
    with pytest.warns(UserWarning, match="no memory for more than 4 blocks"):
        seqs.cache.make_room(3)
    assert asked == [True, True], "twice as much, then what is needed"
    assert seqs.cache.pool.num_usable_blocks == 4 and seqs.cache.num_growable_blocks() == 0
    assert slab_lengths(seqs) == [5] * 4
    check_manager(seqs.manager)
    assert_holds(seqs, "a", k, v)


def test_memory_that_was_given_back_may_be_asked_for_again(failing_grow, monkeypatch):
    seqs = Sequences(PagedKVCache(SMALL, initial_blocks=4))
    failing_grow(1)
    with pytest.warns(UserWarning, match="no memory for more than 4 blocks"):
        seqs.cache.make_room(5)
    assert seqs.cache.num_growable_blocks() == 0
    monkeypatch.undo()
    seqs.cache.shrink()
    seqs.cache.make_room(5)
    assert seqs.cache.pool.num_empty_blocks >= 5


def test_the_notice_is_said_once(failing_grow):
    failing_grow(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            seqs = Sequences(PagedKVCache(SMALL, initial_blocks=7))
            for num_blocks in (20, 30, 40):
                seqs.cache.make_room(num_blocks)
    assert len([one for one in said if "no memory for more than 7 blocks" in str(one.message)]) == 1


def test_slabs_that_did_not_grow_are_not_copied_where_memory_is_short(failing_grow, monkeypatch):
    shrunk: list[KVHandle] = []
    shrink_to = KVHandle.shrink_to

    def recording(handle: KVHandle, num_blocks: int) -> None:
        shrunk.append(handle)
        shrink_to(handle, num_blocks)

    monkeypatch.setattr(KVHandle, "shrink_to", recording)
    failing_grow(2)
    seqs = Sequences(PagedKVCache(uniform(num_layers=3, num_blocks=400), initial_blocks=6))
    with pytest.warns(UserWarning, match="no memory for more than 6 blocks"):
        seqs.cache.make_room(8)
    assert len(shrunk) == 1 and shrunk[0] is seqs.cache.layers[0].kv
    assert slab_lengths(seqs) == [7] * 6
