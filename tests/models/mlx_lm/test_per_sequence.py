"""Models of mlx-lm that run one sequence at a time, and those with recurrent layers, in the engine:
their tokens are those of mlx-lm's own ``generate_step``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.adapted_models import (
    ATTENTION,
    CONFIGS,
    adapted_model,
    config_of,
    greedy_answer,
    mlx_lm_model,
)
from helpers.engine_runs import assert_nothing_held, greedy, make_engine, prompt, run
from helpers.fast_lane import mostly_slow
from helpers.model_zoo import config_of as zoo_config_of
from helpers.model_zoo import make
from helpers.model_zoo.page import rows_on_page
from helpers.ragged_engines import answers, budget_of, ragged
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from mlx_paged.cache import Sequences
from mlx_paged.cache.paged import PagedLayerKV
from mlx_paged.engine import build
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.speculation.speculation import PromptLookup, Speculation
from mlx_paged.errors import ArgumentError
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.mlx_lm import UnsuitableModelError, adapt
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.mlx_lm.per_sequence import MAX_UNWANTED_ROWS, PerSequenceModel
from mlx_paged.models.mlx_lm.trial import Trial, tried
from mlx_paged.models.run_step import run_step


@mostly_slow("ahead", [False, True], ids=["waiting", "ahead"], quick=(1,))
@mostly_slow("name", CONFIGS, quick=(0, 3, 5))
def test_requests_side_by_side_get_the_tokens_of_mlx_lm(name: str, ahead: bool):
    engine = ragged(name, run_ahead=ahead)
    prompts = {str(n): prompt(n, 1) for n in (1, 9, 40, 83)}
    for request_id, tokens in prompts.items():
        engine.add_request(request_id, tokens, greedy(10))
    expected = {n: [greedy_answer(name, tokens, 10)] for n, tokens in prompts.items()}
    assert answers(engine) == expected
    assert_nothing_held(engine)
    assert not engine.manager.states


@pytest.mark.parametrize("keeps_wanted_rows", [True, False])
def test_a_long_chunk_computes_the_logits_that_are_wanted_and_few_others(
    keeps_wanted_rows: bool, monkeypatch: pytest.MonkeyPatch
):
    """Where the last norm can't leave rows out, the last token is a pass of its own, as in
    mlx-lm.
    """
    passes = []
    model, tokens = adapted_model("gpt_bigcode"), prompt(MAX_UNWANTED_ROWS + 10)
    assert isinstance(model, PerSequenceModel)
    assert model._traced.keeps_wanted_rows
    model._traced = replace(model._traced, keeps_wanted_rows=keeps_wanted_rows)
    expected = greedy_answer("gpt_bigcode", tokens, 3)
    kind = type(model.inner)
    call = kind.__call__

    def noting(self: nn.Module, inputs: mx.array, cache: Any = None) -> mx.array:
        logits = call(self, inputs, cache=cache)
        passes.append((inputs.shape[1], logits.shape[1]))
        return logits

    monkeypatch.setattr(kind, "__call__", noting)
    sizes = [(74, 1)] if keeps_wanted_rows else [(73, 73), (1, 1)]
    for budget in (200, 50):
        engine = make_engine(model, block_size=8, max_num_seqs=8, max_num_batched_tokens=budget)
        passes.clear()
        engine.add_request("a", tokens, greedy(3))
        assert answers(engine) == {"a": [expected]}
        assert budget == 50 or passes[:-2] == sizes
        assert sum(num_tokens for num_tokens, _ in passes) == len(tokens) + 2


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_all_tokens_are_those_of_mlx_lm(name: str):
    model = mlx_lm_model(name)
    tokens = prompt(70)
    stock = make_prompt_cache(model)
    expected, found = [], []
    cache = make_kv_cache(adapted_model(name), block_size=8, kv_cache_bytes="40blocks")
    seqs = Sequences(cache)
    for begin, end in ((0, 1), (1, 30), (30, 31), (31, 70)):
        part = mx.array(tokens[begin:end])
        expected.append(model(part[None], cache=stock)[0])
        with seqs.step({"a": end - begin}):
            found.append(adapted_model(name)(part, cache.layers))
            mx.eval(found[-1], cache.arrays)
    error = mx.abs(mx.concatenate(found) - mx.concatenate(expected)).max().item()
    assert error <= 1e-4 * mx.abs(mx.concatenate(expected)).max().item()


@mostly_slow("name", ["llama4", "qwen3_next", "mamba2", "recurrent_gemma"], quick=(0, 1))
@mostly_slow("swap_bytes", [0, "1M"], ids=["recompute", "swap"])
def test_preempted_requests_get_the_tokens_of_undisturbed_ones(name: str, swap_bytes: str | int):
    engine = ragged(name, watermark=0.0, swap_bytes=swap_bytes, **budget_of(name, 47, 1.7))
    prompts = {str(n): prompt(20 + n, n) for n in range(4)}
    for request_id, tokens in prompts.items():
        engine.add_request(request_id, tokens, greedy(24))
    expected = {n: [greedy_answer(name, tokens, 24)] for n, tokens in prompts.items()}
    swapped: list[int] = []
    outputs = run(engine, lambda: swapped.append(engine.stats().num_swapped_tokens))
    assert {n: [outputs[n].outputs[0].token_ids] for n in prompts} == expected
    assert engine.stats().num_preemptions > 0
    assert any(swapped) == (swap_bytes != 0)
    assert_nothing_held(engine)


@mostly_slow("ahead", [False, True], ids=["waiting", "ahead"], quick=(1,))
@mostly_slow("name", CONFIGS, quick=(1, 4, 6))
def test_a_prefix_hit_changes_no_token(name: str, ahead: bool):
    """Of a prompt, and of a prompt with its answer: the next turn of a conversation."""
    engine = ragged(name, run_ahead=ahead)
    shared = prompt(50, 1)
    engine.add_request("first", shared, greedy(16))
    ((answer,),) = answers(engine).values()
    asked = {
        "other": ([*shared, *prompt(3, 3)], 48),
        "next turn": ([*shared, *answer, *prompt(9, 9)], 64),
        "unlike": ([*shared[:30], *prompt(9, 5)], 24 if name in ATTENTION else 0),
    }
    for request_id, (tokens, _) in asked.items():
        engine.add_request(request_id, tokens, greedy(8))
    outputs = run(engine)
    for request_id, (tokens, num_cached) in asked.items():
        assert outputs[request_id].num_cached_tokens == num_cached, request_id
        assert outputs[request_id].outputs[0].token_ids == greedy_answer(name, tokens, 8)
    assert_nothing_held(engine)


@pytest.mark.parametrize("name", ATTENTION)
def test_requests_of_one_step_share_a_prompt_that_one_of_them_computes(name: str):
    engine = ragged(name, max_num_batched_tokens=200)
    tokens = prompt(50)
    for number in range(3):
        engine.add_request(str(number), tokens, greedy(6))
    outputs = run(engine)
    assert [output.num_cached_tokens for output in outputs.values()] == [0, 48, 48]
    for output in outputs.values():
        assert output.outputs[0].token_ids == greedy_answer(name, tokens, 6)


@pytest.mark.parametrize("name", ["gpt_bigcode", "qwen3_next"])
def test_an_aborted_request_leaves_the_others_alone(name: str):
    engine = ragged(name)
    prompts = {str(n): prompt(25, n) for n in range(3)}
    for request_id, tokens in prompts.items():
        engine.add_request(request_id, tokens, greedy(12))
    for _ in range(6):
        engine.step()
    engine.abort("1")
    # An id is free again at once, for another prompt.
    while "1" in engine.reports.requests:
        engine.step()
    again = prompt(31, 9)
    engine.add_request("1", again, greedy(12))
    found = answers(engine)
    assert found.pop("1") == [greedy_answer(name, again, 12)]
    assert found == {n: [greedy_answer(name, prompts[n], 12)] for n in ("0", "2")}
    assert_nothing_held(engine)


class Failing:
    """A model that raises in the middle of a step, once, behind the rows of a sequence."""

    def __init__(self, engine: Engine, at_call: int, error: BaseException):
        self.model, self.at_call, self.error = engine.runner.model, at_call, error
        self.num_calls = 0

    def __call__(self, *args: Any) -> mx.array:
        logits = self.model(*args)
        self.num_calls += 1
        if self.num_calls == self.at_call:
            raise self.error
        return logits


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=repr)
@mostly_slow("at_call", [3, 9], quick=(1,))
@pytest.mark.parametrize("name", ["llama4", "falcon_h1"])
def test_a_step_that_fails_is_run_again_from_the_right_state(
    name: str, at_call: int, error: BaseException
):
    engine = ragged(name)
    prompts = {str(n): prompt(25, n) for n in range(3)}
    for request_id, tokens in prompts.items():
        engine.add_request(request_id, tokens, greedy(12))
    engine.runner.model = Failing(engine, at_call, error)
    found: dict[str, list[list[int]]] = {}
    try:
        found = answers(engine)
    except KeyboardInterrupt:
        found = answers(engine)
    assert found == {n: [greedy_answer(name, tokens, 12)] for n, tokens in prompts.items()}
    assert_nothing_held(engine)


@pytest.mark.parametrize("drafter", ["look-up", "model"])
def test_drafts_change_no_token_of_a_model_without_state(
    drafter: str, monkeypatch: pytest.MonkeyPatch
):
    draft_model = adapted_model("gpt_bigcode") if drafter == "model" else None

    def eager(num_draft_tokens: int, model: Any, drafts: Any, *_: Any) -> Speculation:
        return Speculation(drafts or PromptLookup(), num_draft_tokens)

    monkeypatch.setattr(build, "speculation_of", eager)
    engine = ragged("gpt_bigcode", num_draft_tokens=3, draft_model=draft_model)
    prompts = {str(n): prompt(8 + n, n) * 3 for n in range(3)}
    for request_id, tokens in prompts.items():
        engine.add_request(request_id, tokens, greedy(16))
    expected = {n: [greedy_answer("gpt_bigcode", ids, 16)] for n, ids in prompts.items()}
    assert answers(engine) == expected
    assert engine.stats().spec_decoding.num_draft_tokens > 0
    if drafter == "model":
        stats = engine.stats().spec_decoding
        assert stats.num_accepted_tokens == stats.num_draft_tokens


@pytest.mark.parametrize("name", ["gpt_bigcode", "falcon_h1"])
def test_log_probabilities_of_a_prompt_are_those_of_mlx_lm(name: str):
    engine, tokens = ragged(name), prompt(30)
    engine.add_request("a", tokens, greedy(2, prompt_logprobs=0))
    (output,) = run(engine).values()
    logits = mlx_lm_model(name)(mx.array(tokens)[None])[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for position in range(1, len(tokens)):
        entry = output.prompt_logprobs[position][tokens[position]]
        assert abs(entry.logprob - logprobs[position - 1, tokens[position]].item()) < 1e-4


@pytest.mark.parametrize("name", ["llama4", "recurrent_gemma"])
def test_blocks_behind_a_window_go_back_to_the_pool(name: str):
    engine = ragged(name)
    tokens = prompt(90)
    engine.add_request("a", tokens, greedy(20))
    held = []
    while engine.has_unfinished_requests():
        (output,) = engine.step() or [None]
        tables = engine.manager.groups.get(("a", 0))
        held.append(0 if tables is None else min(map(len, tables)))
    assert output.outputs[0].token_ids == greedy_answer(name, tokens, 20)
    # 24 tokens of a window, a chunk of 23 and what is left of two blocks.
    assert 0 < max(held) <= 8


@pytest.mark.parametrize("name", ["gpt_bigcode", "falcon_h1"])
def test_kv_in_few_bits_run_and_a_run_reads_what_was_stored(name: str):
    """So a prompt in chunks has the logits of the whole, and those in 8 bits stay near the exact
    ones.
    """
    model, tokens = adapted_model(name), prompt(60)
    logits = {}
    for kv_format in (None, 8, 4):
        cache = make_kv_cache(model, kv_cache_bytes="40blocks", kv_format=kv_format)
        seqs = Sequences(cache)
        whole = run_step(model, seqs, {"whole": tokens})
        run_step(model, seqs, {"cut": tokens[:33]})
        assert relative_error(run_step(model, seqs, {"cut": tokens[33:]}), whole) < 1e-4
        logits[kv_format] = whole
    assert 0 < 4 * relative_error(logits[8], logits[None]) < relative_error(logits[4], logits[None])


def relative_error(logits: mx.array, expected: mx.array) -> float:
    return mx.abs(logits - expected).max().item() / mx.abs(expected).max().item()


# Refused by name


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("gpt_bigcode", {"kv": "basic"}, r"kv='basic' can't hold a model that runs one sequence"),
        (
            "gpt_bigcode",
            {"window": 64},
            r"window needs keys .* gpt_bigcode runs one sequence at a",
        ),
        (
            "falcon_h1",
            {"kv": "basic"},
            r"kv='basic' can't hold .* keeps recurrent states, as falcon_h1 does; use kv='paged'",
        ),
        (
            "falcon_h1",
            {"window": 64},
            r"window can't be combined with a falcon_h1: .*; leave it out",
        ),
        (
            "falcon_h1",
            {"kv_cache_bytes": 40000},
            r"the states of a sequence 83968; raise kv_cache_bytes to at least 116736",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(name: str, options: Any, match: str):
    with pytest.raises(ArgumentError, match=match) as refused:
        make_engine(adapted_model(name), **options)
    assert refused.value.argument == next(iter(options))


class Odd(nn.Module):
    def __init__(self, *caches: Any):
        super().__init__()
        self.make_cache = lambda: list(caches)


@pytest.mark.parametrize(
    ("cache", "kind"),
    [({}, "dict"), (CacheList(RotatingKVCache(8, keep=4), KVCache()), "RotatingKVCache")],
)
def test_caches_that_are_not_known_are_refused_by_name(cache: Any, kind: str):
    with pytest.raises(UnsuitableModelError, match=f"it keeps a {kind} in its caches"):
        PerSequenceModel(Odd(cache), {})


# The way in which a model runs


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_does_not_run_packed_is_tried_one_sequence_at_a_time(name: str):
    adapted = adapt(mlx_lm_model(name), config_of(name))
    is_packed = name not in ATTENTION
    assert isinstance(adapted, PackedModel if is_packed else PerSequenceModel)
    way = "packed, with state" if is_packed else "per sequence"
    assert adapted.description == f"{name} of mlx-lm, {way}"


TABLE = re.compile(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)
REASONS = dict(
    TABLE.findall((Path(__file__).parents[3] / "docs/internals/models-per-sequence.md").read_text())
)


def test_the_table_names_the_models_that_run_one_sequence_at_a_time():
    assert set(REASONS) == {
        name for name, row in rows_on_page().items() if row.way == "per sequence"
    }


@pytest.mark.parametrize("architecture", REASONS)
def test_the_table_says_why_a_model_does_not_run_packed(architecture: str):
    with pytest.raises(UnsuitableModelError, match=re.escape(REASONS[architecture])):
        Trial(make(architecture), zoo_config_of(architecture)).run(PackedModel)


def test_a_model_that_is_wrong_in_both_ways_is_refused_with_both_reasons(
    monkeypatch: pytest.MonkeyPatch,
):
    """As one that takes its positions from something else than the cache would be."""
    exchange = PagedLayerKV.update_and_fetch

    def shifted(self: Any, run: Any, k: mx.array, v: mx.array, *args: Any) -> Any:
        return exchange(self, run, mx.roll(k, 1, axis=0), v, *args)

    monkeypatch.setattr(PagedLayerKV, "update_and_fetch", shifted)
    with pytest.raises(UnsuitableModelError) as refused:
        tried(mlx_lm_model("gpt_bigcode"), config_of("gpt_bigcode"))
    packed, per_sequence = str(refused.value).split("; ")
    assert packed.startswith("packed, it ")
    assert per_sequence.startswith("per sequence, its logits of its first tokens differ")
