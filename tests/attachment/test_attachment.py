"""``attach`` and its end: what it takes, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import importlib.util
import inspect
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.attached_models import attached, cached_model, generated, tokens
from helpers.mlx_lm_models import LLAMA, random_model
from helpers.model_zoo import make
from mlx_lm.models.cache import KVCache, make_prompt_cache
from paged_testing.integrity import check_manager

import mlx_paged
from mlx_paged import attach
from mlx_paged.cache import PagedKVCache
from mlx_paged.errors import ArgumentError
from mlx_paged.loading import demo_model_path
from mlx_paged.models.mlx_lm import adapt
from mlx_paged.models.mlx_lm.packed import PackedModel


def bits(model, cache=None) -> list[bytes]:
    """Logits of a prompt and of a decode, as bytes."""
    cache = make_prompt_cache(model) if cache is None else cache
    parts = [model(mx.array([tokens(30)]), cache=cache), model(mx.array([[7]]), cache=cache)]
    return [bytes(memoryview(part)) for part in parts]


def test_a_detached_model_is_as_before(any_model):
    kind, names, expected = type(any_model), sorted(any_model), bits(any_model)
    kinds = [type(module) for module in any_model.modules()]
    stock_caches = [type(cache) for cache in make_prompt_cache(any_model)]
    paged = attach(any_model, kv_cache_bytes="100blocks", block_size=8)
    assert isinstance(any_model, kind) and type(any_model) is not kind
    bits(any_model)
    paged.close()
    assert [type(module) for module in any_model.modules()] == kinds
    assert sorted(any_model) == names
    assert [type(cache) for cache in make_prompt_cache(any_model)] == stock_caches
    assert bits(any_model) == expected
    paged.close()  # changes nothing


@pytest.fixture
def llama_module(monkeypatch):
    """A module of mlx-lm's that no other test has used, with a model of it."""
    name = "mlx_lm.models.llama_of_this_test"
    stock = importlib.util.find_spec("mlx_lm.models.llama")
    spec = importlib.util.spec_from_file_location(name, stock.origin)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    # Models of other tests may be alive.
    stock = inspect.unwrap(module.scaled_dot_product_attention)
    module.scaled_dot_product_attention = stock
    return module


def llama_of(module):
    return module.Model(module.ModelArgs.from_dict(LLAMA))


def test_the_functions_of_mlx_lm_are_its_own_again_behind_close(llama_module):
    model, stock = llama_of(llama_module), llama_module.scaled_dot_product_attention
    paged = attach(model, kv_cache_bytes="100blocks", block_size=8)
    cache = paged.cache
    bits(model)
    assert llama_module.scaled_dot_product_attention is not stock
    paged.close()
    # Whatever is still held of the attachment.
    assert cache.kind == "paged" and llama_module.scaled_dot_product_attention is stock


def test_the_functions_of_mlx_lm_stay_replaced_while_another_model_needs_them(llama_module):
    one, other = llama_of(llama_module), llama_of(llama_module)
    stock, expected = llama_module.scaled_dot_product_attention, generated(other, tokens(30))
    first, second = attach(one, kv_cache_bytes="100blocks"), attach(other, kv_cache_bytes="1M")
    first.close()
    assert generated(other, tokens(30)) == expected and second.stats().num_tokens > 30
    second.close()
    assert llama_module.scaled_dot_product_attention is stock


def test_the_functions_of_mlx_lm_stay_replaced_as_long_as_a_model_that_runs_packed(llama_module):
    stock = llama_module.scaled_dot_product_attention
    packed = adapt(llama_of(llama_module), LLAMA)
    held = copy.deepcopy(packed._recording.attention)  # as a copy of the model would
    del packed
    gc.collect()
    assert llama_module.scaled_dot_product_attention is not stock
    del held
    gc.collect()
    assert llama_module.scaled_dot_product_attention is stock


def test_a_refused_model_leaves_the_functions_of_mlx_lm_alone(llama_module):
    stock = llama_module.scaled_dot_product_attention
    with pytest.raises(ArgumentError):
        attach(make("stablelm"))
    with pytest.raises(ValueError, match="kv_format"):
        attach(llama_of(llama_module), kv_format=3)
    assert llama_module.scaled_dot_product_attention is stock


