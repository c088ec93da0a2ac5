"""What a cache of either kind holds after appends, prompts, trims, forks and frees."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.cache_helpers import assert_holds, rows

from mlx_paged.cache import Sequences
from mlx_paged.errors import ArgumentError


def cat(*parts: mx.array) -> mx.array:
    return mx.concatenate(parts, axis=1)


def test_appending_one_token_at_a_time_holds_them_in_order(seqs: Sequences):
    k, v = rows(35)
    for t in range(35):
        seqs.append("a", k[:, t : t + 1], v[:, t : t + 1])
    assert_holds(seqs, "a", k, v)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 16, 100])
def test_a_whole_prompt_is_held_and_another_one_after_a_free(seqs: Sequences, num_tokens: int):
    seqs.append("a", *rows(num_tokens))
    assert_holds(seqs, "a", *rows(num_tokens))
    seqs.free("a")
    seqs.append("a", *rows(5, seed=1))
    assert_holds(seqs, "a", *rows(5, seed=1))


def test_sequences_of_different_lengths_do_not_touch_one_another(seqs: Sequences):
    held = {seq: rows(n, seed=n) for seq, n in {"a": 3, "b": 20, "c": 8}.items()}
    for seq, (k, v) in held.items():
        seqs.append(seq, k, v)
    for step in range(10):
        for seq in held:
            k, v = rows(1, seed=100 + step)
            seqs.append(seq, k, v)
            held[seq] = (cat(held[seq][0], k), cat(held[seq][1], v))
    for seq, (k, v) in held.items():
        assert_holds(seqs, seq, k, v)
    assert list(seqs) == ["a", "b", "c"]


def test_trimmed_tokens_are_forgotten_and_new_ones_follow_the_rest(seqs: Sequences):
    k, v = rows(20)
    seqs.append("a", k, v)
    seqs.trim("a", 11)
    assert_holds(seqs, "a", k[:, :11], v[:, :11])
    new_k, new_v = rows(6, seed=1)
    seqs.append("a", new_k, new_v)
    assert_holds(seqs, "a", cat(k[:, :11], new_k), cat(v[:, :11], new_v))


def test_a_sequence_trimmed_to_nothing_is_empty_and_goes_on(seqs: Sequences):
    seqs.append("a", *rows(20))
    seqs.trim("a", 0)
    keys, _ = seqs.materialize("a", 0)
    assert keys.shape == (3, 0, 8)
    seqs.append("a", *rows(4, seed=1))
    assert_holds(seqs, "a", *rows(4, seed=1))


@pytest.mark.parametrize("length", [-1, 21])
def test_a_trim_beyond_the_sequence_is_refused(seqs: Sequences, length: int):
    seqs.append("a", *rows(20))
    with pytest.raises(ValueError, match=rf"trim: length {length} must be within 0\.\.20"):
        seqs.trim("a", length)


def test_a_freed_sequence_is_gone_and_its_blocks_are_free_again(seqs: Sequences):
    for n in range(10):
        seqs.append("a", *rows(300, seed=n))
        seqs.free("a")
    assert list(seqs) == [] and seqs.seq_len("a") == 0
    assert seqs.stats().nbytes_used == 0
    assert seqs.max_seq_len("a") == seqs.cache.config.num_slots == 320


@pytest.mark.parametrize("layer", [99, -1, 2, "0", None])
def test_a_layer_that_there_is_not_is_an_error_with_the_range(seqs: Sequences, layer: object):
    seqs.append("a", *rows(3))
    with pytest.raises(ArgumentError) as refused:
        seqs.materialize("a", layer)  # type: ignore[arg-type]
    kind, last = seqs.cache.kind, len(seqs.cache.layers) - 1
    assert str(refused.value) == f"[{kind} cache] layer must be within 0..{last}, got {layer!r}"
    assert refused.value.argument == "layer"


@pytest.mark.parametrize("verb", ["free", "trim", "materialize", "fork"])
def test_a_sequence_that_is_not_there_is_refused_by_name(seqs: Sequences, verb: str):
    seqs.append("a", *rows(3))
    arguments = {"trim": ("b", 0), "materialize": ("b", 0), "fork": ("b", "c")}.get(verb, ("b",))
    with pytest.raises(KeyError, match=r"no sequence 'b'; it holds \['a'\]"):
        getattr(seqs, verb)(*arguments)


def test_a_fork_has_the_same_tokens_and_then_a_life_of_its_own(seqs: Sequences):
    k, v = rows(13)
    seqs.append("a", k, v)
    seqs.fork("a", "b")
    new = {"a": rows(5, seed=1), "b": rows(9, seed=2)}
    for seq, (new_k, new_v) in new.items():
        seqs.append(seq, new_k, new_v)
    for seq, (new_k, new_v) in new.items():
        assert_holds(seqs, seq, cat(k, new_k), cat(v, new_v))
    seqs.free("a")
    assert_holds(seqs, "b", cat(k, new["b"][0]), cat(v, new["b"][1]))


def test_both_sides_of_a_fork_may_grow_in_one_step(seqs: Sequences):
    k, v = rows(13)
    seqs.append("a", k, v)
    seqs.fork("a", "b")
    new_k, new_v = rows(3, seed=1)
    with seqs.step({"a": 1, "b": 2}):
        for layer in range(2):
            seqs.cache.layers[layer].update(new_k[layer], new_v[layer])
        mx.eval(seqs.cache.arrays)
    assert_holds(seqs, "a", cat(k, new_k[:, :1]), cat(v, new_v[:, :1]))
    assert_holds(seqs, "b", cat(k, new_k[:, 1:]), cat(v, new_v[:, 1:]))


def test_a_fork_onto_a_sequence_that_exists_is_refused(seqs: Sequences):
    seqs.append("a", *rows(3))
    with pytest.raises(ValueError, match="sequence 'a' exists already"):
        seqs.fork("a", "a")


def test_forked_blocks_are_shared_until_one_side_writes(paged: Sequences):
    paged.append("a", *rows(20))
    paged.fork("a", "b")
    assert paged.block_ids("a") == paged.block_ids("b") == (1, 2, 3)
    assert paged.stats().blocks_used == 3
    paged.append("b", *rows(1, seed=1))
    assert paged.block_ids("a") == (1, 2, 3)
    assert paged.block_ids("b") == (1, 2, 4)


def test_rows_of_a_wrong_shape_are_refused_and_change_nothing(seqs: Sequences):
    k, v = rows(4)
    for bad_k, bad_v in (
        (k[:1], v[:1]),
        (k[:, :, :2], v[:, :, :2]),
        (k, v[:, :3]),
        (k[..., :4], v[..., :4]),
        (k[0], v[0]),
    ):
        with pytest.raises(ValueError, match="append: expected"):
            seqs.append("a", bad_k, bad_v)
    assert list(seqs) == []


def test_stats_tell_tokens_and_bytes(seqs: Sequences):
    seqs.append("a", *rows(9))
    seqs.append("b", *rows(1))
    stats = seqs.stats()
    per_token = 2 * 2 * 3 * 8 * 4  # K and V, layers, heads, head_dim, float32
    assert (stats.num_seqs, stats.num_tokens) == (2, 10)
    assert seqs.cache.config.nbytes_per_token == per_token
    assert (stats.blocks_used, stats.num_blocks) == (3, 40)
    assert stats.nbytes_used == 3 * 8 * per_token
    # Paged: all 40 blocks are within the first allocation, and the null block. Contiguous: 256
    # tokens for the first sequence, and what the budget has left for the second.
    num_slots = {"paged": 41 * 8, "basic": 256 + 64}[seqs.cache.kind]
    assert stats.nbytes_held == num_slots * per_token
