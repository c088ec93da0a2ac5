"""What raises, fails alone: a logits processor, a request that breaks the model, a step that is
interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import answer, ask_alone, greedy, make_engine, prompt, run, sampled
from helpers.fast_lane import mostly_slow
from paged_testing.integrity import check_scheduler
from paged_testing.soak import raises_at

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.text_stream import TokenTexts
from mlx_paged.models import qwen3
from mlx_paged.request import RequestOutput

pytestmark = pytest.mark.usefixtures("run_ahead")

POISON = 60


class FailingModel:
    """A model whose steps raise when ``is_poisoned`` says so of their tokens, after they wrote K/V
    of other tokens.
    """

    def __init__(
        self, engine: Engine, is_poisoned: Callable[[list[int]], bool], error: BaseException
    ):
        self.model, self.cache = engine.model, engine.cache
        self.is_poisoned = is_poisoned
        self.error = error
        self.num_failures = 0

    def __call__(self, tokens: mx.array, layers: Any, logit_rows: mx.array | None) -> mx.array:
        if self.is_poisoned(tokens.tolist()):
            self.num_failures += 1
            wrong_tokens = (tokens + 7) % 61
            mx.eval(self.model(wrong_tokens, layers, logit_rows), self.cache.arrays)
            raise self.error
        return self.model(tokens, layers, logit_rows)


def break_model(
    engine: Engine, is_poisoned: Callable[[list[int]], bool], error: BaseException
) -> FailingModel:
    engine.runner.model = FailingModel(engine, is_poisoned, error)
    return engine.runner.model


def clean(num_tokens: int, seed: int = 0) -> list[int]:
    return [min(token, 59) for token in prompt(num_tokens, seed)]


def no_poison(max_tokens: int = 20, **options: Any):
    """Greedy parameters with which no answer has the poisoned token."""
    return greedy(max_tokens, logit_bias={POISON: -100.0}, **options)


def reasons(outputs: dict[str, RequestOutput]) -> dict[str, str | None]:
    return {id: output.outputs[0].finish_reason for id, output in outputs.items()}


def run_interrupted(
    engine: Engine, error: type[BaseException]
) -> tuple[dict[str, RequestOutput], int]:
    """As ``run``, going on after each step that raises; and how many did."""
    outputs: dict[str, RequestOutput] = {}
    num_raised = 0
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
        except error:
            num_raised += 1
        check_scheduler(engine.scheduler)
    return outputs, num_raised


# Logits processors


@pytest.mark.parametrize(("num_tokens", "num_before"), [(20, 0), (25, 5)])
def test_a_logits_processor_that_raises_fails_its_request_and_no_other(
    model: qwen3.Model, num_tokens: int, num_before: int
):
    engine = make_engine(model)
    engine.add_request("fails", prompt(20), greedy(20, logits_processors=[raises_at(num_tokens)]))
    engine.add_request("greedy", prompt(20), greedy(20))
    engine.add_request("sampled", prompt(33), sampled(seed=1))
    outputs = run(engine)
    assert reasons(outputs) == {"fails": "error", "greedy": "length", "sampled": "length"}
    assert isinstance(outputs["fails"].error, LookupError) and outputs["greedy"].error is None
    expected = ask_alone(model, prompt(20), greedy(20))
    assert outputs["fails"].outputs[0].token_ids == expected[:num_before]
    assert outputs["greedy"].outputs[0].token_ids == expected
    assert outputs["sampled"].outputs[0].token_ids == ask_alone(model, prompt(33), sampled(seed=1))


def test_of_several_completions_only_the_one_that_raises_fails(model: qwen3.Model):
    calls = []

    def fails_once(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(tokens.size)
        # The three completions come one after the other.
        if len(calls) == 5:
            raise LookupError("the second token of the second")
        return logits

    engine = make_engine(model)
    params = sampled(seed=3, max_tokens=6, n=3)
    engine.add_request(
        "fails", prompt(20), sampled(seed=3, max_tokens=6, n=3, logits_processors=[fails_once])
    )
    engine.add_request("expected", prompt(20), params)
    outputs = run(engine)
    assert [completion.finish_reason for completion in outputs["fails"].outputs] == [
        "length",
        "error",
        "length",
    ]
    assert isinstance(outputs["fails"].error, LookupError)
    for index, length in enumerate((6, 1, 6)):
        expected = outputs["expected"].outputs[index].token_ids
        assert outputs["fails"].outputs[index].token_ids == expected[:length]


class BrokenTokenizer:
    """A tokenizer that can't say what a token is."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def convert_ids_to_tokens(self, token_ids: Any) -> str:
        raise RuntimeError("no such token")


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_tokenizer_that_raises_fails_the_request_that_asked_for_text(
    demo: tuple[Any, Any], max_tokens: int
):
    model, tokenizer = demo
    engine = make_engine(model, tokenizer)
    engine.add_request("fails", "Hello", greedy(max_tokens, logprobs=1))
    texts = TokenTexts(tokenizer)
    texts._backend, texts.tokenizer = None, BrokenTokenizer(tokenizer)
    texts._known_bytes.clear()
    engine.reports.requests["fails"].texts = texts
    engine.add_request("good", "Hello", greedy(5, ignore_eos=True))
    outputs = run(engine)
    assert reasons(outputs) == {"fails": "error", "good": "length"}
    assert (
        isinstance(outputs["fails"].error, RuntimeError)
        and len(outputs["good"].outputs[0].token_ids) == 5
    )


