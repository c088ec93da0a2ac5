"""When an answer ends, and what of it stands in its text: sequences of stop tokens, minimum
lengths, stop texts that are kept, special tokens, answers without text.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import ask_alone, complete, greedy, make_engine, prompt, run, sampled
from helpers.fast_lane import in_one_way
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged import LLM
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.input_processor import read_token_rules
from mlx_paged.errors import ArgumentError
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("run_ahead")
ASK = "Hello, who are you?"


def decoded(demo: tuple[Any, TokenizerWrapper], tokens: list[int]) -> str:
    text: str = demo[1].decode(tokens, skip_special_tokens=True)
    return text


def texts_of(engine: Engine, tokens: Any, params: SamplingParams) -> list[str]:
    """The text after each step."""
    engine.add_request("it", tokens, params)
    texts = []
    while engine.has_unfinished_requests():
        texts += [output.outputs[0].text for output in engine.step()]
    return texts


# Stop sequences


def test_a_stop_sequence_ends_an_answer_at_its_last_token_and_has_no_text(demo: tuple[Any, Any]):
    engine = make_engine(*demo)
    full = complete(engine, ASK, greedy(30, ignore_eos=True))
    sequence = full.token_ids[10:13]
    first = next(n for n in range(28) if full.token_ids[n : n + 3] == sequence)
    never = [sequence[0], sequence[0], sequence[0]]
    params = greedy(30, ignore_eos=True, stop_token_ids=[never, sequence])
    texts = texts_of(engine, ASK, params)
    ended = complete(engine, ASK, params)
    assert ended.token_ids == full.token_ids[: first + 3]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", tuple(sequence))
    assert ended.text == decoded(demo, full.token_ids[:first]) == texts[-1]
    assert all(ended.text.startswith(text) for text in texts)
    kept = complete(engine, ASK, params.clone(include_stop_str_in_output=True))
    assert kept.text == decoded(demo, full.token_ids[: first + 3])
    assert (kept.token_ids, kept.stop_reason) == (ended.token_ids, ended.stop_reason)


def test_a_sequence_that_begins_in_the_prompt_does_not_count(model: qwen3.Model):
    expected = ask_alone(model, prompt(30), greedy(5))
    across = [prompt(30)[-1], expected[0]]
    params = greedy(5, stop_token_ids=[across])
    ended = complete(make_engine(model), prompt(30), params)
    assert (ended.token_ids, ended.finish_reason) == (expected, "length")


def test_the_longest_of_the_sequences_that_end_together_is_named(model: qwen3.Model):
    expected = ask_alone(model, prompt(30), greedy(12))
    stops = [expected[6:9], expected[5:9], [expected[8], 60, 60]]
    ended = complete(make_engine(model), prompt(30), greedy(12, stop_token_ids=stops))
    assert ended.stop_reason == tuple(expected[5:9]) and len(ended.token_ids) == 9


def test_an_end_by_length_shows_what_was_held_back_for_a_sequence(demo: tuple[Any, Any]):
    engine = make_engine(*demo)
    full = complete(engine, ASK, greedy(12, ignore_eos=True))
    unfinished = [*full.token_ids[-2:], 5, 5]
    params = greedy(12, ignore_eos=True, stop_token_ids=[unfinished])
    texts = texts_of(engine, ASK, params)
    assert texts[-1] == full.text and len(texts[-2]) < len(full.text)


# min_tokens


def test_stop_tokens_are_not_drawn_before_min_tokens(model: qwen3.Model):
    plain = ask_alone(model, prompt(17), greedy(12))
    for stop, params in ((plain[3], {}), (plain[2:4], {}), (plain[3], {"temperature": 1e-6})):
        ended = complete(
            make_engine(model),
            prompt(17),
            greedy(40, stop_token_ids=[stop], min_tokens=8, **params),
        )
        early = ended.token_ids[:8]
        assert len(ended.token_ids) >= 8 and early[:3] == plain[:3] and early[3] != plain[3]
        if isinstance(stop, int):
            assert stop not in early
        else:
            assert all(early[place : place + 2] != stop for place in range(7))


def test_the_end_of_sequence_is_not_drawn_before_min_tokens(demo: tuple[Any, Any]):
    tokenizer = demo[1]
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True
    )
    engine = make_engine(*demo)
    short = complete(engine, tokens, greedy(200))
    assert short.finish_reason == "stop"
    length = len(short.token_ids)
    longer = complete(engine, tokens, greedy(200, min_tokens=length + 3))
    assert len(longer.token_ids) >= length + 3
    assert longer.token_ids[: length - 1] == short.token_ids[:-1]
    assert not tokenizer.eos_token_ids & set(longer.token_ids[: length + 3])
    # vLLM masks it where it would not end the answer, too.
    ignored = complete(engine, tokens, greedy(length + 2, min_tokens=length + 2, ignore_eos=True))
    assert not tokenizer.eos_token_ids & set(ignored.token_ids)
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", length + 2)


def test_a_stop_token_that_a_sampler_forces_before_min_tokens_does_not_end_it(model: qwen3.Model):
    def takes_seven(logprobs: mx.array) -> mx.array:
        return mx.array([7])

    ended = complete(
        make_engine(model),
        prompt(9),
        greedy(20, sampler=takes_seven, stop_token_ids=[7], min_tokens=6),
    )
    assert (ended.token_ids, ended.finish_reason) == ([7] * 7, "stop")


def test_a_stop_text_within_min_tokens_does_not_count(demo: tuple[Any, Any]):
    engine = make_engine(*demo)
    params = greedy(30, ignore_eos=True, min_tokens=12)
    full = complete(engine, ASK, params).text
    num_ignored = len(complete(engine, ASK, params.clone(max_tokens=12)).text)
    for length in (1, 2, 3, 6):
        # One that ends with the first tokens, and the one that ends a character later.
        for end in (num_ignored - 1, num_ignored, num_ignored + 1):
            stop = full[end - length : end]
            begin = full.find(stop, num_ignored - length + 1)
            ended = complete(engine, ASK, params.clone(stop=stop))
            assert ended.text == (full if begin < 0 else full[:begin])
            assert ended.stop_reason == (None if begin < 0 else stop)


# What is shown


def test_a_stop_text_may_be_kept(demo: tuple[Any, Any]):
    engine = make_engine(*demo)
    full = complete(engine, ASK, greedy(30, ignore_eos=True))
    stop = full.text[8:12]
    params = greedy(30, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    ended = complete(engine, ASK, params)
    assert ended.text == full.text[: full.text.find(stop) + len(stop)]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)


def test_a_stop_token_may_be_kept(demo: tuple[Any, Any]):
    engine = make_engine(*demo)
    full = complete(engine, ASK, greedy(30, ignore_eos=True))
    stop = full.token_ids[9]
    length = full.token_ids.index(stop) + 1
    params = greedy(30, ignore_eos=True, stop_token_ids=[stop])
    assert complete(engine, ASK, params).text == decoded(demo, full.token_ids[: length - 1])
    kept = complete(engine, ASK, params.clone(include_stop_str_in_output=True))
    assert kept.text == decoded(demo, full.token_ids[:length])


def dictated(tokens: list[int], num_prompt_tokens: int) -> Any:
    def dictate(so_far: mx.array, logits: mx.array) -> mx.array:
        logits[:, tokens[so_far.size - num_prompt_tokens]] = 1e6
        return logits

    return dictate


def test_special_tokens_are_skipped_or_shown_and_end_the_text_where_they_are_a_stop(
    demo: tuple[Any, Any],
):
    model, tokenizer = demo
    (begin,) = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    wanted = [*tokenizer.encode("one two", add_special_tokens=False), begin]
    wanted += tokenizer.encode("three", add_special_tokens=False)
    start = tokenizer.encode(ASK)
    params = greedy(len(wanted), logits_processors=[dictated(wanted, len(start))])
    engine = make_engine(model, tokenizer)
    hidden = complete(engine, start, params)
    assert hidden.text == tokenizer.decode(wanted, skip_special_tokens=True)
    shown = complete(engine, start, params.clone(skip_special_tokens=False))
    assert shown.text == tokenizer.decode(wanted) and "<|im_start|>" in shown.text
    assert hidden.token_ids == shown.token_ids == wanted
    for skips, includes, text in (
        (True, False, "one two"),
        (True, True, "one two"),
        (False, False, "one two"),
        (False, True, "one two<|im_start|>"),
    ):
        ended = complete(
            engine,
            start,
            params.clone(
                stop="<|im_start|>", skip_special_tokens=skips, include_stop_str_in_output=includes
            ),
        )
        assert (ended.text, ended.stop_reason) == (text, "<|im_start|>")
        assert ended.token_ids[-1] == begin


def test_an_answer_without_text_is_never_decoded(
    demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine(*demo)
    tokens = demo[1].encode(ASK)
    expected = complete(engine, tokens, greedy(12))

    def fails(*_: Any) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr(TokenizerWrapper, "detokenizer", property(fails))
    got = complete(engine, tokens, greedy(12, detokenize=False, n=1))
    assert (got.text, got.token_ids) == ("", expected.token_ids)
    assert got.finish_reason == expected.finish_reason


# Bad words


def test_bad_words_are_never_said_with_or_without_a_space(demo: tuple[Any, Any]):
    engine = make_engine(*demo)
    full = complete(engine, ASK, greedy(40, ignore_eos=True))
    words = [word.strip(".,!?") for word in full.text.split()]
    word = max(words, key=len)
    assert len(word) > 3
    for params in (greedy(40, ignore_eos=True), sampled(3, 40, ignore_eos=True)):
        for bad_words in ([word], word, [" " + word, "never"]):
            got = complete(engine, ASK, params.clone(bad_words=bad_words))
            tokens = tuple(got.token_ids)
            for form in (word, " " + word):
                banned = tuple(demo[1].encode(form, add_special_tokens=False))
                places = range(len(tokens) - len(banned) + 1)
                assert all(tokens[n : n + len(banned)] != banned for n in places)
    assert complete(engine, ASK, greedy(40, ignore_eos=True, bad_words=word)).text != full.text


@in_one_way
def test_blanks_before_a_bad_word_change_nothing(demo: tuple[Any, Any]):
    tokenizer = demo[1]

    def banned(word: str) -> tuple[tuple[int, ...], ...]:
        params = SamplingParams(bad_words=[word])
        return read_token_rules(params, tokenizer, len(tokenizer)).bad_words

    forms = [tuple(tokenizer.encode(form, add_special_tokens=False)) for form in ("lo", " lo")]
    assert len(set(forms)) == 2
    for blanks in ("", " ", "  ", "\n", "\t ", "\u3000"):
        assert banned(f"{blanks}lo") == tuple(forms), repr(blanks)
    # Behind the word and in it, they belong to it.
    assert banned("lo ") != tuple(forms) != banned("l o")


def test_allowed_token_ids_are_all_that_is_said(model: qwen3.Model):
    allowed = [3, 9, 33, 40]
    for params in (greedy(20), sampled(5, 20, n=3)):
        engine = make_engine(model)
        engine.add_request("a", prompt(20), params.clone(allowed_token_ids=allowed))
        engine.add_request("b", prompt(20), greedy(20))
        outputs = run(engine)
        for completion in outputs["a"].outputs:
            assert set(completion.token_ids) <= set(allowed) and len(completion.token_ids) == 20
        assert outputs["b"].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(20))


# Arguments


@in_one_way
@pytest.mark.parametrize(
    ("params", "argument", "message"),
    [
        ({"allowed_token_ids": [3, 61]}, "allowed_token_ids", "has token id 61, the vocabulary"),
        ({"stop_token_ids": [61]}, "stop_token_ids", "has token id 61, the vocabulary ends at 60"),
        ({"stop_token_ids": [[1, 61]]}, "stop_token_ids", "has token id 61"),
        ({"xtc_special_tokens": [61]}, "xtc_special_tokens", "has token id 61"),
        ({"logit_bias": {61: 1.0}}, "logit_bias", "has token id 61"),
        ({"bad_words": "word"}, "bad_words", "need a tokenizer; use logit_bias"),
        ({"stop": "word"}, "stop", "texts need a tokenizer; use stop_token_ids"),
    ],
    ids=str,
)
def test_what_the_model_or_the_tokenizer_does_not_have_is_refused_by_name(
    model: qwen3.Model, params: dict[str, Any], argument: str, message: str
):
    engine = make_engine(model)
    with pytest.raises(ArgumentError, match=message) as caught:
        engine.add_request("a", prompt(5), SamplingParams(**params))
    assert caught.value.argument == argument and str(caught.value).startswith("[engine] ")
    assert not engine.has_unfinished_requests()


@in_one_way
def test_a_bad_word_without_tokens_or_that_can_not_be_encoded_is_refused(demo: tuple[Any, Any]):
    engine = make_engine(*demo)
    for word, message in (
        (" \n ", r"bad_words has ' \\n ', for which the tokenizer has no tokens"),
        ("\ud800", r"bad_words has '\\ud800', which the tokenizer can't encode"),
    ):
        with pytest.raises(ArgumentError, match=message):
            engine.add_request("a", "Hello", greedy(3, bad_words=["fine", word]))
    assert not engine.has_unfinished_requests()


def test_no_limit_by_none_is_no_limit_by_minus_one(model: qwen3.Model):
    answers = [
        complete(make_engine(model, kv_cache_bytes="4blocks"), prompt(20), greedy(limit)).token_ids
        for limit in (None, -1)
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 45


def test_a_top_k_of_minus_one_keeps_all(model: qwen3.Model):
    answers = [
        complete(make_engine(model), prompt(20), sampled(4, 20, top_k=top_k)).token_ids
        for top_k in (-1, 0)
    ]
    assert answers[0] == answers[1]


@in_one_way
def test_an_llm_hands_out_its_tokenizer(demo: tuple[Any, Any], model: qwen3.Model):
    assert LLM(*demo, kv_cache_bytes="20blocks").get_tokenizer() is demo[1]
    with pytest.raises(ValueError, match="there is no tokenizer; give one to LLM"):
        LLM(model, kv_cache_bytes="20blocks").get_tokenizer()
