"""What a contiguous cache does with whole sequences: it copies forks, and keeps the last one."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.cache_helpers import CONFIG, assert_holds, rows, scheduled_step

from mlx_paged.cache import ContiguousKVCache, Sequences
from mlx_paged.core import hash_token_blocks

TOKENS = list(range(20))
HASHES = hash_token_blocks(TOKENS, CONFIG.block_size)


def cache_with_one() -> tuple[Sequences, tuple[mx.array, mx.array]]:
    seqs, kv = Sequences(ContiguousKVCache(CONFIG)), rows(20)
    seqs.append("a", *kv)
    return seqs, kv


def go_on(seqs: Sequences, seq: str, num_kept: int, num_new: int) -> None:
    """As a scheduler lets a request go on with what is kept, and runs its other tokens."""
    assert seqs.manager.allocate_slots(seq, num_kept + num_new) == []
    seqs.cache.take_last(seqs.manager.tables[seq])
    with scheduled_step(seqs, {seq: num_new}):
        k, v = rows(num_new, seed=1)
        for index, layer in enumerate(seqs.cache.layers):
            layer.update(k[index], v[index])
        mx.eval(seqs.cache.arrays)


def test_a_fork_has_rows_and_blocks_of_its_own():
    seqs, (k, v) = cache_with_one()
    seqs.fork("a", "b")
    assert not set(seqs.block_ids("a")) & set(seqs.block_ids("b"))
    assert seqs.stats().blocks_used == 6
    new = rows(2, seed=1)
    seqs.append("b", *new)
    assert_holds(seqs, "a", k, v)
    assert_holds(
        seqs, "b", mx.concatenate([k, new[0]], axis=1), mx.concatenate([v, new[1]], axis=1)
    )


def test_the_last_sequence_is_trimmed_to_the_common_beginning():
    seqs, (k, v) = cache_with_one()
    seqs.cache.keep_last(seqs.manager.tables["a"], HASHES)
    seqs.manager.free("a")
    assert seqs.stats().blocks_used == 0 < seqs.cache.nbytes_held
    held = seqs.cache.nbytes_held
    other = hash_token_blocks([*TOKENS[:9], 99, *TOKENS], CONFIG.block_size)
    assert [seqs.cache.num_kept_blocks(hashes) for hashes in (HASHES, other, [])] == [2, 1, 0]
    go_on(seqs, "b", 8, 3)
    assert seqs.cache.nbytes_held == held, "the same arrays"
    new = rows(3, seed=1)
    expected = [
        mx.concatenate([old[:, :8], more], axis=1) for old, more in zip((k, v), new, strict=True)
    ]
    assert_holds(seqs, "b", *expected)
    assert seqs.cache.num_kept_blocks(HASHES) == 0, "it is another sequence's now"


def test_only_the_last_sequence_is_kept_and_until_its_memory_is_needed():
    seqs, _ = cache_with_one()
    others = hash_token_blocks([50, *TOKENS], CONFIG.block_size)
    seqs.append("b", *rows(21))
    for seq, hashes in (("a", HASHES), ("b", others)):
        seqs.cache.keep_last(seqs.manager.tables[seq], hashes)
        seqs.manager.free(seq)
    assert [seqs.cache.num_kept_blocks(hashes) for hashes in (HASHES, others)] == [0, 2]
    seqs.append("short", *rows(9))
    assert seqs.cache.num_kept_blocks(others) == 2
    seqs.free("short")
    seqs.append("long", *rows(310))
    assert seqs.cache.num_kept_blocks(others) == 0
    assert seqs.cache.nbytes_held <= CONFIG.num_blocks * CONFIG.nbytes_per_block


@pytest.mark.parametrize("forget", ["shrink", "reset", "forget_last"])
def test_what_is_kept_is_forgotten_where_that_is_asked_for(forget: str):
    seqs, _ = cache_with_one()
    seqs.cache.keep_last(seqs.manager.tables["a"], HASHES)
    seqs.manager.free("a")
    getattr(seqs.cache, forget)()
    assert seqs.cache.num_kept_blocks(HASHES) == 0 == seqs.cache.nbytes_held


def test_blocks_without_rows_are_refused_by_name():
    seqs, _ = cache_with_one()
    seqs.manager.fork("a", "b")
    assert seqs.manager.allocate_slots("b", 1) is not None
    with (
        pytest.raises(RuntimeError, match="20 tokens of a sequence have blocks but no rows"),
        scheduled_step(seqs, {"b": 1}),
    ):
        pass