# Steps that raise


@pytest.mark.parametrize("prefix_caching", [True, False])
@mostly_slow("place", [0, 39, 70], quick=(1,))
def test_a_request_that_breaks_the_model_fails_alone(
    model: qwen3.Model, place: int, prefix_caching: bool
):
    engine = make_engine(
        model,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        enable_prefix_caching=prefix_caching,
        kv_cache_bytes="40blocks",
    )
    broken = break_model(engine, lambda tokens: POISON in tokens, RuntimeError("out of order"))
    good = {"a": clean(10), "b": clean(40, 1), "c": clean(71), "d": clean(71)[:64] + clean(9, 2)}
    poisoned = clean(71)
    poisoned[place] = POISON
    for n, (request_id, tokens) in enumerate(good.items()):
        engine.add_request(request_id, tokens, no_poison(25))
        if n == 1:
            engine.add_request("poisoned", poisoned, no_poison(25))
    outputs = run(engine)
    assert reasons(outputs) == dict.fromkeys(good, "length") | {"poisoned": "error"}
    assert str(outputs["poisoned"].error) == "out of order"
    # Once in company and once alone; a chunk of the prompt may come in company again.
    assert 2 <= broken.num_failures <= 6
    for request_id, tokens in good.items():
        assert outputs[request_id].outputs[0].token_ids == ask_alone(
            model, tokens, no_poison(25)
        ), request_id


def test_a_request_that_breaks_the_model_in_the_middle_of_its_answer_fails_alone(
    model: qwen3.Model,
):
    tokens = {"bad": clean(20), "long": clean(50, 1), "short": clean(3, 2)}
    expected = {
        request_id: ask_alone(model, prompt, no_poison(25)) for request_id, prompt in tokens.items()
    }
    engine = make_engine(model)

    # Its tenth token is the poison, by its own choice.
    def choose_poison(so_far: mx.array, logits: mx.array) -> mx.array:
        if so_far.size == 29:
            logits[:, POISON] = 1000.0
        return logits

    broken = break_model(
        engine, lambda step_tokens: POISON in step_tokens, RuntimeError("out of order")
    )
    engine.add_request("bad", tokens["bad"], no_poison(25, logits_processors=[choose_poison]))
    engine.add_request("long", tokens["long"], no_poison(25))
    engine.step()
    engine.add_request("short", tokens["short"], no_poison(25))
    outputs = run(engine)
    assert broken.num_failures == 2
    assert reasons(outputs) == {"bad": "error", "long": "length", "short": "length"}
    assert outputs["bad"].outputs[0].token_ids == [*expected["bad"][:9], POISON]
    assert outputs["long"].outputs[0].token_ids == expected["long"]
    assert outputs["short"].outputs[0].token_ids == expected["short"]


def test_what_a_failed_step_wrote_is_never_read(model: qwen3.Model):
    # The first step fails once. Both requests share blocks that it was to fill, and so do later
    # ones.
    engine = make_engine(model)
    failures = iter([True])
    break_model(engine, lambda tokens: next(failures, False), RuntimeError("once"))
    shared = prompt(48)
    engine.add_request("first", shared + prompt(3), greedy(10))
    engine.add_request("second", shared + prompt(5), greedy(10))
    outputs = run(engine)
    engine.add_request("third", shared + prompt(7), greedy(10))
    outputs |= run(engine)
    assert outputs["third"].num_cached_tokens == 48
    for request_id, num_tokens in (("first", 3), ("second", 5), ("third", 7)):
        expected = ask_alone(model, shared + prompt(num_tokens), greedy(10))
        assert outputs[request_id].outputs[0].token_ids == expected, request_id


@mostly_slow("swap", [True, False])
def test_steps_may_fail_at_any_time_and_the_tokens_stay_the_same(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch, is_drafting: bool, swap: bool
):
    # Little room, so that failures meet preemptions; and forks.
    engine = make_engine(
        model,
        kv_cache_bytes="14blocks",
        swap_bytes="14blocks" if swap else 0,
        max_num_batched_tokens=24,
        max_num_seqs=6,
    )
    num_steps = iter(range(10_000))
    broken = break_model(
        engine, lambda tokens: next(num_steps) % 7 == 3, RuntimeError("now and then")
    )
    params = {
        "greedy": (prompt(60), greedy(40)),
        "sampled": (prompt(30), sampled(seed=2, max_tokens=50)),
        "two": (prompt(45), sampled(seed=9, max_tokens=30, n=2)),
        "shared": (prompt(60)[:40] + prompt(5), greedy(40)),
    }
    for request_id, (tokens, request_params) in params.items():
        engine.add_request(request_id, tokens, request_params)
    outputs = run(engine)
    # A step that fails with one request in it fails that one: they had company, or fail rarely.
    calm = make_engine(model, enable_prefix_caching=False)
    for request_id, (tokens, request_params) in params.items():
        calm.add_request(request_id, tokens, request_params)
    expected = run(calm)
    assert broken.num_failures > 5 and (is_drafting or engine.stats().num_preemptions > 0)
    num_whole = 0
    for request_id, output in outputs.items():
        for completion, right in zip(output.outputs, expected[request_id].outputs, strict=True):
            assert completion.token_ids == right.token_ids[: len(completion.token_ids)], request_id
            assert completion.finish_reason == "error" or completion.token_ids == right.token_ids
            num_whole += completion.finish_reason == "length"
    assert num_whole >= (1 if is_drafting else 2)


