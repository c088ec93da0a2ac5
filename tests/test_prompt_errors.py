"""One rule for a prompt that fails: every call raises its error, and outputs of several prompts
hold it where the call asks for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from helpers.engine_runs import assert_nothing_held, greedy, load_demo

from mlx_paged import (
    LLM,
    AsyncEngine,
    Engine,
    StructuredOutputsParams,
    batch_generate,
    generate,
    stream_generate,
)
from mlx_paged.cache import PromptTooLongError
from mlx_paged.errors import ArgumentError, ChatTemplateError, EngineStoppedError
from mlx_paged.generation import generate_step

GOOD = "Once upon a time"
BUDGET = {"kv_cache_bytes": "10blocks"}


def fails(tokens: Any, logits: Any) -> Any:
    raise LookupError("never")


FAILING = {"logits_processors": [fails]}
REFUSED = {"structured_outputs": StructuredOutputsParams(regex="(a")}
# A prompt, what is asked for with it, and its error.
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "empty": ("", {}, ArgumentError, "the prompt is empty"),
    "no text": (None, {}, ArgumentError, "NoneType"),
    "half a character": ("\ud800", {}, ArgumentError, "is not valid Unicode"),
    "unknown token": ([5000], {}, ArgumentError, "5000"),
    "too long": ([7] * 161, {}, PromptTooLongError, "161 tokens"),
    "refused grammar": (GOOD, REFUSED, ArgumentError, "unclosed group"),
    "failing processor": (GOOD, FAILING, LookupError, "never"),
}
MLX_LM_OPTIONS = {"logits_processors"}  # of the options above


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return load_demo()


def ask_llm(demo: Any, prompt: Any, options: Any) -> None:
    llm = LLM(*demo, **BUDGET)
    try:
        llm.generate([prompt], greedy(4, **options))
    finally:
        assert_nothing_held(llm.engine)


def ask_llm_beside_others(demo: Any, prompt: Any, options: Any) -> None:
    llm = LLM(*demo, **BUDGET)
    try:
        llm.generate([GOOD, prompt, GOOD], [greedy(4), greedy(4, **options), greedy(4)])
    except Exception as error:
        assert error.__notes__[-1] == (
            "Prompt 2 of 3 failed; with raise_on_error=False its output holds the error, and the "
            "others are answered."
        )
        raise
    finally:
        llm.engine.thread.call(lambda: None)  # what was dropped is gone
        assert_nothing_held(llm.engine)


def ask_engine(demo: Any, prompt: Any, options: Any) -> None:
    engine = Engine(*demo, **BUDGET)
    engine.add_request("a", prompt, greedy(4, **options))
    while engine.has_unfinished_requests():
        for output in engine.step():
            output.raise_if_failed()


def ask_stream(demo: Any, prompt: Any, options: Any) -> None:
    with AsyncEngine(*demo, **BUDGET) as engine:
        list(engine.stream(prompt, greedy(4, **options)))


def ask_async(demo: Any, prompt: Any, options: Any) -> None:
    async def read() -> None:
        async with AsyncEngine(*demo, **BUDGET) as engine:
            async for _ in engine.generate(prompt, greedy(4, **options)):
                pass

    asyncio.run(read())


def ask_batch(demo: Any, prompt: Any, options: Any) -> None:
    batch_generate(*demo, [GOOD, prompt], max_tokens=4, **BUDGET, **options)


def ask_step(demo: Any, prompt: Any, options: Any) -> None:
    list(generate_step(prompt, demo[0], max_tokens=4, **BUDGET, **options))


ENTRIES: dict[str, Callable[[Any, Any, Any], None]] = {
    "LLM.generate": ask_llm,
    "LLM.generate, beside others": ask_llm_beside_others,
    "Engine": ask_engine,
    "AsyncEngine.stream": ask_stream,
    "AsyncEngine.generate": ask_async,
    "batch_generate": ask_batch,
    "generate": lambda demo, prompt, options: generate(
        *demo, prompt, max_tokens=4, **BUDGET, **options
    ),
    "stream_generate": lambda demo, prompt, options: list(
        stream_generate(*demo, prompt, max_tokens=4, **BUDGET, **options)
    ),
    "generate_step": ask_step,
}
OF_MLX_LM = {"batch_generate", "generate", "stream_generate", "generate_step"}


def takes(entry: str, what: str) -> bool:
    prompt, options, _, _ = BAD[what]
    if entry == "generate_step" and isinstance(prompt, str):
        return False  # It has no tokenizer.
    return entry not in OF_MLX_LM or MLX_LM_OPTIONS.issuperset(options)


TABLE = [(entry, what) for entry in ENTRIES for what in BAD if takes(entry, what)]


@pytest.mark.parametrize(("entry", "what"), TABLE)
def test_every_call_raises_the_error_of_a_prompt(demo: Any, entry: str, what: str):
    prompt, options, kind, words = BAD[what]
    with pytest.raises(kind, match=words):
        ENTRIES[entry](demo, prompt, options)


def test_outputs_hold_the_errors_where_the_call_asks_for_that(demo: Any):
    llm = LLM(*demo, **BUDGET)
    (expected,) = llm.generate(GOOD, greedy(4))
    prompts = [GOOD, *(prompt for prompt, *_ in BAD.values()), GOOD]
    params = [greedy(4, **options) for _, options, *_ in BAD.values()]
    outputs = llm.generate(prompts, [greedy(4), *params, greedy(4)], raise_on_error=False)
    for output, (*_, kind, words) in zip(outputs[1:-1], BAD.values(), strict=True):
        assert output.finished and output.outputs[0].finish_reason == "error"
        with pytest.raises(kind, match=words):
            output.raise_if_failed()
    for output in (outputs[0], outputs[-1]):
        assert output.error is None and output.outputs[0].text == expected.outputs[0].text
    assert_nothing_held(llm.engine)


def test_a_conversation_that_can_not_be_written_is_a_prompt_that_fails(demo: Any):
    llm = LLM(*demo, **BUDGET)
    good = [{"role": "user", "content": "Hello"}]
    for bad in ([], [{"role": "user", "content": 7}]):
        with pytest.raises(ChatTemplateError) as raised:
            llm.chat([good, bad], greedy(4))
        answered, failed = llm.chat([good, bad], greedy(4), raise_on_error=False)
        assert answered.error is None and answered.outputs[0].text
        assert str(failed.error) == str(raised.value)
    assert_nothing_held(llm.engine)


def test_completions_that_did_not_fail_are_an_answer(demo: Any):
    calls = iter(range(1000))

    def fails_once(tokens: Any, logits: Any) -> Any:
        if len(tokens) > 6 and next(calls) == 0:
            raise LookupError("once")
        return logits

    params = greedy(4, n=2, temperature=1.0, seed=1, logits_processors=[fails_once])
    for raise_on_error in (True, False):
        calls = iter(range(1000))
        (output,) = LLM(*demo, **BUDGET).generate([7] * 6, params, raise_on_error=raise_on_error)
        reasons = sorted(completion.finish_reason for completion in output.outputs)
        assert reasons == ["error", "length"] and str(output.error) == "once"


def test_an_engine_that_has_stopped_is_no_prompts_error(demo: Any):
    llm = LLM(*demo, **BUDGET)
    llm.engine.thread.end()
    llm.engine.thread.join()
    with pytest.raises(EngineStoppedError, match="it was shut down"):
        llm.generate([GOOD, GOOD], raise_on_error=False)


def test_other_calls_say_where_errors_are_returned(demo: Any):
    with pytest.raises(TypeError, match=r"outputs of LLM\.generate and LLM\.chat can hold errors"):
        batch_generate(*demo, [GOOD], raise_on_error=False)
    with pytest.raises(ValueError, match="raise_on_error must be True or False, got 'no'"):
        LLM(*demo, **BUDGET).generate(GOOD, raise_on_error="no")  # type: ignore[arg-type]
