"""The engine on quantised K/V: batches, chunks, prefix hits, forks and preemption change no token,
and what can't be had is refused by name at start-up.

A number near the middle between two steps may be stored as either, so a rounding elsewhere can move
it by a step, and a logit by more than a rounding. The models and prompts here have no such ties.
"""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.engine_runs import VOCAB_SIZE, greedy, make_engine, prompt, run, sampled, small_model
from helpers.workloads import Workload, assert_all_same

import mlx_paged
from mlx_paged import LLM, SamplingParams, demo_model_path, load, make_kv_cache
from mlx_paged.cache import KVFormat
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.errors import ArgumentError
from mlx_paged.models import qwen3
from mlx_paged.options.config import KVBits

formats = pytest.mark.parametrize("kv_format", ["8", "K:8,V:4", "4"])


@pytest.fixture
def model(kernel_model: qwen3.Model) -> qwen3.Model:
    return kernel_model


def alone(model: qwen3.Model, tokens: list[int], params: SamplingParams, kv_format: str) -> Any:
    engine = make_engine(
        model, kv_format=kv_format, enable_prefix_caching=False, max_num_batched_tokens=4096
    )
    engine.add_request("alone", tokens, params)
    return [one.token_ids for one in run(engine)["alone"].outputs]


@pytest.mark.slow
@formats
@pytest.mark.parametrize("swap_bytes", [0, "16blocks"], ids=["recompute", "swap"])
def test_preempted_chunked_and_forked_requests_get_the_tokens_of_undisturbed_ones(
    model: qwen3.Model, kv_format: str, swap_bytes: int | str
):
    engine = make_engine(
        model,
        kv_format=kv_format,
        block_size=8,
        kv_cache_bytes="20blocks",
        swap_bytes=swap_bytes,
        max_num_batched_tokens=20,
        max_num_seqs=8,
    )
    rng, shared, asked = random.Random(1), prompt(32, seed=1), {}
    for n in range(8):
        tokens = shared[: rng.choice([0, 20, 32])] + prompt(rng.randint(1, 30), seed=n)
        params = sampled(n, 20, n=2) if n % 2 else greedy(rng.randint(20, 50))
        asked[str(n)] = tokens, params
        engine.add_request(str(n), tokens, params)
    outputs, stats = run(engine), engine.stats()
    assert stats.num_preemptions > 1 and stats.num_hit_tokens > 0
    for name, (tokens, params) in asked.items():
        ours = [one.token_ids for one in outputs[name].outputs]
        assert ours == alone(model, tokens, params, kv_format), name


@formats
def test_a_prompt_that_is_found_gets_the_tokens_of_one_that_is_not(
    model: qwen3.Model, kv_format: str
):
    engine, tokens = make_engine(model, kv_format=kv_format), prompt(70)
    answers = []
    for name in ("cold", "warm"):
        engine.add_request(name, tokens, greedy(20))
        answers.append(run(engine)[name].outputs[0].token_ids)
    assert answers[0] == answers[1] and engine.stats().num_hit_tokens == 64


@pytest.mark.slow
@pytest.mark.parametrize(("kv_format", "seed"), [("K:8,V:4", 2), ("8", 1), ("4", 3)])
def test_requests_of_every_kind_get_the_same_one_step_ahead(
    model: qwen3.Model, kv_format: str, seed: int
):
    workload = Workload(seed, 25, VOCAB_SIZE)
    ahead, waiting = (
        workload.run(model, kv_format=kv_format, run_ahead=is_ahead) for is_ahead in (True, False)
    )
    assert_all_same(ahead, waiting)