def test_an_error_that_is_kept_keeps_no_arrays(model: qwen3.Model):
    engine = Engine(model, kv_cache_bytes="1000blocks")
    slabs = engine.cache.config.nbytes

    def raises(tokens: mx.array, logits: mx.array) -> mx.array:
        large = mx.zeros(slabs, mx.uint8)
        mx.eval(large)
        raise LookupError(large.shape)

    def model_that_raises(tokens: mx.array, layers: Any, logit_rows: mx.array | None) -> mx.array:
        logits = model(tokens, layers, logit_rows)
        # Not evaluated: what it would be computed from, all slabs, hangs on it.
        raise RuntimeError(logits.shape)

    engine.add_request("grows", prompt(3000), greedy(1))
    run(engine)
    mx.synchronize()
    before = mx.get_active_memory()
    errors = [answer(engine, prompt(20), greedy(1, logits_processors=[raises])).error]
    engine.runner.model = model_that_raises
    errors.append(answer(engine, prompt(20), greedy(1)).error)
    engine.runner.model = model
    # Slabs that somebody holds are copied when they are written.
    engine.add_request("writes", prompt(20), greedy(1))
    run(engine)
    mx.synchronize()
    assert mx.get_active_memory() - before < slabs // 20
    # Where it was raised can still be read.
    for error, name in zip(errors, ("raises", "model_that_raises"), strict=True):
        assert f"in {name}" in error.__notes__[-1]
    # Nor does it keep the engine.
    engine = None
    mx.synchronize()
    assert mx.get_active_memory() < before


# Interruptions


@pytest.mark.parametrize("swap", [True, False])
def test_an_engine_goes_on_after_ctrl_c_in_any_step(
    model: qwen3.Model, run_ahead: bool, is_drafting: bool, swap: bool
):
    engine = make_engine(
        model,
        kv_cache_bytes="12blocks",
        swap_bytes="12blocks" if swap else 0,
        max_num_batched_tokens=24,
        max_num_seqs=6,
    )
    num_steps = iter(range(10_000))
    # An interrupt costs two steps where one is ahead.
    period = 13 if run_ahead else 9
    break_model(engine, lambda tokens: next(num_steps) % period == 4, KeyboardInterrupt())
    requests = {
        "greedy": (prompt(60), greedy(40)),
        "sampled": (prompt(30), sampled(seed=2, max_tokens=50)),
        "shared": (prompt(60)[:40] + prompt(5), greedy(40)),
        "short": (prompt(7), greedy(12)),
    }
    for request_id, (tokens, params) in requests.items():
        engine.add_request(request_id, tokens, params)
    outputs, num_raised = run_interrupted(engine, KeyboardInterrupt)
    assert num_raised > (1 if is_drafting else 5)
    assert is_drafting or engine.stats().num_preemptions > 0
    assert reasons(outputs) == dict.fromkeys(requests, "length")
    for request_id, (tokens, params) in requests.items():
        assert outputs[request_id].outputs[0].token_ids == ask_alone(model, tokens, params), (
            request_id
        )


def test_ctrl_c_in_a_logits_processor_is_no_failure_of_the_request(model: qwen3.Model):
    calls = iter(range(100))

    def interrupted_at_3(tokens: mx.array, logits: mx.array) -> mx.array:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return logits

    engine = make_engine(model)
    engine.add_request("a", prompt(20), greedy(10, logits_processors=[interrupted_at_3]))
    engine.add_request("b", prompt(30), greedy(10))
    outputs, num_raised = run_interrupted(engine, KeyboardInterrupt)
    assert num_raised == 1
    assert outputs["a"].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(10))
    assert outputs["b"].outputs[0].token_ids == ask_alone(model, prompt(30), greedy(10))


def test_an_interrupted_engine_still_takes_requests_and_aborts(model: qwen3.Model):
    engine = make_engine(model)
    failures = iter([True])
    break_model(engine, lambda tokens: next(failures, False), KeyboardInterrupt())
    engine.add_request("a", prompt(20), greedy(10))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.abort("a")
    engine.add_request("b", prompt(20), greedy(10))
    outputs = run(engine)
    assert reasons(outputs) == {"a": "abort", "b": "length"}
    assert outputs["b"].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(10))
