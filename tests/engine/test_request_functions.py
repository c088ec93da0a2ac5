"""Functions of a request find what the thread that asked has given them, though another one calls
them.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import greedy, make_engine, prompt, run
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged import LLM, AsyncEngine, SamplingParams, demo_model_path, generate
from mlx_paged.engine.input_processor import evaluate_captured
from mlx_paged.models import qwen3

WANTED = 42


def lazy_bias(vocab_size: int) -> mx.array:
    """Not evaluated; all of it falls on one token."""
    return mx.where(mx.arange(vocab_size) == WANTED, mx.array(1e4), mx.array(0.0))


class OfAnObject:
    def __init__(self, bias: mx.array):
        self.biases = [bias]

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + self.biases[0]

    def method(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return self(tokens, logits)


def of_arguments(bias: mx.array, tokens: mx.array, logits: mx.array) -> mx.array:
    return logits + bias


def processors(vocab_size: int) -> dict[str, Any]:
    in_closure = lazy_bias(vocab_size)

    def by_closure(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + in_closure

    def by_default(
        tokens: mx.array,
        logits: mx.array,
        bias: mx.array = lazy_bias(vocab_size),  # noqa: B008
    ) -> mx.array:
        return logits + bias

    return {
        "a closure": by_closure,
        "a default": by_default,
        "a partial": functools.partial(of_arguments, lazy_bias(vocab_size)),
        "an object": OfAnObject(lazy_bias(vocab_size)),
        "a method": OfAnObject(lazy_bias(vocab_size)).method,
    }


@pytest.mark.parametrize("kind", ["a closure", "a default", "a partial", "an object", "a method"])
def test_arrays_that_a_processor_holds_may_be_lazy(demo: tuple[Any, TokenizerWrapper], kind: str):
    function = processors(demo[0].args.vocab_size)[kind]
    params = greedy(3, logits_processors=[function], ignore_eos=True)
    (output,) = LLM(*demo).generate("Hello", params)
    assert output.error is None and output.outputs[0].token_ids == [WANTED] * 3
    with AsyncEngine(*demo) as engine:
        *_, last = engine.stream(
            "Hello", params.clone(logits_processors=[processors(demo[0].args.vocab_size)[kind]])
        )
    assert last.outputs[0].token_ids == [WANTED] * 3


def test_an_array_that_only_another_function_refers_to_fails_its_request_with_what_to_do(
    demo: tuple[Any, TokenizerWrapper],
):
    bias = lazy_bias(demo[0].args.vocab_size)

    def add(logits: mx.array) -> mx.array:
        return logits + bias

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        return add(logits)

    def sampler(logprobs: mx.array) -> mx.array:
        return mx.argmax(add(logprobs), axis=-1)

    llm = LLM(*demo)
    for functions in ({"logits_processors": [processor]}, {"sampler": sampler}):
        params = greedy(3, ignore_eos=True).clone(**functions)
        failed, other = llm.generate(["Hello", "Hello"], [params, greedy(3)], raise_on_error=False)
        assert "call mx.eval on its arrays before the request is added" in str(failed.error)
        assert other.error is None
    mx.eval(bias)
    for functions in ({"logits_processors": [processor]}, {"sampler": sampler}):
        params = greedy(3, ignore_eos=True).clone(**functions)
        assert llm.generate("Hello", params)[0].outputs[0].token_ids == [WANTED] * 3


def test_a_function_that_holds_a_vocabulary_or_itself_is_not_looked_through_for_ever():
    vocabulary = {str(number): [number] for number in range(200_000)}
    itself: list[object] = []
    itself.append(itself)
    lazy = mx.ones((2,)) + 1

    def function() -> object:
        return vocabulary, lazy, function, itself, mx

    evaluate_captured(function)
    seen: list[list[float]] = []
    thread = threading.Thread(target=lambda: seen.append(lazy.tolist()))
    thread.start()
    thread.join()
    assert seen == [[2, 2]]


def test_random_numbers_of_a_sampler_are_those_that_the_caller_has_seeded(
    demo: tuple[Any, TokenizerWrapper],
):
    llm = LLM(*demo)

    def answer(seed: int) -> tuple[list[int], float]:
        mx.random.seed(seed)
        params = SamplingParams(max_tokens=12, sampler=make_sampler(temp=2.0), ignore_eos=True)
        (output,) = llm.generate("Once upon a time", params)
        return output.outputs[0].token_ids, mx.random.uniform().item()

    first, again, other = answer(3), answer(3), answer(4)
    assert first == again and first[0] != other[0]
    # The caller's own numbers go on behind those that were drawn.
    mx.random.seed(3)
    assert first[1] != mx.random.uniform().item()


def test_a_seed_gives_mlx_lms_own_tokens(demo: tuple[Any, TokenizerWrapper]):
    import mlx_lm

    texts = []
    for make, given in ((mlx_lm.generate, mlx_lm.load(str(demo_model_path()))), (generate, demo)):
        mx.random.seed(11)
        texts.append(
            make(*given, "Once upon a time", max_tokens=15, sampler=make_sampler(temp=0.7))
        )
    assert texts[0] == texts[1]


def test_an_engine_of_a_thread_that_ends_goes_on_in_others(model: qwen3.Model):
    engines: list[Any] = []

    def begin() -> None:
        engine = make_engine(model)
        engine.add_request("a", prompt(20), greedy(6))
        engine.step()
        engines.append(engine)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert len(run(engines[0])["a"].outputs[0].token_ids) == 6
