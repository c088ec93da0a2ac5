"""Drafts change no token: whatever is proposed, answers, reasons and log-probabilities are those of
an engine without drafts.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.drafting import EagerSpeculation, Oracle, eager_speculation, knows
from helpers.engine_runs import (
    VOCAB_SIZE,
    answer,
    ask_alone,
    assert_nothing_held,
    greedy,
    make_engine,
    prompt,
    run,
    sampled,
)
from helpers.fast_lane import mostly_slow
from helpers.workloads import Workload, assert_all_same_but_aborts, assert_same
from paged_testing.lazy_metal import lazy_metal

from mlx_paged import StructuredOutputsParams
from mlx_paged.engine import steps
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.speculation.speculation import Drafter, PromptLookup, Speculation
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.request import RequestOutput, SpecDecodingStats

FACTS = "The code of apple is 4821. " * 6


@mostly_slow(
    ("seed", "kind"), [(0, "waiting"), (1, "ahead"), (2, "basic"), (3, "ahead")], quick=(1,)
)
def test_requests_of_every_kind_get_the_same_as_without(model: qwen3.Model, kind: str, seed: int):
    workload = Workload(seed + 20, 25, VOCAB_SIZE)
    if kind == "basic":
        workload.options["swap_bytes"] = 0
    plain = workload.run(model, run_ahead=False)
    speculation = eager_speculation(VOCAB_SIZE, knows(plain.answers), seed)
    options: dict[str, Any] = {"kv": "basic"} if kind == "basic" else {"run_ahead": kind == "ahead"}
    drafting = workload.run(model, speculation=speculation, **options)
    assert_all_same_but_aborts(drafting, plain)
    stats = drafting.engine.stats()
    assert 0 < stats.spec_decoding.num_accepted_tokens < stats.spec_decoding.num_draft_tokens
    if kind != "basic":  # whose forks take blocks of their own
        assert drafting.engine.scheduler.num_steps < plain.engine.scheduler.num_steps


@pytest.mark.slow
def test_many_requests_get_the_same_as_without(model: qwen3.Model):
    preemptions, reasons = 0, set[str | None]()
    for seed in (200, 204):
        workload = Workload(seed, 25, VOCAB_SIZE)
        plain = workload.run(model, run_ahead=False)
        speculation = eager_speculation(VOCAB_SIZE, knows(plain.answers), seed)
        drafting = workload.run(model, speculation=speculation, run_ahead=seed % 2 == 0)
        assert_all_same_but_aborts(drafting, plain)
        preemptions += drafting.engine.stats().num_preemptions
        for output in drafting.outputs.values():
            reasons |= {completion.finish_reason for completion in output.outputs}
    assert preemptions > 10 and reasons == {"stop", "length", "abort", "error"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_ahead", "options"),
    [
        (False, {"kv_format": "8"}),
        (True, {"kv_format": "K:8,V:4"}),
        (False, {"window": 48, "num_sink_tokens": 4}),
        (True, {"window": 32, "num_sink_tokens": 4, "kv_format": "8"}),
    ],
    ids=str,
)
def test_quantised_kv_and_windows_get_the_same_as_without(
    kernel_model: qwen3.Model, is_ahead: bool, options: dict[str, Any]
):
    workload = Workload(300 + len(str(options)), 15, VOCAB_SIZE)
    plain = workload.run(kernel_model, run_ahead=False, **options)
    speculation = eager_speculation(VOCAB_SIZE, knows(plain.answers))
    drafting = workload.run(kernel_model, run_ahead=is_ahead, speculation=speculation, **options)
    assert_all_same_but_aborts(drafting, plain)
    assert drafting.engine.stats().spec_decoding.num_accepted_tokens > 20


def test_kernels_verify_runs_behind_replayed_decodes(kernel_model: qwen3.Model):
    workload = Workload(50, 15, VOCAB_SIZE)
    plain = workload.run(kernel_model, run_ahead=False)
    with lazy_metal(computes=True):
        drafting = workload.run(
            kernel_model, speculation=eager_speculation(VOCAB_SIZE, knows(plain.answers))
        )
    assert drafting.engine.cache.backend.name == "metal"
    assert_all_same_but_aborts(drafting, plain)


def test_texts_and_stop_texts_are_the_same_as_without(demo: tuple[Any, Any]):
    model, tokenizer = demo
    outputs: dict[int, dict[str, RequestOutput]] = {}
    for num_draft_tokens in (0, 3, 7):
        engine = make_engine(model, tokenizer)
        engine.scheduler.speculation = Speculation(PromptLookup(), num_draft_tokens)
        asks = {
            "greedy": greedy(60, ignore_eos=True, logprobs=1),
            "stop": greedy(60, stop=["6. The c"], ignore_eos=True),
            "penalised": greedy(40, repetition_penalty=1.02, ignore_eos=True),
            "two": sampled(3, 40, temperature=0.3, n=2, ignore_eos=True),
        }
        for name, params in asks.items():
            engine.add_request(name, FACTS, params)
        outputs[num_draft_tokens] = run(engine)
        stats = engine.stats()
        assert stats.spec_decoding.num_draft_tokens >= stats.spec_decoding.num_accepted_tokens
        assert (stats.spec_decoding.num_accepted_tokens > 30) == (num_draft_tokens > 0)
        assert_nothing_held(engine)
    for name, output in outputs[0].items():
        assert_same(outputs[3][name], output)
        assert_same(outputs[7][name], output)
    assert outputs[7]["stop"].outputs[0].stop_reason == "6. The c"


def test_repetitive_text_takes_less_than_half_of_the_steps(demo: tuple[Any, Any]):
    model, tokenizer = demo
    num_steps = {}
    for num_draft_tokens in (0, 7):
        engine = make_engine(model, tokenizer, num_draft_tokens=num_draft_tokens)
        engine.add_request("a", FACTS, greedy(80, ignore_eos=True))
        run(engine)
        num_steps[num_draft_tokens] = engine.scheduler.num_steps
    assert num_steps[7] < num_steps[0] / 2 == 40


def test_what_a_grammar_forces_is_drafted_without_a_look_up(
    demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    """All rows of a step are sampled at once, each behind the mask after the drafts before it."""
    sample, calls = steps.sample, Counter[str]()

    def counting(*args: Any) -> Any:
        calls["sample"] += 1
        return sample(*args)

    monkeypatch.setattr(steps, "sample", counting)
    names = ["is_a_tiger", "has_a_guitar", "likes_rain"]
    properties = {name: {"type": "boolean"} for name in names}
    schema = {"properties": properties, "required": names, "additionalProperties": False}
    wanted = StructuredOutputsParams(json={"type": "object", **schema})
    for params in (greedy(60), sampled(1, 60, n=2)):
        params = params.clone(structured_outputs=wanted)
        plain = make_engine(*demo, run_ahead=False)
        drafting = make_engine(*demo, run_ahead=False, num_draft_tokens=7)
        outputs = [answer(engine, "Once upon a time", params) for engine in (plain, drafting)]
        assert calls.pop("sample") == plain.scheduler.num_steps + drafting.scheduler.num_steps
        assert_same(outputs[1], outputs[0])
        assert drafting.scheduler.num_steps < plain.scheduler.num_steps / 2
        stats = drafting.stats().spec_decoding
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 20


def test_the_look_up_proposes_nothing_that_a_grammar_forbids(demo: tuple[Any, Any]):
    """The prompt repeats words that the answer may not have, after one that it has."""
    tokens = demo[1].encode("the code of apple is 4821. " * 6)
    wanted = StructuredOutputsParams(regex="the code of [a-z]{3,9} is [a-z]{20,30}")
    params = greedy(12, structured_outputs=wanted)
    plain, drafting = make_engine(*demo), make_engine(*demo, num_draft_tokens=7)
    drafting.scheduler.speculation = EagerSpeculation(PromptLookup(), 7)
    proposed: list[list[int]] = []
    launch = drafting.runner.launch

    def noting(batch: Any, awaited: Any) -> mx.array:
        proposed.extend(
            [*part.completion.output_token_ids, *part.draft_token_ids] for part in batch.drafted
        )
        return launch(batch, awaited)

    drafting.runner.launch = noting  # type: ignore[method-assign]
    assert_same(answer(drafting, tokens, params), answer(plain, tokens, params))
    texts = [demo[1].decode(each) for each in proposed]
    assert texts and not any(re.search("[0-9]", each) for each in texts)


def test_nothing_is_drafted_where_steps_are_launched_ahead_and_nothing_repeats(model: qwen3.Model):
    engine = make_engine(model, num_draft_tokens=3, run_ahead=True)
    engine.add_request("a", prompt(20), sampled(1, 40))
    num_ahead = 0
    while engine.has_unfinished_requests():
        engine.step()
        num_ahead += bool(engine.steps.in_flight)
    assert num_ahead == 39 and engine.stats().spec_decoding.num_draft_tokens == 0


# What a drafted step leaves


def drafting_engine(model: qwen3.Model, **options: Any) -> Engine:
    """An engine that knows the answers, and always tries seven drafts."""
    engine = make_engine(model, **options)

    class Always(EagerSpeculation):
        def num_drafts(self, requests: Any, *_: Any) -> list[int]:
            return [self.num_draft_tokens] * len(requests)

    class Right(Drafter):
        def __init__(self) -> None:
            self.oracle = Oracle(model)
            self.counts: list[tuple[int, int]] = []

        def propose(self, request: Any, num_drafts: int) -> list[int]:
            begin = request.num_output_tokens
            right = list(self.oracle(request))[begin : begin + num_drafts]
            return right + [0] * (num_drafts - len(right))

        def note(self, request: Any, num_drafts: int, num_accepted: int) -> None:
            self.counts.append((num_drafts, num_accepted))

    engine.scheduler.speculation = Always(Right())
    return engine


def counts_of(engine: Engine) -> list[tuple[int, int]]:
    """Drafts made and accepted, by step."""
    return engine.scheduler.speculation.drafter.counts  # type: ignore[attr-defined]


def test_drafts_end_where_the_answer_ends(model: qwen3.Model):
    engine = drafting_engine(model)
    output = answer(engine, prompt(20), greedy(13)).outputs[0]
    assert output.token_ids == ask_alone(model, prompt(20), greedy(13))
    # The prompt gives one token, 7 drafts 8, and the last 4 of 13 need 3 drafts.
    assert counts_of(engine) == [(7, 7), (3, 3)]
    assert output.spec_decoding == SpecDecodingStats((2, 2, 2, 1, 1, 1, 1), (2, 2, 2, 1, 1, 1, 1))


def test_drafts_end_where_the_context_ends(model: qwen3.Model):
    engine = drafting_engine(model, max_model_len=26)
    assert len(answer(engine, prompt(20), greedy(100)).outputs[0].token_ids) == 6
    assert counts_of(engine) == [(4, 4)]


def test_a_token_that_ends_the_answer_drops_the_drafts_behind_it(model: qwen3.Model):
    tokens = ask_alone(model, prompt(20), greedy(20))
    engine = drafting_engine(model)
    output = answer(engine, prompt(20), greedy(20, stop_token_ids=[tokens[4]])).outputs[0]
    end = tokens.index(tokens[4]) + 1
    assert (output.token_ids, output.finish_reason) == (tokens[:end], "stop")
    # They were not verified, so they count neither in the figures nor in the acceptance.
    assert counts_of(engine) == [(end - 1, end - 1)]
    assert output.spec_decoding == SpecDecodingStats.of_step(end - 1, end - 1)


def test_drafts_leave_a_step_its_budget(model: qwen3.Model):
    engine = drafting_engine(
        model, max_num_seqs=2, max_num_batched_tokens=16, max_num_mixed_tokens=16
    )
    engine.add_request("a", prompt(10), greedy(30))
    engine.add_request("b", prompt(60), greedy(5))
    num_tokens: list[int] = []
    launch = engine.runner.launch
    engine.runner.launch = lambda batch, awaited: (
        num_tokens.append(batch.num_tokens),
        launch(batch, awaited),
    )[1]
    run(engine)
    # The last chunk of the prompt of "b" leaves room for 6 drafts, those before for none.
    assert max(num_tokens) == 16 and counts_of(engine)
    assert num_tokens[:5] == [16] * 5 and counts_of(engine)[0][0] == 6


def test_drafts_take_no_block_that_holds_a_cached_prefix(model: qwen3.Model):
    engine = drafting_engine(model, kv_cache_bytes="6blocks", watermark=0)
    engine.add_request("old", prompt(64), greedy(1))
    run(engine)
    cached = engine.cached_block_ids(prompt(64))
    assert len(cached) == 4
    # Two blocks are left. With the prompt and the next token, two slots of theirs are.
    engine.add_request("new", prompt(29, seed=5), greedy(20))
    while not counts_of(engine):
        engine.step()
    assert engine.cached_block_ids(prompt(64)) == cached and engine.stats().num_evictions == 0
    assert counts_of(engine) == [(2, 2)]


def test_rejected_drafts_give_their_blocks_back(model: qwen3.Model):
    engine = make_engine(model, block_size=8)
    engine.scheduler.speculation = EagerSpeculation(eager_speculation(VOCAB_SIZE).drafter)
    engine.add_request("a", prompt(20), greedy(40))
    while engine.has_unfinished_requests():
        engine.step()
        stats = engine.stats()
        # As many as the tokens need that have K/V.
        assert stats.num_used_blocks == -(-stats.num_tokens // 8)
    assert engine.stats().spec_decoding.num_draft_tokens > 20


def test_blocks_that_drafts_filled_are_found_by_the_next_turn(model: qwen3.Model):
    hits, tokens = {}, {}
    for name, make in (("plain", make_engine), ("drafting", drafting_engine)):
        engine = make(model, block_size=8)
        tokens[name] = answer(engine, prompt(20), greedy(30)).outputs[0].token_ids
        output = answer(engine, [*prompt(20), *tokens[name], 1, 2], greedy(5))
        hits[name] = output.num_cached_tokens
        expected = ask_alone(model, [*prompt(20), *tokens[name], 1, 2], greedy(5))
        assert output.outputs[0].token_ids == expected
    assert hits["drafting"] == hits["plain"] == 48 and tokens["drafting"] == tokens["plain"]


def test_a_block_is_cached_only_with_tokens_that_were_verified(model: qwen3.Model):
    engine = make_engine(model, block_size=8)
    engine.scheduler.speculation = eager_speculation(VOCAB_SIZE, Oracle(model))
    engine.add_request("a", prompt(20), greedy(50))
    answer = ask_alone(model, prompt(20), greedy(50))
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        num_tokens = 20 + len(output.outputs[0].token_ids)
        # All of its full blocks are found, and nothing else is in the index.
        assert engine.stats().num_cached_blocks == (num_tokens - 1) // 8
        assert len(engine.cached_block_ids([*prompt(20), *answer])) == (num_tokens - 1) // 8


def test_settings_that_read_the_tokens_before_are_drawn_one_by_one(model: qwen3.Model):
    seen: list[int] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.size)
        logits[:, tokens[-1]] = -mx.inf
        return logits

    calls: list[int] = []

    def sampler(logprobs: mx.array) -> mx.array:
        # With a state of its own: it has to be asked as often as there are tokens.
        calls.append(len(calls))
        return mx.argsort(logprobs, axis=-1)[:, -1 - len(calls) % 3]

    for params in (
        greedy(20, logits_processors=[processor]),
        greedy(20, sampler=sampler),
        sampled(4, 20, frequency_penalty=0.8),
    ):
        plain = make_engine(model)
        plain.add_request("a", prompt(20), params)
        expected = run(plain)["a"]
        seen.clear(), calls.clear()
        engine = make_engine(model)
        answers = {("a", 0): expected.outputs[0].token_ids}
        engine.scheduler.speculation = eager_speculation(VOCAB_SIZE, knows(answers))
        engine.add_request("a", prompt(20), params)
        assert_same(run(engine)["a"], expected)
        assert engine.stats().spec_decoding.num_accepted_tokens > 5
        assert seen in ([], list(range(20, 40))) and len(calls) in (0, 20)


# Failures


@pytest.mark.parametrize("params", [greedy(20), greedy(20, frequency_penalty=0.1)], ids=repr)
def test_a_step_that_fails_with_drafts_is_run_again_without(
    model: qwen3.Model, params: SamplingParams
):
    engine = drafting_engine(model)
    launch = engine.runner.launch

    def failing(batch: Any, awaited: Any) -> Any:
        if batch.drafted:
            raise ValueError("no drafts here")
        return launch(batch, awaited)

    engine.runner.launch = failing  # type: ignore[method-assign]
    engine.add_request("a", prompt(20), params)
    engine.add_request("b", prompt(30), params)
    outputs = run(engine)
    for name, size in (("a", 20), ("b", 30)):
        assert outputs[name].outputs[0].token_ids == ask_alone(model, prompt(size), params)
    assert engine.stats().spec_decoding.num_accepted_tokens == 0


def test_a_draw_that_fails_in_the_middle_of_a_verification_keeps_the_tokens_before(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch
):
    from mlx_paged.engine import steps as steps_module

    sample, num_failed = steps_module.sample, iter(range(100))

    def failing(logits: Any, rows: Any, requests: Any, num_before: Any = None, *more: Any) -> Any:
        if num_before is None and next(num_failed) % 4 == 2:
            raise RuntimeError("the device gave up")
        return sample(logits, rows, requests, num_before, *more)

    monkeypatch.setattr(steps_module, "sample", failing)
    params = greedy(25, frequency_penalty=0.1)
    engine = drafting_engine(model)
    engine.add_request("a", prompt(20), params)
    engine.add_request("several", prompt(9), sampled(3, 12, n=3))
    outputs = run(engine)
    assert next(num_failed) > 8
    monkeypatch.setattr(steps_module, "sample", sample)
    assert outputs["a"].outputs[0].token_ids == ask_alone(model, prompt(20), params)
    plain = make_engine(model)
    plain.add_request("several", prompt(9), sampled(3, 12, n=3))
    assert_same(outputs["several"], run(plain)["several"])


# Arguments


@pytest.mark.parametrize("value", [-1, 8, 1.5, "3", True])
def test_a_number_of_drafts_that_can_not_be_is_refused_by_name(model: qwen3.Model, value: Any):
    with pytest.raises(ValueError, match="num_draft_tokens"):
        make_engine(model, num_draft_tokens=value)


def test_numbers_of_any_integer_type_are_taken(model: qwen3.Model):
    engine = make_engine(model, num_draft_tokens=np.int64(3))
    assert engine.scheduler.speculation.num_draft_tokens == 3
    assert not make_engine(model).scheduler.speculation.is_on
