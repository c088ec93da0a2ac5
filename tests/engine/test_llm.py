"""LLM.generate: many prompts in, their completions out, in order; and what fails, fails alone."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import Any

import mlx.core as mx
import pytest
from engine_runs import ask_alone, assert_nothing_held, greedy, load_demo, prompt, sampled
from mlx_lm import generate as mlx_lm_generate
from mlx_lm.utils import load_model

from mlx_paged import demo_model_path
from mlx_paged.cache import PromptTooLongError
from mlx_paged.llm import LLM
from mlx_paged.models import qwen3
from mlx_paged.request import SamplingParams


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
    answers = [llm.generate(form, greedy(5)) for form in ("Hello there", ids, ["Hello there"], [ids], mx.array([ids]))]
    assert [len(answer) for answer in answers] == [1] * 5
    assert {tuple(answer[0].outputs[0].token_ids) for answer in answers} == {tuple(answers[0][0].outputs[0].token_ids)}
    assert llm.generate([]) == []


def test_what_can_not_be_asked_fails_alone(model: qwen3.Model):
    llm = llm_of(model, kv_cache_bytes="10blocks")

    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        raise LookupError("never")

    prompts = [prompt(20), [], [61], prompt(161), None, "text", prompt(20), prompt(20)]
    params = [greedy(5)] * 6 + [greedy(5, logits_processors=[fails]), sampled(1, 5)]
    outputs = llm.generate(prompts, params)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", *["error"] * 6, "length"]
    errors = [type(output.error) for output in outputs[1:7]]
    assert errors == [ValueError, ValueError, PromptTooLongError, ValueError, ValueError, LookupError]
    assert outputs[0].error is None and outputs[7].error is None
    assert outputs[0].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(5))
    assert outputs[7].outputs[0].token_ids == ask_alone(model, prompt(20), sampled(1, 5))
    assert all(output.finished for output in outputs)
    assert_nothing_held(llm.engine)


def test_a_failed_request_has_as_many_completions_as_were_asked_for(model: qwen3.Model):
    (output,) = llm_of(model).generate([[]], SamplingParams(n=3))
    assert [(completion.index, completion.finish_reason) for completion in output.outputs] == [
        (index, "error") for index in range(3)
    ]


def test_outputs_that_are_kept_do_not_keep_the_engine(model: qwen3.Model):
    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        raise LookupError("never")

    llm = llm_of(model)
    cache = weakref.ref(llm.engine.cache)
    outputs = llm.generate([[], prompt(5), prompt(5)], [greedy(2), greedy(2), greedy(2, logits_processors=[fails])])
    del llm
    gc.collect()
    assert cache() is None and [output.error is None for output in outputs] == [False, True, False]


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
    llm_of(model).generate(prompts, greedy(2), use_tqdm=use_tqdm)
    captured = capsys.readouterr()
    assert captured.out == ""
    if is_shown:
        assert f"{num_prompts}/{num_prompts}" in captured.err and "tok/s" in captured.err
    else:
        assert captured.err == ""


def test_ctrl_c_ends_the_batch_between_two_steps_and_the_next_one_is_as_ever(model: qwen3.Model):
    llm = llm_of(model)
    before = signal.getsignal(signal.SIGINT)

    def interrupts(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return logits

    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(5), prompt(20)], greedy(2000, logits_processors=[interrupts]))
    assert signal.getsignal(signal.SIGINT) is before
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
