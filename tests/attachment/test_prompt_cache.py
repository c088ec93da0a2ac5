"""Prompt caches of an attached model: copies, cuts, batches, and what becomes of their blocks."""

from __future__ import annotations

import copy
import gc
import random
from pathlib import Path

import mlx.core as mx
import pytest
from helpers.attached_models import attached, cached_model, generated, tokens
from mlx_lm.models.cache import (
    LRUPromptCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from paged_testing.integrity import check_manager

from mlx_paged.errors import ArgumentError


def feed(model, cache, ids) -> mx.array:
    """The logits ``[vocab_size]`` behind these tokens."""
    return model(mx.array(ids)[None], cache=cache)[0, -1]


def test_a_copy_goes_its_own_way_and_shares_the_blocks(with_and_without_windows):
    model = with_and_without_windows
    prompt, more = tokens(40), [tokens(6, 1), tokens(9, 2)]
    expected = [model(mx.array(prompt + each)[None])[0, -1] for each in more]
    with attached(model) as paged:
        cache = make_prompt_cache(model)
        feed(model, cache, prompt)
        before = paged.stats().num_used_blocks
        copied = copy.deepcopy(cache)
        assert paged.stats().num_used_blocks == before
        for held, ids, logits in zip((copied, cache), more, expected, strict=True):
            assert mx.allclose(feed(model, held, ids), logits, atol=1e-4)
        assert (cache[0].offset, copied[0].offset, copied[-1].offset) == (49, 46, 46)
        del cache, held
        assert paged.stats().num_seqs == 1
        del copied
        assert paged.stats().num_used_blocks == 0


def test_blocks_of_caches_in_a_garbage_cycle_come_back(llama):
    with attached(llama) as paged:
        cache = make_prompt_cache(llama)
        feed(llama, cache, tokens(40))
        cache.append(cache)
        del cache
        assert paged.stats().num_used_blocks == 5
        gc.collect()
        assert paged.stats().num_used_blocks == 0
        assert paged.stats().num_cached_blocks == 5


def test_a_trimmed_cache_goes_on_from_there(llama):
    prompt = tokens(40)
    with attached(llama) as paged:
        cache = make_prompt_cache(llama)
        feed(llama, cache, prompt)
        assert can_trim_prompt_cache(cache)
        assert trim_prompt_cache(cache, 13) == 13
        assert cache[0].offset == cache[0].size() == 27
        assert paged.stats().num_used_blocks == 4
        logits = feed(llama, cache, [5, 6])
        assert trim_prompt_cache(cache, 100) == 29
        assert cache[0].empty() and paged.stats().num_used_blocks == 0
        again = feed(llama, cache, [*prompt[:27], 5, 6])
    expected = llama(mx.array([*prompt[:27], 5, 6])[None])[0, -1]
    assert mx.allclose(logits, expected, atol=1e-4)
    assert mx.allclose(again, expected, atol=1e-4)


def test_a_cut_behind_a_full_window_is_right(with_and_without_windows):
    """mlx-lm's own caches can't be cut there, and what is cut there in vain is wrong in silence."""
    model = with_and_without_windows
    prompt = tokens(50)
    expected = model(mx.array([[*prompt[:21], 5]]))[0, -1]
    with attached(model) as paged:
        cache = make_prompt_cache(model)
        for begin in range(0, 50, 10):
            feed(model, cache, prompt[begin : begin + 10])
        assert can_trim_prompt_cache(cache) and trim_prompt_cache(cache, 29) == 29
        assert cache[0].offset == 21
        assert mx.allclose(feed(model, cache, [5]), expected, atol=1e-4)
        assert cache[0].offset == 22
        del cache
        assert paged.stats().num_used_blocks == 0


def test_mlx_lms_store_of_prompt_caches_works(with_and_without_windows):
    model = with_and_without_windows
    prompt, other = tokens(40), [*tokens(30), 7, 7, 7]
    expected = model(mx.array(other)[None])[0, -1]
    with attached(model) as paged:
        store = LRUPromptCache()
        cache = make_prompt_cache(model)
        feed(model, cache, prompt)
        store.insert_cache("model", prompt, cache)
        assert store.nbytes == paged.stats().nbytes_used > 0
        del cache
        for _ in range(2):
            cache, rest = store.fetch_nearest_cache("model", other)
            logits = feed(model, cache or make_prompt_cache(model), rest)
            assert mx.allclose(logits, expected, atol=1e-4)
        exact, rest = store.fetch_nearest_cache("model", prompt)
        assert exact[0].offset == 40 and rest == []
        del cache, exact, store
        gc.collect()
        assert paged.stats().num_used_blocks == 0


def test_random_programs_of_copies_cuts_and_batches(llama):
    """Against a list of the tokens that each cache must hold."""
    rng = random.Random(7)
    with attached(llama, blocks=24) as paged:
        held: list[tuple[list, list[int]]] = []
        for _ in range(70):
            what = rng.choice(["new", "new", "feed", "feed", "copy", "trim", "batch", "drop"])
            if what == "new" or not held:
                ids = tokens(rng.randint(1, 40), rng.randint(0, 4))
                held.append((make_prompt_cache(llama), ids))
                check(llama, held[-1], ids)
            elif what == "feed":
                cache, ids = rng.choice(held)
                if len(ids) > 50:
                    continue
                new = tokens(rng.randint(1, 20), rng.randint(0, 9))
                ids += new
                check(llama, (cache, ids), new)
            elif what == "copy" and len(held) < 6:
                cache, ids = rng.choice(held)
                held.append((copy.deepcopy(cache), list(ids)))
            elif what == "trim":
                cache, ids = rng.choice(held)
                num_trimmed = rng.randint(0, len(ids) - 1)
                assert trim_prompt_cache(cache, num_trimmed) == num_trimmed
                del ids[len(ids) - num_trimmed :]
            elif what == "batch":
                run_as_batch(llama, rng, held)
            elif what == "drop":
                held.pop(rng.randrange(len(held)))
            check_manager(paged._sequences.held.manager)
            assert [cache[0].offset for cache, _ in held] == [len(ids) for _, ids in held]
        stats = paged.stats()
        assert stats.num_hit_tokens > 0 and stats.num_recomputed_tokens > 0
        held.clear()
        del cache
        assert paged.stats().num_used_blocks == 0


def check(model, held, new) -> None:
    cache, ids = held
    logits = feed(model, cache, new)
    assert mx.allclose(logits, model(mx.array(ids)[None])[0, -1], atol=1e-4)


def run_as_batch(model, rng, held) -> None:
    """Merge some caches, feed a ragged batch, take one out, and put the rows back."""
    picked = rng.sample(range(len(held)), min(2, len(held)))
    rows = [held[index] for index in picked]
    merged = [each[0].merge(list(each)) for each in zip(*(cache for cache, _ in rows), strict=True)]
    new = [tokens(rng.randint(1, 12), rng.randint(0, 2)) for _ in picked]
    longest = max(map(len, new))
    for each in merged:
        each.prepare(
            lengths=[len(ids) for ids in new], right_padding=[longest - len(ids) for ids in new]
        )
    model(mx.array([ids + [0] * (longest - len(ids)) for ids in new]), cache=merged)
    for each in merged:
        each.finalize()
    # The caches that were merged are as they were.
    assert [cache[0].offset for cache, _ in rows] == [len(ids) for _, ids in rows]
    if len(picked) > 1:
        for each in merged:
            each.filter(list(range(1, len(picked))))
        picked, new = picked[1:], new[1:]
    for row, index in enumerate(picked):
        cache = [each.extract(row) for each in merged]
        held[index] = (cache, [*held[index][1], *new[row]])
    logits = model(mx.array([[3]] * len(picked)), cache=merged)
    for row, index in enumerate(picked):
        expected = model(mx.array([*held[index][1], 3])[None])[0, -1]
        assert mx.allclose(logits[row, -1], expected, atol=1e-4)


def test_what_is_not_called_is_given_up_when_the_budget_is_full(with_and_without_windows, computed):
    model = with_and_without_windows
    prompts = [tokens(40, seed) for seed in range(3)]
    expected = [generated(model, [*prompt, 1]) for prompt in prompts]
    # One sequence has at most 53 tokens: 7 blocks for each group of layers.
    probe = attached(model)
    with probe as paged:
        num_groups = len(paged.cache.config.groups)
    with attached(model, blocks=8 * num_groups) as paged:
        caches = [make_prompt_cache(model) for _ in prompts]
        for cache, prompt in zip(caches, prompts, strict=True):
            model(mx.array(prompt)[None], cache=cache)
        assert paged.stats().num_seqs == 1
        for cache, answer in zip(caches, expected, strict=True):
            assert generated(model, [1], prompt_cache=cache) == answer
        assert paged.stats().num_recomputed_tokens > 0
        assert [cache[0].offset for cache in caches] == [53, 53, 53]


def test_kv_bits_is_refused_at_the_first_step(llama):
    with attached(llama), pytest.raises(ArgumentError, match=r"kv_bits .* kv_format=8"):
        generated(llama, tokens(5), kv_bits=8)


def test_max_kv_size_is_refused():
    for model_type in ("llama", "qwen3"):  # mlx-lm drops it for the first, and not for the second
        model = cached_model(model_type)
        with attached(model), pytest.raises(ArgumentError, match="max_kv_size can't be combined"):
            generated(model, tokens(5), max_kv_size=64)


def test_saving_is_refused_and_the_file_is_not_there(llama, tmp_path):
    file = tmp_path / "cache.safetensors"
    with attached(llama):
        cache = make_prompt_cache(llama)
        feed(llama, cache, tokens(20))
        with pytest.raises(ValueError, match=r"shared blocks; .* call export_prompt_cache\("):
            save_prompt_cache(str(file), cache)
    assert not file.exists()


def test_parts_of_a_model_refuse_its_prompt_cache(llama):
    with attached(llama):
        with pytest.raises(RuntimeError, match="only with the whole attached model"):
            llama.model(mx.array([[1, 2]]), make_prompt_cache(llama))
        with pytest.raises(RuntimeError, match="only with the whole attached model"):
            llama.layers[0].self_attn(mx.zeros((1, 1, 64)), None, make_prompt_cache(llama)[1])


def test_rows_that_a_prompt_cache_does_not_have_are_refused(llama):
    with attached(llama) as paged:
        cache = make_prompt_cache(llama)
        feed(llama, cache, tokens(9))
        with pytest.raises(ArgumentError, match="2 rows of tokens for a prompt cache of 1 seq"):
            llama(mx.array([[1], [2]]), cache=cache)
        with pytest.raises(ArgumentError, match="lengths must have one entry for each of 1"):
            cache[0].prepare(lengths=[1, 2], right_padding=[1, 0])
        with pytest.raises(ArgumentError, match="right_padding requires lengths"):
            cache[0].prepare(right_padding=[1])
        with pytest.raises(ArgumentError, match="can't be extended by"):
            cache[0].extend(object())
        assert paged.stats().num_seqs == 1 and cache[0].offset == 9


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_a_prompt_cache_is_exported_as_mlx_lms_own(name: str, tmp_path: Path):
    model, prompt, path = cached_model(name), tokens(21), tmp_path / "a.safetensors"
    count = 7 if name == "gemma3" else 21  # within its windows
    expected = generated(model, [*prompt[:count], 5, 6])
    with attached(model) as paged:
        cache = make_prompt_cache(model)
        feed(model, cache, prompt[:count])
        assert paged.export_prompt_cache(path, cache) == count
        again = make_prompt_cache(model)
        with pytest.raises(ArgumentError, match="has 0 sequences and up to 0 tokens"):
            paged.export_prompt_cache(path, again)
        with pytest.raises(ArgumentError, match="cache must be a whole prompt cache"):
            paged.export_prompt_cache(path, cache[:1])
        del cache, again
    assert generated(model, [5, 6], prompt_cache=load_prompt_cache(str(path))) == expected
