"""Several completions, ends of every kind, text in whole characters, log-probabilities: what a
request can ask for.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers.engine_runs import (
    answer,
    ask_alone,
    complete,
    greedy,
    make_engine,
    make_engine_without_drafts,
    prompt,
    run,
    sampled,
)
from helpers.fast_lane import in_one_way, mostly_slow

from mlx_paged.engine import steps as steps_module
from mlx_paged.engine.request import Completion
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("run_ahead")


# Several completions


def completion_alone(
    model: qwen3.Model, tokens: list[int], params: SamplingParams, index: int
) -> list[int]:
    """What a request of one completion gets with the draws of this index."""
    engine = make_engine(model, enable_prefix_caching=False)
    sample = steps_module.sample

    def sample_with_index(logits: Any, rows: Any, completions: list[Completion], *args: Any) -> Any:
        for completion in completions:
            completion.index = index
        results = sample(logits, rows, completions, *args)
        for completion in completions:
            completion.index = 0
        return results

    one = SamplingParams(
        temperature=params.temperature, seed=params.seed, max_tokens=params.max_tokens
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_module, "sample", sample_with_index)
        return complete(engine, tokens, one).token_ids


@mostly_slow("num_tokens", [1, 16, 40], quick=(1,))
def test_each_of_n_completions_is_that_of_a_request_of_its_own(model: qwen3.Model, num_tokens: int):
    engine = make_engine(model, max_num_batched_tokens=16, max_num_seqs=6)
    params = sampled(seed=11, max_tokens=25, n=4)
    engine.add_request("four", prompt(num_tokens), params)
    engine.add_request("other", prompt(20), greedy(10))
    output = run(engine)["four"]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    answers = [completion.token_ids for completion in output.outputs]
    assert answers == [
        completion_alone(model, prompt(num_tokens), params, index) for index in range(4)
    ]
    assert len(set(map(tuple, answers))) == 4


@in_one_way
def test_completions_share_the_blocks_of_their_prompt(model: qwen3.Model):
    engine = make_engine_without_drafts(model, run_ahead=False)
    engine.add_request("a", prompt(40), sampled(seed=1, max_tokens=10, n=4))
    engine.step()
    stats = engine.stats()
    # 40 tokens are 3 blocks, the last one half full, which nobody has written into yet.
    assert (stats.num_requests, stats.num_tokens, stats.num_used_blocks) == (4, 160, 3)
    engine.step()
    # Now each has the last block to itself.
    assert (engine.stats().num_used_blocks, engine.stats().num_tokens) == (2 + 4, 164)
    run(engine)


def test_greedy_completions_are_all_alike_and_the_prompt_is_computed_once(
    model: qwen3.Model, is_drafting: bool
):
    engine = make_engine(model, enable_prefix_caching=False)
    num_computed = []
    launch = engine.runner.launch

    def counting_launch(batch, *args):
        num_computed.append(batch.num_tokens)
        return launch(batch, *args)

    engine.runner.launch = counting_launch
    output = answer(engine, prompt(40), greedy(5, n=3))
    assert [completion.token_ids for completion in output.outputs] == [
        ask_alone(model, prompt(40), greedy(5))
    ] * 3
    assert is_drafting or num_computed == [40, 3, 3, 3, 3]


def test_an_abort_ends_all_completions_before_and_after_they_fork(model: qwen3.Model):
    for num_steps in (0, 1, 4):
        engine = make_engine(model, max_num_batched_tokens=64)
        engine.add_request("a", prompt(100), greedy(20, n=3))
        for _ in range(num_steps):
            engine.step()
        engine.abort("a")
        output = run(engine)["a"]
        assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 3


# Ends


def test_stop_tokens_end_a_completion_and_are_named(model: qwen3.Model):
    expected = ask_alone(model, prompt(17), greedy(40))
    first_seen = {token: place for place, token in reversed(list(enumerate(expected)))}
    stops = [token for token, place in first_seen.items() if place in (9, 12)] or [expected[9]]
    end = min(first_seen[token] for token in stops)
    completion = complete(
        make_engine(model), prompt(17), greedy(40, stop_token_ids=[*stops, 60, [60, 59]])
    )
    assert completion.token_ids == expected[: end + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", expected[end])


def test_the_end_of_sequence_ends_a_completion_unless_it_is_ignored(demo: tuple[Any, Any]):
    model, tokenizer = demo
    engine = make_engine(model, tokenizer)
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True
    )
    ended = complete(engine, tokens, greedy(200))
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert ended.token_ids[-1] in tokenizer.eos_token_ids
    # The token that ended it has no text.
    assert ended.text == tokenizer.decode(ended.token_ids[:-1])
    goes_on = complete(engine, tokens, greedy(len(ended.token_ids) + 5, ignore_eos=True))
    assert (
        goes_on.token_ids[: len(ended.token_ids)] == ended.token_ids
        and goes_on.finish_reason == "length"
    )


def test_of_several_ends_the_first_one_counts(demo: tuple[Any, Any]):
    model, tokenizer = demo
    engine = make_engine(model, tokenizer)
    ask = "Hello, who are you?"
    full = complete(engine, ask, greedy(30, ignore_eos=True))
    text, third = full.text, full.token_ids[2]
    assert len(text) > 20
    # Some texts that it has once: one begins before the other.
    early, late = [
        text[place : place + 4]
        for place in range(8, len(text) - 4)
        if text.count(text[place : place + 4]) == 1
    ][:8:7]
    for options, reason, stop_reason in (
        ({"stop": [late, early]}, "stop", early),
        ({"stop": late, "max_tokens": 1}, "length", None),
        ({"stop": late, "stop_token_ids": [third]}, "stop", third),
        ({"stop": "never to be seen", "max_tokens": 4}, "length", None),
    ):
        params = greedy(**({"max_tokens": 30, "ignore_eos": True} | options))
        completion = complete(engine, ask, params)
        assert (completion.finish_reason, completion.stop_reason) == (reason, stop_reason), options
        if isinstance(stop_reason, str):
            assert completion.text == text[: text.find(early)]
        else:
            assert text.startswith(completion.text)


def test_a_stop_text_that_the_last_token_completes_counts_as_a_stop(demo: tuple[Any, Any]):
    model, tokenizer = demo
    engine = make_engine(model, tokenizer)
    full = complete(engine, "Hello, who are you?", greedy(10, ignore_eos=True))
    # So much of its end that it has only there.
    stop = next(full.text[-n:] for n in range(1, 40) if full.text.count(full.text[-n:]) == 1)
    completion = complete(engine, "Hello, who are you?", greedy(10, ignore_eos=True, stop=stop))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == full.text[: -len(stop)]


def test_text_that_was_held_back_for_a_stop_text_comes_with_the_end(demo: tuple[Any, Any]):
    model, tokenizer = demo
    engine = make_engine(model, tokenizer)
    full = complete(engine, "Hello, who are you?", greedy(10, ignore_eos=True))
    # It ends as a stop text begins.
    params = greedy(10, ignore_eos=True, stop=full.text[-5:] + " and no more")
    engine.add_request("it", "Hello, who are you?", params)
    texts = []
    while engine.has_unfinished_requests():
        texts += [output.outputs[0].text for output in engine.step()]
    assert texts[-1] == full.text and len(texts[-2]) <= len(full.text) - 5
    engine.add_request("aborted", "Hello, who are you?", params)
    for _ in range(9):
        engine.step()
    engine.abort("aborted")
    before_abort = complete(
        make_engine(model, tokenizer), "Hello, who are you?", greedy(9, ignore_eos=True)
    ).text
    assert run(engine)["aborted"].outputs[0].text == before_abort


def test_no_limit_goes_on_until_the_budget_is_used_up(model: qwen3.Model):
    engine = make_engine(model, kv_cache_bytes="5blocks")
    completion = complete(engine, prompt(20), greedy(-1))
    # 80 slots hold the prompt and 60 tokens; the 61st is sampled and needs no K/V.
    assert completion.finish_reason == "length" and len(completion.token_ids) == 61
    assert completion.token_ids == ask_alone(model, prompt(20), greedy(61))


# Text


def test_characters_of_several_bytes_come_whole_or_not_at_all(demo: tuple[Any, Any]):
    model, tokenizer = demo
    wanted = "Grüße aus 東京 🙂🙂 naïve é"
    wanted_ids = tokenizer.encode(wanted, add_special_tokens=False)
    start = len(tokenizer.encode("Say"))
    assert len(wanted_ids) > len(wanted), "characters are cut into bytes here"

    def dictate(tokens: Any, logits: Any) -> Any:
        logits[:, wanted_ids[tokens.size - start]] = 1e6
        return logits

    engine = make_engine(model, tokenizer)
    engine.add_request(
        "a", "Say", greedy(len(wanted_ids), logits_processors=[dictate], ignore_eos=True)
    )
    texts = []
    while engine.has_unfinished_requests():
        texts += [output.outputs[0].text for output in engine.step()]
    assert len(texts) == len(wanted_ids)
    decoded = tokenizer.decode(wanted_ids)
    assert texts[-1] == decoded and wanted.strip() in decoded
    for text, longer in itertools.pairwise(texts):
        assert longer.startswith(text) and "\ufffd" not in text


# Log-probabilities


def test_logprobs_are_given_for_each_token_with_its_rank(demo: tuple[Any, Any]):
    model, tokenizer = demo
    completion = complete(
        make_engine(model, tokenizer),
        "Once upon a time",
        sampled(3, 12, logprobs=3, ignore_eos=True),
    )
    assert len(completion.logprobs) == len(completion.token_ids) == 12
    total = 0.0
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert 3 <= len(entries) <= 4 and token in entries
        assert [entry.rank for entry in entries.values()][:3] == [1, 2, 3]
        assert all(entry.decoded_token == tokenizer.decode([id]) for id, entry in entries.items())
        total += entries[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    assert complete(make_engine(model, tokenizer), "Hello", greedy(2)).logprobs is None