def test_what_others_put_in_the_place_of_a_function_of_mlx_lm_stays_there(llama_module):
    stock = llama_module.scaled_dot_product_attention
    with attach(llama_of(llama_module), kv_cache_bytes="100blocks"):
        llama_module.scaled_dot_product_attention = theirs = lambda *args, **kwargs: stock(
            *args, **kwargs
        )
    assert llama_module.scaled_dot_product_attention is theirs
    # It is replaced again where a model needs it, and put back.
    model = llama_of(llama_module)
    expected = generated(model, tokens(30))
    with attach(model, kv_cache_bytes="100blocks") as paged:
        assert generated(model, tokens(30)) == expected and paged.stats().num_tokens > 30
    assert llama_module.scaled_dot_product_attention is theirs


def test_other_caches_and_no_cache_are_as_before_while_attached(llama):
    expected, plain = bits(llama), bytes(memoryview(llama(mx.array([tokens(30)]))))
    stock = make_prompt_cache(llama)
    with attached(llama) as paged:
        assert bits(llama, stock) == expected
        assert isinstance(stock[0], KVCache)
        assert bytes(memoryview(llama(mx.array([tokens(30)])))) == plain
        assert paged.stats().num_tokens == 0


def test_a_model_is_attached_once(llama):
    with attached(llama), pytest.raises(ArgumentError, match="attached already"):
        attach(llama)
    with attached(llama):
        pass


def test_a_copy_of_an_attached_model_is_refused(llama):
    with attached(llama):
        cache, copied = make_prompt_cache(llama), copy.deepcopy(llama)
        for use in (lambda: copied(mx.array([[1]]), cache=cache), copied.make_cache):
            with pytest.raises(ArgumentError, match="copy of an attached model"):
                use()


def test_a_model_without_references_is_forgotten_with_its_blocks():
    model = random_model(LLAMA)
    paged = attach(model, kv_cache_bytes="20blocks")
    dead = weakref.ref(model), weakref.ref(paged.cache)
    del model, paged
    gc.collect()
    assert [each() for each in dead] == [None, None]


def test_what_is_no_model_of_mlx_lm_is_refused():
    ours, _ = mlx_paged.load(demo_model_path())
    for model in (ours, nn.Linear(2, 2), "llama", None):
        with pytest.raises(ArgumentError, match=r"\[attach\] model"):
            attach(model)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("stablelm", "can't run on packed input: it computes attention in its own way"),
        ("mamba2", "keeps recurrent states, which prompt caches .*; mlx_paged.load runs it"),
    ],
)
def test_models_that_do_not_run_packed_are_refused_and_left_alone(architecture, why):
    model = make(architecture)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ArgumentError, match=f"model {architecture} {why}"):
        attach(model)
    assert [type(module) for module in model.modules()] == kinds


def test_arguments_are_refused_by_name(llama):
    with pytest.raises(TypeError, match=r"attach\(\) has no argument 'kv_bits': use kv_format"):
        attach(llama, kv_bits=8)
    for name, value in (
        ("kv_cache_bytes", "lots"),
        ("kv_cache_bytes", 100),
        ("kv_format", 3),
        ("block_size", 0),
        ("backend", "cuda"),
    ):
        with pytest.raises(ValueError, match=name):
            attach(llama, **{name: value})
    assert type(llama).__call__ is cached_model("llama").__class__.__call__
    generated(llama, tokens(5), 2)


def test_arguments_of_a_call_are_refused_by_name(llama):
    with attached(llama) as paged:
        cache = make_prompt_cache(llama)
        embeddings = mx.zeros((1, 3, 64))
        with pytest.raises(ArgumentError, match="input_embeddings can't be combined"):
            llama(mx.array([[1, 2, 3]]), cache=cache, input_embeddings=embeddings)
        with pytest.raises(ArgumentError, match=r"integers of shape \[batch, length\]"):
            llama(mx.array([1, 2, 3]), cache=cache)
        with pytest.raises(ArgumentError, match="integers of shape"):
            llama(mx.array([[1.0]]), cache)
        with pytest.raises(ArgumentError, match="whole prompt cache of 2 entries"):
            llama(mx.array([[1]]), cache=cache[:1])
        with pytest.raises(ArgumentError, match="whole prompt cache of 2 entries"):
            llama(mx.array([[1]]), cache=cache[::-1])
        other = cached_model("qwen3")
        with attached(other), pytest.raises(ArgumentError, match="cache belongs to another model"):
            other(mx.array([[1]]), cache=cache)
        assert paged.stats().num_seqs == 0


