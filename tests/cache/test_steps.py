"""A step happens as a whole or not at all, and attends to exactly what the cache holds."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from helpers.cache_helpers import KINDS, assert_holds, rows

from mlx_paged.cache import CacheFullError, KVCacheConfig, PagedKVCache, Sequences


def test_a_step_packs_its_sequences_behind_one_another(seqs: Sequences):
    seqs.append("a", *rows(5))
    with seqs.step({"a": 1, "b": 3}) as step:
        assert step.positions.tolist() == [5, 0, 1, 2]
        assert step.logit_rows.tolist() == [0, 3]
        assert step.num_tokens == 4


def test_a_step_whose_body_raises_did_not_happen(seqs: Sequences):
    k, v = rows(12)
    seqs.append("a", k, v)
    before = seqs.stats()
    for error in (KeyboardInterrupt, RuntimeError):
        with pytest.raises(error), seqs.step({"a": 30, "b": 3}):
            seqs.cache.layers[0].update(*(x[0] for x in rows(33, seed=1)))
            raise error
    assert list(seqs) == ["a"]
    assert seqs.stats().num_tokens == before.num_tokens
    assert seqs.stats().blocks_used == before.blocks_used
    assert_holds(seqs, "a", k, v)
    new_k, new_v = rows(2, seed=2)
    seqs.append("a", new_k, new_v)
    assert_holds(seqs, "a", mx.concatenate([k, new_k], axis=1), mx.concatenate([v, new_v], axis=1))


def test_a_step_beyond_the_budget_is_refused_with_the_sum_and_changes_nothing(seqs: Sequences):
    k, v = rows(100)
    seqs.append("a", k, v)
    seqs.append("b", *rows(9))
    before = seqs.stats()
    with (
        pytest.raises(CacheFullError, match="raise kv_cache_bytes") as refusal,
        seqs.step({"a": 10, "b": 300, "c": 1}),
    ):
        raise AssertionError("the body must not run")
    expected = "need 39 blocks of 8, the budget holds 40 and 15 are in use"
    assert expected in str(refusal.value)
    assert seqs.stats() == before and list(seqs) == ["a", "b"]
    assert_holds(seqs, "a", k, v)


def test_the_budget_can_be_used_to_its_last_token(seqs: Sequences):
    seqs.append("a", *rows(312))
    assert seqs.max_seq_len("a") == 320
    seqs.append("a", *rows(8))
    assert seqs.seq_len("a") == 320
    with pytest.raises(CacheFullError):
        seqs.append("a", *rows(1))


def test_bad_steps_are_refused_by_name(seqs: Sequences):
    with pytest.raises(ValueError, match="at least one sequence"), seqs.step({}):
        pass
    with (
        pytest.raises(ValueError, match="sequence 'a': a step adds at least 1 token, got 0"),
        seqs.step({"a": 0}),
    ):
        pass
    with (
        seqs.step({"a": 1}),
        pytest.raises(RuntimeError, match="a step is open already"),
        seqs.step({"b": 1}),
    ):
        pass
    with pytest.raises(RuntimeError, match="no step is open"):
        seqs.cache.layers[0].update(*(x[0] for x in rows(1)))


def dense_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Causal attention in float64; q ``[n, heads, d]`` are the last n of k's and v's ``[T,
    kv_heads, d]`` positions.
    """
    num_new, num_heads, _ = q.shape
    length, num_kv_heads, _ = k.shape
    k, v = (np.repeat(x.astype(np.float64), num_heads // num_kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) * scale
    visible = np.arange(length) <= np.arange(length - num_new, length)[:, None]
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(
    "new", [{"a": 1}, {"a": 1, "b": 1, "c": 1}, {"c": 5, "a": 1}, {"a": 1, "b": 30, "c": 3, "d": 9}]
)
def test_attention_in_a_ragged_step_is_that_of_each_sequence_alone(
    seqs: Sequences, new: dict[str, int]
):
    held = {"a": 17, "b": 8, "c": 41, "d": 0}
    dense = {}
    for seed, (seq, n) in enumerate(held.items()):
        k, v = rows(n, seed=seed)
        if n:
            seqs.append(seq, k, v)
        dense[seq] = (np.array(k[1]), np.array(v[1]))
    total = sum(new.values())
    k, v = rows(total, seed=9)
    q = mx.array(np.random.default_rng(7).standard_normal((total, 6, 8), dtype=np.float32))
    with seqs.step(new):
        seqs.cache.layers[0].update(k[0], v[0])
        out = seqs.cache.layers[1].update_and_attend(q, k[1], v[1], scale=0.3)
        mx.eval(out, seqs.cache.arrays)
    row = 0
    for seq, n in new.items():
        chosen = slice(row, row + n)
        keys = np.concatenate([dense[seq][0], np.array(k[1, chosen])])
        values = np.concatenate([dense[seq][1], np.array(v[1, chosen])])
        expected = dense_attention(np.array(q[chosen]), keys, values, scale=0.3)
        np.testing.assert_allclose(
            np.array(out[chosen]), expected, rtol=0, atol=20 * np.finfo(np.float32).eps
        )
        row += n


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_every_dtype_and_block_size_holds_what_was_written(dtype: str, block_size: int):
    config = KVCacheConfig.uniform(2, 3, 8, dtype, block_size, num_blocks=20)
    for kind in KINDS.values():
        seqs = Sequences(kind(config))
        k, v = (x.astype(getattr(mx, dtype)) for x in rows(70))
        seqs.append("a", k, v)
        for layer in range(2):
            keys, values = seqs.materialize("a", layer)
            assert keys.dtype == getattr(mx, dtype)
            assert mx.array_equal(keys, k[layer].swapaxes(0, 1)) and mx.array_equal(
                values, v[layer].swapaxes(0, 1)
            )


def test_the_longest_length_of_a_fork_counts_the_copy_of_its_shared_tail():
    seqs = Sequences(PagedKVCache(KVCacheConfig.uniform(2, 3, 8, block_size=8, num_blocks=3)))
    seqs.append("a", *rows(12))
    seqs.fork("a", "b")
    # The third block becomes the copy of the second, half full one.
    assert [seqs.max_seq_len(seq) for seq in ("a", "b", "new")] == [16, 16, 8]
    seqs.append("a", *rows(4, seed=1))
    assert [seqs.max_seq_len(seq) for seq in ("a", "b", "new")] == [16, 16, 0]
    with pytest.raises(CacheFullError):
        seqs.append("a", *rows(1))
    seqs.append("b", *rows(4, seed=2))
    seqs.fork("b", "c")
    seqs.trim("c", 12)
    assert seqs.max_seq_len("c") == 12
    with pytest.raises(CacheFullError):
        seqs.append("c", *rows(1))


def test_a_sequence_of_nan_poisons_no_later_owner_of_its_blocks():
    seqs = Sequences(PagedKVCache(KVCacheConfig.uniform(2, 3, 8, block_size=8, num_blocks=8)))
    broken = mx.full((2, 64, 3, 8), mx.nan)
    for new_tokens in ({"b": 1}, {"b": 11}, {"b": 3, "c": 12}, {"b": 1, "c": 1}):
        total = sum(new_tokens.values())
        k, v = rows(total)
        q = mx.array(np.random.default_rng(7).standard_normal((total, 6, 8), dtype=np.float32))
        outs = []
        for recycled in (False, True):
            for seq in list(seqs):
                seqs.free(seq)
            if recycled:
                seqs.append("a", broken, broken)
                seqs.free("a")
            else:
                seqs = Sequences(PagedKVCache(seqs.cache.config))
            # Into a new block, and on in it.
            for _ in range(2):
                with seqs.step(new_tokens):
                    out = [
                        seqs.cache.layers[layer].update_and_attend(q, k[layer], v[layer], scale=0.3)
                        for layer in range(2)
                    ]
                    mx.eval(out, seqs.cache.arrays)
            outs.append(np.array(out[1]))
        assert np.isfinite(outs[1]).all()
        np.testing.assert_allclose(outs[1], outs[0], rtol=0, atol=20 * np.finfo(np.float32).eps)
