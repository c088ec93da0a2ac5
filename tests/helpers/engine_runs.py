"""What the tests of the engine share: small models, engines on them, requests to ask, running them
to their end, and whether anything is left behind.

A random model may come to two tokens that are all but equally likely; which of them wins is then
rounding's choice, and equal ids would be luck. So `ask_alone` also looks at how far the two best
lie apart, and refuses a prompt with a near tie: then every comparison of greedy ids is exact.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3 as mlx_lm_qwen3
from paged_testing.integrity import check_scheduler

from mlx_paged import load
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.speculation.speculation import NO_SPECULATION
from mlx_paged.loading import demo_model_path
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.request import CompletionOutput, RequestOutput

VOCAB_SIZE = 61

# Of log-probabilities near 5 in float32, whose unit of rounding is 5e-7.
NEAR_TIE = 2e-5

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2**20,
    "rope_theta": 1e4,
}


def livelier_model(config: dict[str, Any], seed: int = 5) -> qwen3.Model:
    """A random Qwen3 whose answers have many different tokens."""
    mx.random.seed(seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    # Than at its initialisation.
    livelier = [
        (name, weight * 2)
        for name, weight in tree_flatten(model.parameters())
        if "norm" not in name
    ]
    model.load_weights(livelier, strict=False)
    mx.eval(model.parameters())
    return model


def small_model(**change: Any) -> qwen3.Model:
    """A random Qwen3 with these changes of ``CONFIG``."""
    mx.random.seed(7)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG | change))
    mx.eval(model.parameters())
    return model


@cache
def tiny_models() -> tuple[qwen3.Model, mlx_lm_qwen3.Model]:
    """The same random weights in our Qwen3 and in mlx-lm's; all tests of a process share them."""
    mx.random.seed(3)
    theirs = mlx_lm_qwen3.Model(mlx_lm_qwen3.ModelArgs.from_dict(CONFIG))
    ours = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    ours.load_weights(tree_flatten(theirs.parameters()))
    mx.eval(ours.parameters(), theirs.parameters())
    return ours, theirs


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, num_tokens]).integers(0, VOCAB_SIZE, num_tokens).tolist()


def greedy(max_tokens: int = 20, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **options)


