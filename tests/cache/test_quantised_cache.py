"""A paged cache of quantised K/V: what it holds, what it gives back, and what it takes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from helpers.cache_helpers import CONFIG, copy_rows, rows, stored_parts, swap_in, swapped_out
from helpers.quantised_problems import BITS_OF_K_AND_V

from mlx_paged.cache import (
    ContiguousKVCache,
    KVCacheConfig,
    KVFormat,
    LayerSpec,
    PagedKVCache,
    Sequences,
)
from mlx_paged.core import ComputedBlocks
from mlx_paged.core.tier import HostMemory
from mlx_paged.errors import ArgumentError
from mlx_paged.options.config import KVBits, KVBudget
from mlx_paged.snapshots import sequence_headers
from mlx_paged.snapshots.snapshots import load_sequence, store_sequence

both_bits = pytest.mark.parametrize("bits", BITS_OF_K_AND_V, ids=lambda b: f"K{b[0]}V{b[1]}")


def config(bits: tuple[int, int] | None, dtype: str = "float32", **change: int) -> KVCacheConfig:
    key_dim, value_dim = 64, 96
    form = KVFormat.dense(dtype)
    if bits is not None:
        form = KVFormat.quantised(KVBits(*bits), key_dim, value_dim, dtype)
    spec = LayerSpec(2, key_dim, value_dim, format=form)
    return KVCacheConfig((spec, spec), **{"block_size": 8, "num_blocks": 40} | change)


def random_rows(num_tokens: int, seed: int = 0) -> tuple[list[mx.array], list[mx.array]]:
    rng = np.random.default_rng(seed)
    return tuple(
        [mx.array(rng.standard_normal((num_tokens, 2, n), dtype=np.float32)) for _ in range(2)]
        for n in (64, 96)
    )


def assert_same_parts(one: Sequences, seq: str, other: list[np.ndarray]) -> None:
    for ours, theirs in zip(stored_parts(one, seq), other, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@both_bits
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_budget_counts_the_bytes_that_are_held(bits, dtype):
    one = config(bits, dtype)
    seqs = Sequences(PagedKVCache(one, initial_blocks=40))
    held = sum(slab.nbytes for layer in seqs.cache.layers for slab in layer.kv.slabs)
    assert seqs.cache.nbytes_held == held == one.nbytes == 41 * 8 * one.nbytes_per_token
    budget = KVBudget(nbytes=held)
    assert KVCacheConfig.within(budget, one.layers, 8).num_blocks == 40
    seqs.append("a", *random_rows(17))
    assert seqs.stats().nbytes_used == 3 * 8 * one.nbytes_per_token


def test_the_device_holds_what_the_cache_says_it_holds():
    mx.clear_cache()
    before = mx.get_active_memory()
    seqs = Sequences(PagedKVCache(config((8, 4), num_blocks=400), initial_blocks=400))
    held = mx.get_active_memory() - before
    # MLX serves an array from a buffer that may be up to two pages larger.
    assert 0 <= held - seqs.cache.nbytes_held <= 12 * 2 * 16384


@both_bits
def test_what_is_materialised_is_near_what_was_appended(bits):
    seqs = Sequences(PagedKVCache(config(bits)))
    k, v = random_rows(21)
    seqs.append("a", k, v)
    for layer in range(2):
        keys, values = seqs.materialize("a", layer)
        assert keys.shape == (2, 21, 64) and values.shape == (2, 21, 96)
        for found, given, num_bits in ((keys, k, bits[0]), (values, v, bits[1])):
            error = mx.abs(found.swapaxes(0, 1) - given[layer])
            # Numbers within some -3..3 in steps of a 15th or a 255th of that.
            assert error.max().item() < (0.03 if num_bits == 8 else 0.5)
            assert error.mean().item() < (0.01 if num_bits == 8 else 0.12)


@both_bits
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_blocks_that_went_through_a_tier_have_the_same_bits(bits, dtype):
    old, new = (Sequences(PagedKVCache(config(bits, dtype))) for _ in range(2))
    old.append("noise", *random_rows(5, seed=5))
    old.append("a", *random_rows(21))
    before, tier = stored_parts(old, "a"), HostMemory()
    headers = sequence_headers(old.cache.config, 21)
    store_sequence(old, "a", tier, headers)
    old.free("a")
    load_sequence(new, "b", 21, tier, headers)
    assert new.seq_len("b") == 21
    assert_same_parts(new, "b", before)


@both_bits
@pytest.mark.parametrize("kind", [PagedKVCache, ContiguousKVCache])
def test_rows_go_into_a_dense_cache_as_what_they_stand_for(bits, kind):
    old, new = Sequences(PagedKVCache(config(bits))), Sequences(kind(config(None)))
    old.append("a", *random_rows(13))
    copy_rows(old, "a", new, "b")
    for layer in range(2):
        for one, other in zip(
            new.materialize("b", layer), old.materialize("a", layer), strict=True
        ):
            np.testing.assert_array_equal(np.array(one), np.array(other))


@both_bits
def test_dense_rows_are_quantised_as_they_are_appended_elsewhere(bits):
    old, new, appended = (
        Sequences(PagedKVCache(config(None))),
        *(Sequences(PagedKVCache(config(bits))) for _ in "ab"),
    )
    k, v = random_rows(13)
    old.append("a", k, v)
    copy_rows(old, "a", new, "b")
    appended.append("b", k, v)
    assert_same_parts(new, "b", stored_parts(appended, "b"))


@both_bits
def test_forks_trims_and_appends_in_pieces_hold_the_bits_of_one_append(bits):
    k, v = random_rows(29)
    whole, seqs = Sequences(PagedKVCache(config(bits))), Sequences(PagedKVCache(config(bits)))
    whole.append("a", k, v)
    for start, end in ((0, 9), (9, 10), (10, 24)):
        seqs.append("a", [x[start:end] for x in k], [x[start:end] for x in v])
    seqs.fork("a", "b")
    seqs.append("b", *random_rows(6, seed=3))  # copies the block that both write
    seqs.trim("b", 20)
    seqs.append("b", [x[20:] for x in k], [x[20:] for x in v])
    seqs.append("a", [x[24:] for x in k], [x[24:] for x in v])
    for seq in "ab":
        assert_same_parts(seqs, seq, stored_parts(whole, "a"))


@both_bits
@pytest.mark.parametrize("start", [0, 16])
def test_a_swapped_sequence_comes_back_bit_for_bit(bits, start):
    seqs = Sequences(PagedKVCache(config(bits, "float16")))
    seqs.append("a", *random_rows(21))
    before = stored_parts(seqs, "a")
    swapped = swapped_out(seqs, "a")
    assert swapped[0].num_tokens == 21
    num_blocks = len(seqs.block_ids("a"))
    assert sum(map(len, swapped[1][0])) == num_blocks * seqs.cache.config.nbytes_per_block
    hits = seqs.manager.tables["a"].blocks[: start // seqs.cache.config.block_size]
    seqs.cache.pool.touch(hits)
    seqs.free("a")
    nan = [rows * mx.nan for rows in random_rows(40)[0]], [r * mx.nan for r in random_rows(40)[1]]
    seqs.append("other", *nan)
    seqs.free("other")
    swap_in(seqs, "a", swapped, ComputedBlocks([hits], start))
    seqs.cache.pool.free_blocks(hits)
    seqs.trim("a", 21)
    assert_same_parts(seqs, "a", before)


@both_bits
def test_growth_and_shrinking_change_no_bit(bits):
    k, v = random_rows(30)
    one = Sequences(PagedKVCache(config(bits), initial_blocks=4))
    one.append("a", k, v)
    before = stored_parts(one, "a")
    one.append("b", *random_rows(120, seed=2))
    assert one.cache.pool.num_usable_blocks > 4
    assert_same_parts(one, "a", before)
    one.free("b")
    held = one.cache.nbytes_held
    assert one.cache.shrink() == held - one.cache.nbytes_held > 0
    assert_same_parts(one, "a", before)


@both_bits
def test_what_another_sequence_left_in_a_block_does_not_reach_its_next_owner(bits):
    clean, dirty = Sequences(PagedKVCache(config(bits))), Sequences(PagedKVCache(config(bits)))
    nan = [rows * mx.nan for rows in random_rows(40)[0]], [r * mx.nan for r in random_rows(40)[1]]
    dirty.append("last", *nan)
    dirty.free("last")
    k, v = random_rows(11)
    outs = []
    for seqs in (clean, dirty):
        seqs.append("a", [x[:10] for x in k], [x[:10] for x in v])
        q = mx.array(np.random.default_rng(1).standard_normal((1, 4, 64), dtype=np.float32))
        with seqs.step({"a": 1}):
            out = [
                layer.update_and_attend(q, k[i][10:], v[i][10:], scale=0.1)
                for i, layer in enumerate(seqs.cache.layers)
            ]
            mx.eval(out, seqs.cache.arrays)
        outs.append(out)
    for one, other in zip(*outs, strict=True):
        assert mx.array_equal(one, other).item()


@both_bits
def test_a_token_decoded_or_computed_in_a_prompt_attends_to_the_same_rows(bits):
    """To those that are stored, its own among them: whatever the chunks, results agree to the
    rounding of a float sum, which is far below a step of the format.
    """
    k, v = random_rows(40)
    q = mx.array(np.random.default_rng(1).standard_normal((40, 4, 64), dtype=np.float32))
    results = []
    for chunks in ([40], [1] * 40, [13, 1, 26]):
        seqs, found, done = Sequences(PagedKVCache(config(bits))), [], 0
        for chunk in chunks:
            new = slice(done, done + chunk)
            with seqs.step({"a": chunk}, [chunk]):
                out = seqs.cache.layers[1].update_and_attend(
                    q[new], k[1][new], v[1][new], scale=0.125
                )
                seqs.cache.layers[0].update(k[0][new], v[0][new])
                mx.eval(out, seqs.cache.arrays)
            found.append(np.array(out))
            done += chunk
        results.append(np.concatenate(found))
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=0, atol=2e-5)


def test_a_basic_cache_refuses_quantised_layers_by_name():
    with pytest.raises(ArgumentError, match=r"kv_format: a basic cache .* use kv='paged'") as error:
        Sequences(ContiguousKVCache(config((8, 8))))
    assert error.value.argument == "kv_format"


def test_dense_caches_hold_what_they_held():
    assert CONFIG.nbytes_per_token == 2 * 3 * 2 * 8 * 4
    seqs = Sequences(PagedKVCache(CONFIG))
    seqs.append("a", *rows(5))
    assert len(stored_parts(seqs, "a")) == 2 * len(seqs.cache.layers)
