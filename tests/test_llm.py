"""LLM.generate: many prompts in, their completions out, in order; and what fails, fails alone."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.engine_runs import ask_alone, assert_nothing_held, greedy, load_demo, prompt, sampled
from mlx_lm import generate as mlx_lm_generate
from mlx_lm.utils import load_model

from mlx_paged import StructuredOutputsParams, demo_model_path
from mlx_paged.cache import PromptTooLongError
from mlx_paged.errors import ArgumentError, EngineStoppedError
from mlx_paged.llm import LLM
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return load_demo()


def llm_of(model: Any, tokenizer: Any = None, **options: Any) -> LLM:
    return LLM(model, tokenizer, **{"kv_cache_bytes": "200blocks", **options})


def test_answers_come_in_the_order_of_the_prompts_each_with_its_own_parameters(model: qwen3.Model):
    prompts = [prompt(n) for n in (40, 3, 100, 17, 1)]
    params = [greedy(3), sampled(1, 40), greedy(20), sampled(2, 1), greedy(33)]
    llm = llm_of(model, max_num_seqs=3, max_num_batched_tokens=32)
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for output, tokens, each in zip(outputs, prompts, params, strict=True):
        assert output.outputs[0].token_ids == ask_alone(model, tokens, each)
        assert output.finished and output.error is None
    assert_nothing_held(llm.engine)


def test_texts_are_those_of_mlx_lm(demo: tuple[Any, Any]):
    theirs, _ = load_model(demo_model_path())
    texts = ["Hello, who are you?", "Once upon a time", "1 2 3 4"]
    outputs = llm_of(*demo).generate(texts, greedy(30))
    for text, output in zip(texts, outputs, strict=True):
        assert output.prompt == text
        assert output.outputs[0].text == mlx_lm_generate(theirs, demo[1], text, max_tokens=30)


def test_a_conversation_is_written_by_the_chat_template(demo: tuple[Any, Any]):
    model, tokenizer = demo
    conversation = [{"role": "user", "content": "Hello, who are you?"}]
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
    llm = llm_of(model, tokenizer)
    (one,) = llm.chat(conversation, greedy(20))
    assert one.prompt_token_ids == expected and one.outputs[0].text
    two = llm.chat([conversation, conversation], greedy(20))
    assert [output.outputs[0].token_ids for output in two] == [one.outputs[0].token_ids] * 2


def test_one_prompt_alone_is_a_list_of_one(demo: tuple[Any, Any]):
    llm = llm_of(*demo)
    ids = demo[1].encode("Hello there")
    answers = [
        llm.generate(form, greedy(5))
        for form in ("Hello there", ids, ["Hello there"], [ids], mx.array([ids]))
    ]
    assert [len(answer) for answer in answers] == [1] * 5
    assert {tuple(answer[0].outputs[0].token_ids) for answer in answers} == {
        tuple(answers[0][0].outputs[0].token_ids)
    }
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "num_prompts"),
    [
        ({"prompt": "Hello there"}, 1),
        ([{"prompt": "Hello there"}, "Hello there"], 2),
        (({"prompt_token_ids": "ids"}, "ids", "Hello there"), 3),
        (np.array(["Hello there"] * 2), 2),
        ({"prompt": "Hello there", "prompt_token_ids": "ids"}, 1),
    ],
    ids=str,
)
def test_prompts_of_all_of_vllms_forms_mean_what_they_say(
    demo: tuple[Any, Any], prompts: Any, num_prompts: int
):
    ids = demo[1].encode("Hello there")

    def with_ids(form: Any) -> Any:
        if isinstance(form, dict):
            return {key: with_ids(value) for key, value in form.items()}
        if isinstance(form, (list, tuple)):
            return [with_ids(value) for value in form]
        return ids if isinstance(form, str) and form == "ids" else form

    llm = llm_of(*demo)
    (expected,) = llm.generate("Hello there", greedy(5))
    outputs = llm.generate(with_ids(prompts), greedy(5))
    assert [output.error for output in outputs] == [None] * num_prompts
    assert [output.prompt_token_ids for output in outputs] == [ids] * num_prompts
    assert [output.outputs[0].token_ids for output in outputs] == [
        expected.outputs[0].token_ids
    ] * num_prompts


def test_a_dict_with_text_and_token_ids_answers_the_ids_and_keeps_the_text(model: qwen3.Model):
    (output,) = llm_of(model).generate(
        {"prompt": "as it was", "prompt_token_ids": np.array([1, 2])}, greedy(1)
    )
    assert (output.prompt, output.prompt_token_ids) == ("as it was", [1, 2])
    assert output.outputs[0].token_ids == ask_alone(model, [1, 2], greedy(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"prompts": None},
            "prompts must be a prompt .text, token ids or a dict. or a list of prompts, got "
            "NoneType",
        ),
        ({"prompts": b"text"}, "prompts must be .* got bytes"),
        ({"prompts": {1, 2}}, "prompts must be .* got set"),
        ({"prompts": ([n] for n in (1, 2))}, "prompts must be .* got generator"),
        (
            {"sampling_params": {"max_tokens": 3}},
            "sampling_params must be SamplingParams, .*got {'max_tokens': 3}",
        ),
        ({"sampling_params": "greedy"}, "sampling_params must be .*got 'greedy'"),
        ({"sampling_params": 7}, "sampling_params must be .*got 7"),
        (
            {"sampling_params": [None, {"n": 1}]},
            r"sampling_params\[1\] must be .*got {'n': 1} \(dict\); write",
        ),
        ({"sampling_params": [SamplingParams]}, "1 sampling_params for 2 prompts"),
        ({"sampling_params": SamplingParams}, "sampling_params must be"),
        ({"priority": 3}, "priority must be a list with a whole number for each prompt, got 3"),
        ({"priority": "12"}, "priority must be a list"),
        ({"priority": {1, 2}}, "priority must be a list"),
        ({"priority": ["1", "2"]}, r"priority\[0\] must be a whole number, got '1' \(str\)"),
        ({"priority": [0, None]}, r"priority\[1\] must be a whole number, got None"),
        ({"priority": [True, 1]}, r"priority\[0\] must be a whole number, got True"),
        ({"priority": [1, 2.5]}, r"priority\[1\] must be a whole number, got 2.5"),
        ({"no_store": 1}, r"no_store must be True or False, for all or a list with one .*, got 1"),
        ({"no_store": [True, 0]}, r"no_store\[1\] must be True or False, got 0 \(int\)"),
        ({"no_store": [True]}, "1 no_store for 2 prompts"),
        ({"no_store": None}, "no_store must be True or False, got None"),
        ({"priority": True}, "priority must be a whole number, got True"),
        ({"use_tqdm": "yes"}, "use_tqdm must be True, False or None, got 'yes'"),
        ({"use_tqdm": 1}, "use_tqdm must be True, False or None, got 1"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0][
        :50
    ],  # no address: two processes agree on ids
)
def test_a_wrong_argument_of_the_whole_is_refused_before_anything_is_queued(
    model: qwen3.Model, arguments: dict[str, Any], message: str
):
    llm = llm_of(model)
    with pytest.raises(ValueError, match=message) as refusal:
        llm.generate(**({"prompts": [[1], [2]]} | arguments))
    assert "\n" not in str(refusal.value)
    assert not llm.engine.has_unfinished_requests()
    assert_nothing_held(llm.engine)


def test_priorities_of_any_integer_type_and_params_that_are_none_are_taken(model: qwen3.Model):
    llm = llm_of(model)
    outputs = llm.generate([[1], [2]], [None, greedy(3)], priority=np.array([2, 1]))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [256, 3]


def test_no_store_is_said_for_all_prompts_or_for_each(model: qwen3.Model, monkeypatch):
    llm = llm_of(model)
    asked: list[bool] = []
    add_request = llm.engine.add_request

    def noting(*args: Any, no_store: bool, **options: Any) -> None:
        asked.append(no_store)
        add_request(*args, no_store=no_store, **options)

    monkeypatch.setattr(llm.engine, "add_request", noting)
    for no_store in (False, True, [True, False]):
        llm.generate([[1], [2]], greedy(1), no_store=no_store)
    assert asked == [False, False, True, True, True, False]


def test_conversations_that_can_not_be_written_fail_alone(demo: tuple[Any, Any]):
    llm = llm_of(*demo)
    good = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    bad: list[Any] = [
        [],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        {"role": "user", "content": "Hello"},
        [{"role": "user", "content": "half a character: \ud800"}],
        None,
    ]
    outputs = llm.chat([good, *bad, good], greedy(4), raise_on_error=False)
    assert [output.error is None for output in outputs] == [True, *[False] * len(bad), True]
    assert all(
        isinstance(output.error, ValueError) and "\n" not in str(output.error)
        for output in outputs[1:-1]
    )
    assert outputs[0].outputs[0].token_ids == outputs[-1].outputs[0].token_ids
    assert outputs[0].outputs[0].token_ids == llm.chat(good, greedy(4))[0].outputs[0].token_ids
    assert outputs[0].prompt == llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert_nothing_held(llm.engine)


def test_a_template_that_raises_fails_its_own_conversation(
    demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    model, tokenizer = demo
    llm = llm_of(model, tokenizer)
    template = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('not\\nthis') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", template)
    conversations = [[{"role": "user", "content": content}] for content in ("yes", "no", "yes")]
    outputs = llm.chat(conversations, greedy(3), raise_on_error=False)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert "refuses the messages: not this" in str(outputs[1].error)
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"messages": "Hello"},
            "messages must be a list of messages or a list of such lists, got str",
        ),
        (
            {"messages": None},
            "messages must be a list of messages or a list of such lists, got NoneType",
        ),
        ({"messages": {"role": "user", "content": "x"}}, "got one message; write .message."),
        ({"messages": ["Hello"]}, r"messages\[0\] must be a message such as .*, got str"),
        ({"messages": [None]}, r"messages\[0\] must be a message such as .*, got NoneType"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs must be a dict"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs must be a dict"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs.'tokenize'. is not a template variable",
        ),
        (
            {"chat_template_kwargs": {"tokenizer": True}},
            "chat_template_kwargs.'tokenizer'. is not a template variable",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_wrong_arguments_of_a_chat_are_refused(
    demo: tuple[Any, Any], arguments: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message) as refusal:
        llm_of(*demo).chat(**({"messages": [{"role": "user", "content": "x"}]} | arguments))
    assert "\n" not in str(refusal.value)


def test_variables_of_the_template_reach_it(demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch):
    model, tokenizer = demo
    monkeypatch.setattr(
        tokenizer._tokenizer, "chat_template", "{{ word }}{{ add_generation_prompt }}"
    )
    options = {"word": "Hi ", "add_generation_prompt": False}
    (output,) = llm_of(model, tokenizer).chat(
        [{"role": "user", "content": "x"}], greedy(1), chat_template_kwargs=options
    )
    assert output.prompt == "Hi False"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"model": None},
            "model must be a folder, a hub id or a model that is loaded, got NoneType",
        ),
        ({"model": 7}, "model must be a folder, a hub id or a model that is loaded, got int"),
        ({"tokenizer": "some/folder"}, "tokenizer must be a tokenizer, got 'some/folder'"),
        ({"adapter_path": "x"}, "adapter_path is for a model that is loaded here; give it to load"),
    ],
    ids=str,
)
def test_what_is_no_model_or_tokenizer_is_refused(
    model: qwen3.Model, arguments: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        LLM(**({"model": model} | arguments))


def test_structured_outputs_that_this_installation_can_not_have_fail_the_call(
    demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    # Every such request would fail, and an empty text is easily taken for an answer.
    yes_or_no = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    llm, messages = llm_of(*demo), [{"role": "user", "content": "Is it?"}]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for ask in (
        lambda: llm.generate("Is it?", yes_or_no),
        lambda: llm.generate(["Is it?", "Why?"], [yes_or_no, None]),
        lambda: llm.chat(messages, yes_or_no),
    ):
        with pytest.raises(ValueError, match=re.escape("pip install 'mlx-paged[server]'")):
            ask()
    with pytest.raises(ValueError, match="structured outputs need a tokenizer"):
        llm_of(demo[0]).generate([1, 2, 3], yes_or_no)
    assert_nothing_held(llm.engine)
    assert llm.generate("Is it?", greedy(2))[0].error is None
    monkeypatch.undo()
    (output,) = llm.generate("Is it?", yes_or_no)
    assert output.error is None and output.outputs[0].text in ("yes", "no")


def test_what_can_not_be_asked_fails_alone(model: qwen3.Model):
    llm = llm_of(model, kv_cache_bytes="10blocks")

    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        raise LookupError("never")

    prompts = [prompt(20), [], [61], prompt(161), None, "text", prompt(20), prompt(20)]
    params = [greedy(5)] * 6 + [greedy(5, logits_processors=[fails]), sampled(1, 5)]
    outputs = llm.generate(prompts, params, raise_on_error=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", *["error"] * 6, "length"]
    errors = [type(output.error) for output in outputs[1:7]]
    assert errors == [
        ArgumentError,
        ArgumentError,
        PromptTooLongError,
        ArgumentError,
        ArgumentError,
        LookupError,
    ]
    assert outputs[0].error is None and outputs[7].error is None
    assert outputs[0].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(5))
    assert outputs[7].outputs[0].token_ids == ask_alone(model, prompt(20), sampled(1, 5))
    assert all(output.finished for output in outputs)
    assert_nothing_held(llm.engine)


def test_a_failed_request_has_as_many_completions_as_were_asked_for(model: qwen3.Model):
    (output,) = llm_of(model).generate([[]], SamplingParams(n=3), raise_on_error=False)
    assert [(completion.index, completion.finish_reason) for completion in output.outputs] == [
        (index, "error") for index in range(3)
    ]


def test_outputs_that_are_kept_do_not_keep_the_engine(model: qwen3.Model):
    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        raise LookupError("never")

    llm = llm_of(model)
    cache = weakref.ref(llm.engine.cache)
    outputs = llm.generate(
        [[], prompt(5), prompt(5)],
        [greedy(2), greedy(2), greedy(2, logits_processors=[fails])],
        raise_on_error=False,
    )
    thread = llm.engine.thread
    del llm
    gc.collect()
    thread.join()  # It keeps compiled functions, which hold the cache, until its end.
    assert cache() is None and [output.error is None for output in outputs] == [False, True, False]


def test_what_the_tokenizer_or_the_template_raised_does_not_keep_the_engine(demo: tuple[Any, Any]):
    llm = llm_of(*demo)
    cache = weakref.ref(llm.engine.cache)
    text = "half a character: \ud800"
    outputs = llm.generate([text], greedy(2), raise_on_error=False)
    outputs += llm.chat([[{"role": "user", "content": text}]], greedy(2), raise_on_error=False)
    thread = llm.engine.thread
    del llm
    gc.collect()
    thread.join()  # It keeps compiled functions, which hold the cache, until its end.
    assert outputs[0].error.__cause__ is not None and outputs[-1].error is not None
    assert cache() is None


def test_lists_of_different_lengths_are_refused(model: qwen3.Model):
    llm = llm_of(model)
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts; give one for each"):
        llm.generate([[1], [2]], [greedy(1)])
    with pytest.raises(ValueError, match="3 priority for 2 prompts"):
        llm.generate([[1], [2]], priority=[1, 2, 3])
    assert_nothing_held(llm.engine)


def test_an_urgent_prompt_runs_first(model: qwen3.Model):
    llm = llm_of(model, max_num_seqs=1)
    outputs = llm.generate([prompt(5)] * 3, greedy(5), priority=[2, 1, 0])
    times = [output.time_to_first_token for output in outputs]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("num_prompts", "is_terminal", "use_tqdm", "is_shown"),
    [
        (9, True, None, False),
        (10, True, None, True),
        (10, False, None, False),
        (2, False, True, True),
        (20, True, False, False),
    ],
)
def test_long_batches_have_a_progress_bar_on_a_terminal(
    model: qwen3.Model,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    num_prompts: int,
    is_terminal: bool,
    use_tqdm: bool | None,
    is_shown: bool,
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    prompts = [prompt(3)] * (num_prompts - 1) + [[]]
    llm_of(model).generate(prompts, greedy(2), use_tqdm=use_tqdm, raise_on_error=False)
    captured = capsys.readouterr()
    assert captured.out == ""
    if is_shown:
        assert f"{num_prompts}/{num_prompts}" in captured.err and "tok/s" in captured.err
    else:
        assert captured.err == ""


def test_ctrl_c_ends_the_batch_and_the_next_one_is_as_ever(model: qwen3.Model):
    llm = llm_of(model)
    before = signal.getsignal(signal.SIGINT)

    def interrupts(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return logits

    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(5), prompt(20)], greedy(2000, logits_processors=[interrupts]))
    assert signal.getsignal(signal.SIGINT) is before
    llm.engine.thread.call(lambda: None)  # The step that ran is done.
    assert_nothing_held(llm.engine)
    (output,) = llm.generate([prompt(5)], greedy(5))
    assert output.outputs[0].token_ids == ask_alone(model, prompt(5), greedy(5))


def test_what_interrupts_a_step_leaves_no_requests_to_the_next_batch(model: qwen3.Model):
    llm = llm_of(model)

    def interrupts(tokens: mx.array, logits: mx.array) -> mx.array:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(5), prompt(20)], greedy(2000, logits_processors=[interrupts]))
    assert_nothing_held(llm.engine)
    (output,) = llm.generate([prompt(5)], greedy(5))
    assert output.outputs[0].token_ids == ask_alone(model, prompt(5), greedy(5))


# Threads


def test_threads_take_turns_and_each_gets_its_own_answers(model: qwen3.Model):
    llm = LLM(model, kv_cache_bytes="100blocks")
    prompts = {name: [prompt(10 + n, seed=name) for n in range(3)] for name in range(4)}
    answers: dict[int, list[list[int]]] = {}
    errors: list[BaseException] = []

    def ask(name: int) -> None:
        try:
            for _ in range(3):
                outputs = llm.generate(prompts[name], greedy(6))
                answers[name] = [output.outputs[0].token_ids for output in outputs]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a thread hangs"
    assert not errors
    for name, each in prompts.items():
        assert answers[name] == [ask_alone(model, tokens, greedy(6)) for tokens in each]
    assert_nothing_held(llm.engine)


def test_a_call_from_inside_a_call_is_refused_by_name(model: qwen3.Model):
    llm = LLM(model, kv_cache_bytes="100blocks")

    def asks(tokens: mx.array, logits: mx.array) -> mx.array:
        llm.generate(prompt(5))
        return logits

    params = [greedy(2, logits_processors=[asks]), greedy(2)]
    output, good = llm.generate([prompt(5)] * 2, params, raise_on_error=False)
    assert (
        "was called from inside a call of the same LLM" in str(output.error) and good.error is None
    )
    assert llm.generate(prompt(5), greedy(2))[0].error is None
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("calls_before", [0, 1, 2])
def test_an_interrupt_while_requests_are_queued_leaves_none_of_them(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch, calls_before: int
):
    llm = LLM(model, kv_cache_bytes="100blocks")
    add_request, calls = llm.engine.add_request, iter(range(100))

    def interrupted(*args: Any, **options: Any) -> None:
        if next(calls) == calls_before:
            raise KeyboardInterrupt
        add_request(*args, **options)

    monkeypatch.setattr(llm.engine, "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(5)] * 3, greedy(2))
    assert_nothing_held(llm.engine)
    assert len(llm.generate([prompt(5)] * 3, greedy(2))) == 3


def test_a_closed_llm_has_written_its_blocks_and_answers_no_more(
    model: qwen3.Model, tmp_path: Path
):
    with llm_of(model, cache_dir=tmp_path) as llm:
        (first,) = llm.generate([prompt(64)], greedy(3))
    assert llm.close()
    assert llm.engine.thread.join(10)
    with pytest.raises(EngineStoppedError, match="it was shut down"):
        llm.generate([prompt(3)])
    (again,) = llm_of(model, cache_dir=tmp_path).generate([prompt(64)], greedy(3))
    assert again.num_read_tokens == 48 and first.outputs[0].token_ids == again.outputs[0].token_ids


def test_an_llm_is_closed_when_its_block_raises(model: qwen3.Model):
    with pytest.raises(ZeroDivisionError), llm_of(model) as llm:
        raise ZeroDivisionError
    with pytest.raises(EngineStoppedError, match="it was shut down"):
        llm.generate([prompt(3)])