def sampled(seed: int, max_tokens: int = 20, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": max_tokens, **options})


# Those of a test, where something looks at them when it is over.
made_engines: list[Engine] | None = None


def make_engine(model: nn.Module, tokenizer: Any = None, **options: Any) -> Engine:
    """An engine of 100 blocks, whose draws are the same each time."""
    engine = Engine(model, tokenizer, **{"kv_cache_bytes": "100blocks", "seed": 0, **options})
    if made_engines is not None:
        made_engines.append(engine)
    return engine


def make_engine_without_drafts(*args: Any, **options: Any) -> Engine:
    """One whose steps are looked at one by one: each gives a token."""
    engine = make_engine(*args, **options)
    engine.scheduler.speculation = NO_SPECULATION
    return engine


def load_demo() -> tuple[nn.Module, Any]:
    return load(demo_model_path())


def run(engine: Engine, after_step: Callable[[], None] | None = None) -> dict[str, RequestOutput]:
    """Step until nothing is left to do; the last output of each request."""
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in outputs, "a request ends once"
                outputs[output.request_id] = output
        check_scheduler(engine.scheduler)
        if after_step is not None:
            after_step()
    return outputs


def answer(engine: Engine, tokens: Any, params: SamplingParams, **request: Any) -> RequestOutput:
    """The last output of a request that is alone."""
    engine.add_request("alone", tokens, params, **request)
    return run(engine)["alone"]


def complete(engine: Engine, tokens: Any, params: SamplingParams) -> CompletionOutput:
    """The completion of a request that is alone, and that nothing fails."""
    output = answer(engine, tokens, params)
    assert output.error is None
    return output.outputs[0]


def ask(engine: Engine, requests: dict[str, tuple[Any, SamplingParams]]) -> dict[str, list[int]]:
    """The tokens of the first completion of each request, all of them asked at once."""
    for request_id, (tokens, params) in requests.items():
        engine.add_request(request_id, tokens, params)
    return {request_id: output.outputs[0].token_ids for request_id, output in run(engine).items()}


_known: dict[int, dict[Any, Any]] = {}


def known_of(model: nn.Module) -> dict[Any, Any]:
    """What tests have found out about a model and don't compute again, for as long as it lives."""
    if id(model) not in _known:
        _known[id(model)] = {}
        weakref.finalize(model, _known.pop, id(model))
    return _known[id(model)]


def ask_alone(model: nn.Module, tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """The tokens of a request on the plainest engine: of its own, which caches nothing, computes
    the prompt in one step, waits for each step and makes no drafts, whatever engines do by default.
    """
    # Functions have no text that tells them apart.
    is_told_by_text = not params.logits_processors and params.sampler is None
    known = known_of(model) if is_told_by_text else {}
    key = "alone", tuple(tokens), repr(params)
    if key not in known:
        known[key] = _ask_alone(model, tokens, params)
    return list(known[key])


def _ask_alone(model: nn.Module, tokens: Sequence[int], params: SamplingParams) -> list[int]:
    engine = make_engine_without_drafts(
        model, enable_prefix_caching=False, max_num_batched_tokens=4096, run_ahead=False
    )
    params = dataclasses.replace(params, logprobs=2) if params.is_greedy else params
    engine.add_request("alone", tokens, params)
    completion = run(engine)["alone"].outputs[0]
    if params.is_greedy:
        check_margins(completion)
    return completion.token_ids


def check_margins(completion: CompletionOutput) -> None:
    margins = [
        best - second
        for best, second in (top_two(entries.values()) for entries in completion.logprobs)
    ]
    assert min(margins) > NEAR_TIE, (
        f"a near tie at token {int(np.argmin(margins))}: choose another prompt"
    )


def top_two(entries: Iterable[Any]) -> list[float]:
    return sorted((entry.logprob for entry in entries), reverse=True)[:2]


def replays_of(engine: Engine) -> list[bool]:
    """For each decode from now on, whether it is replayed."""
    compiled = engine.runner.compiled_decode
    assert compiled is not None
    replay, found = compiled.replay, []

    def watched(tokens: mx.array) -> mx.array | None:
        logits = replay(tokens)
        found.append(logits is not None)
        return logits

    compiled.replay = watched  # type: ignore[method-assign]
    return found


def assert_nothing_held(engine: Engine) -> None:
    """No request, no block, no place in the swap space, no message is left; and the bookkeeping
    adds up.
    """
    check_scheduler(engine.scheduler)
    stats = engine.stats()
    counts = stats.num_requests, stats.num_used_blocks, stats.num_running, stats.num_waiting
    assert counts == (0, 0, 0, 0)
    assert stats.num_swapped_tokens == 0
    assert (
        not engine.scheduler.completions
        and not engine.reports.requests
        and not engine.reports._news
        and not engine.steps.in_flight
    )
    assert engine.manager.num_free_blocks == stats.num_usable_blocks
    assert not engine.has_unfinished_requests()


@contextmanager
def between_steps(engine: Engine) -> Iterator[None]:
    """The engine's thread waits, and no step begins, while the body runs."""
    has_begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.set()
        assert go_on.wait(60)

    call = engine.thread.submit(wait)
    assert has_begun.wait(60)
    try:
        yield
    finally:
        go_on.set()
        call.result()


def lose_all_kv(engine: Engine) -> None:
    """As after an evaluation that failed and left slabs that can't be evaluated any more."""

    def lose() -> None:
        engine.steps._roll_back()
        engine.cache.reset()
        engine.scheduler.start_over()

    engine.thread.call(lose)