@formats
def test_an_engine_holds_the_bytes_of_its_format(model: qwen3.Model, kv_format: str):
    engine = make_engine(model, kv_format=kv_format, kv_cache_bytes="40blocks")
    bits = KVBits.parse(kv_format)
    assert bits is not None
    # Per head 32 numbers, and a scale and a bias of 4 bytes for K and for V each.
    per_token = 2 * 2 * ((bits.key + bits.value) * 32 // 8 + 2 * 2 * 4)
    config = engine.cache.config
    assert config.nbytes_per_token == per_token
    assert engine.stats().nbytes_held == engine.cache.nbytes_held == 41 * 16 * per_token
    dense = make_engine(model, kv_cache_bytes=config.nbytes)
    assert dense.cache.config.num_blocks < config.num_blocks // 2


# The doors


@pytest.mark.parametrize(
    ("given", "bits"),
    [
        (None, None),
        (8, (8, 8)),
        ("4", (4, 4)),
        (" 8 ", (8, 8)),
        (np.int64(4), (4, 4)),
        ("K:8,V:4", (8, 4)),
        ("k:4, v:8", (4, 8)),
        ("K8V4", (8, 4)),
    ],
)
def test_bits_are_read_as_people_write_them(given: Any, bits: tuple[int, int] | None):
    assert KVBits.parse(given) == (None if bits is None else KVBits(*bits))


@pytest.mark.parametrize(
    "given", [0, 2, 16, "fp8", "", "K:8", "V:4,K:8", "K:8,V:3", 8.0, True, [8], "8,4", "K:8,V:4,"]
)
def test_other_bits_are_refused_by_name(model: qwen3.Model, given: Any):
    with pytest.raises(ArgumentError, match=r"kv_format must be 8, 4 or .* K:8,V:4, got") as error:
        make_engine(model, kv_format=given)
    assert error.value.argument == "kv_format"


def test_a_basic_cache_refuses_bits_by_name(model: qwen3.Model):
    with pytest.raises(ArgumentError, match=r"kv_format: a basic cache .* use kv='paged'"):
        make_engine(model, kv="basic", kv_format=8)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", [8, 4])
def test_sinks_that_move_with_a_window_are_quantised_from_the_original_each_time(
    model: qwen3.Model, kv_format: int
):
    """Or errors would add up: after 50 moves 4-bit keys are off by as much as they are large."""
    engine = make_engine(
        model, kv_format=kv_format, block_size=8, window=32, num_sink_tokens=8, run_ahead=False
    )
    engine.add_request("long", prompt(20), greedy(450, ignore_eos=True))
    for _ in range(430):
        engine.step()
    cache = engine.cache
    (table,) = engine.manager.tables.values()
    originals = [block.block_id for block in list(table)[len(table) :]]
    assert len(originals) == 1 and table.num_evicted_tokens > 400
    form = cache.layers[0].spec.format

    def keys_in(index: int, block_ids: list[int]) -> mx.array:
        return form.unrotated(
            form.key.decode(cache.backend.gather_parts(cache.layers[index].kv, block_ids, 8)[0])
        )

    for index in range(len(cache.layers)):
        computed = keys_in(index, originals).swapaxes(0, 1)
        once = model.rotate_keys(index, computed, table.num_evicted_tokens)
        once = form.unrotated(form.key.decode(form.key.encode(form.rotated(once))))
        moved = keys_in(index, table.block_ids[:1]).swapaxes(0, 1)
        np.testing.assert_allclose(np.array(moved), np.array(once), atol=1e-5)


def test_a_model_whose_rows_have_no_groups_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"kv_format can't be 8 bits .* rows of K/V have 16"):
        make_engine(small_model(), kv_format=8)


def test_every_door_takes_a_format():
    model, tokenizer = load(demo_model_path())
    text = "The code of apple is 4821. What is the code of apple?"
    messages = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    wanted = KVFormat.quantised(KVBits(8, 4), 32, 32, "float32")
    options: dict[str, Any] = {"kv_format": "K:8,V:4", "kv_cache_bytes": "40blocks"}
    assert make_kv_cache(model, **options).config.layers[0].format == wanted
    answer = mlx_paged.generate(model, tokenizer, ids, max_tokens=30, **options)
    assert "4821" in answer
    last = list(mlx_paged.stream_generate(model, tokenizer, ids, max_tokens=30, **options))[-1]
    assert last.kv_bytes == 41 * 16 * 512
    llm = LLM(model, tokenizer, **options)
    assert llm.engine.cache.config.layers[0].format == wanted
    assert llm.generate([ids], SamplingParams(max_tokens=30))[0].outputs[0].text == answer
    with AsyncEngine(model, tokenizer, **options) as engine:
        assert engine.engine.cache.config.layers[0].format == wanted