def test_a_prompt_cache_ends_with_its_attachment(llama):
    with attached(llama) as paged:
        cache = make_prompt_cache(llama)
        llama(mx.array([tokens(20)]), cache=cache)
    uses = (
        lambda: llama(mx.array([[1]]), cache=cache),
        lambda: cache[0].trim(3),
        lambda: cache[0].state,
        lambda: paged.stats(),
        lambda: paged.cache,
    )
    for use in uses:
        with pytest.raises(RuntimeError, match="detached"):
            use()
    with attached(llama), pytest.raises(ArgumentError, match="or to one that was detached"):
        llama(mx.array([[1]]), cache=cache)


def test_a_call_that_does_not_fit_changes_nothing_and_says_the_sum(any_model):
    with attached(any_model) as paged:
        num_groups = len(paged.cache.config.groups)
    with attached(any_model, blocks=6 * num_groups) as paged:
        cache = make_prompt_cache(any_model)
        any_model(mx.array([tokens(20)]), cache=cache)
        before = paged.stats()
        message = rf"100 more tokens .* blocks of 8, the budget holds {6 * num_groups} and .* raise"
        with pytest.raises(mlx_paged.cache.CacheFullError, match=message):
            any_model(mx.array([tokens(100, 1)]), cache=cache)
        after = paged.stats()
        # What has left a window already may be given back.
        assert after.num_seqs == 1 and after.num_used_blocks <= before.num_used_blocks
        assert (after.num_tokens, cache[0].offset) == (20, 20)
        logits = any_model(mx.array([[4]]), cache=cache)[0, -1]
    expected = any_model(mx.array([[*tokens(20), 4]]))[0, -1]
    assert mx.allclose(logits, expected, atol=1e-4)


def failing_calls(model, monkeypatch, caches, failure) -> None:
    run = PackedModel.__call__

    def failing(*args, **kwargs):
        run(*args, **kwargs)
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(PackedModel, "__call__", failing)
        for cache, ids in caches:
            with pytest.raises(type(failure)):
                model(mx.array([ids]), cache=cache)


def test_a_call_that_fails_leaves_nothing(llama, monkeypatch):
    prompt = tokens(41)
    expected = llama(mx.array([prompt]))[0, -1]
    with attached(llama) as paged:
        kept, new = make_prompt_cache(llama), make_prompt_cache(llama)
        llama(mx.array([prompt[:19]]), cache=kept)
        before = paged.stats()
        calls = [(kept, prompt[19:]), (new, prompt), (new, prompt[:3])]
        failing_calls(llama, monkeypatch, calls, RuntimeError("no memory"))
        after = paged.stats()
        assert replace(after, num_evictions=before.num_evictions) == before
        check_manager(paged._sequences.held.manager)
        for cache, ids in calls[:2]:
            assert mx.allclose(llama(mx.array([ids]), cache=cache)[0, -1], expected, atol=1e-4)


@pytest.mark.parametrize("is_broken", [False, True])
def test_after_an_interrupt_or_a_lost_slab_all_is_computed_again(llama, monkeypatch, is_broken):
    prompt = tokens(41)
    expected = llama(mx.array([prompt]))[0, -1]
    with attached(llama) as paged:
        kept, other = make_prompt_cache(llama), make_prompt_cache(llama)
        for cache in (kept, other):
            llama(mx.array([prompt[:19]]), cache=cache)
        failure: BaseException = KeyboardInterrupt()
        with monkeypatch.context() as patch:
            if is_broken:
                failure = RuntimeError("no memory")
                patch.setattr(PagedKVCache, "arrays", property(lambda self: 1 // 0))
            failing_calls(llama, monkeypatch, [(kept, prompt[19:])], failure)
        assert paged.stats().num_used_blocks == 0
        assert kept[0].offset == other[0].offset == 19
        for cache in (kept, other):
            logits = llama(mx.array([prompt[19:]]), cache=cache)[0, -1]
            assert mx.allclose(logits, expected, atol=1e-4)
        stats = paged.stats()
        assert (stats.num_recomputed_tokens, stats.num_seqs) == (19 + 3, 2)


def test_threads_may_take_turns(llama):
    prompt = tokens(30)
    expected = generated(llama, prompt)
    with attached(llama) as paged, ThreadPoolExecutor(2) as threads:
        caches = [make_prompt_cache(llama) for _ in range(2)]
        for _ in range(2):
            answers = threads.map(
                lambda cache: generated(llama, prompt, prompt_cache=cache), caches
            )
            assert list(answers) == [expected] * 2
            assert generated(llama, prompt) == expected
            for cache in caches:
                cache[0].trim(100)
        del caches, cache
        assert paged.stats().num_used_blocks == 0
