"""Requests of every kind at random, to which all engines are to give the same answers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from paged_testing.integrity import check_scheduler

from helpers.engine_runs import assert_nothing_held, make_engine
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.speculation.speculation import NO_SPECULATION
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.request import RequestOutput, SeqId


@dataclass
class Ask:
    """A request, when it comes, and when it goes."""

    tokens: list[int]
    params: dict[str, Any]
    comes_at: int  # step
    priority: int = 0
    abort_at: int | None = None  # tokens of its first completion


@dataclass
class Workload:
    """Requests of every kind on an engine of any size; a seed tells which."""

    seed: int
    num_requests: int
    vocab_size: int
    asks: dict[str, Ask] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        block_size = rng.choice([8, 16])
        self.options = {
            "block_size": block_size,
            # From a budget that holds few of them to one that is never used up.
            "kv_cache_bytes": f"{rng.choice([192, 256, 400, 2000]) // block_size}blocks",
            "swap_bytes": rng.choice([0, "20blocks"]),
            "max_num_seqs": rng.choice([4, 6, 12]),
            "max_num_batched_tokens": rng.choice([16, 40, 300]),
            "max_num_mixed_tokens": rng.choice([16, 64]),
            "watermark": rng.choice([0.0, 0.05]),
            "enable_prefix_caching": rng.random() < 0.8,
        }
        prefixes = [rng.choices(range(self.vocab_size), k=70) for _ in range(3)]
        for number in range(self.num_requests):
            self.asks[str(number)] = self._ask(rng, rng.choice(prefixes))

    def _ask(self, rng: random.Random, prefix: list[int]) -> Ask:
        tail = rng.choices(range(self.vocab_size), k=rng.randint(1, 40))
        params: dict[str, Any] = {"max_tokens": rng.randint(1, 30), "seed": rng.randrange(2**40)}
        if rng.random() < 0.5:
            params["temperature"] = rng.choice([0.7, 1.0])
            params |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 9}, {"min_p": 0.05}])
        if rng.random() < 0.25:
            params |= rng.choice(
                [{"repetition_penalty": 1.3}, {"frequency_penalty": 0.6, "presence_penalty": 0.2}]
            )
        if rng.random() < 0.2:
            params["n"] = rng.randint(2, 4)
        if rng.random() < 0.3:
            params["stop_token_ids"] = rng.sample(range(self.vocab_size), 4)
        if rng.random() < 0.3:
            params["logprobs"] = rng.randint(0, 3)
        kind = rng.random()
        if kind < 0.1:
            params["logits_processors"] = [bans_the_last_token]
        elif kind < 0.15:
            params["logits_processors"] = [raises_at(len(tail) + rng.randint(60, 90))]
        elif kind < 0.2:
            params["sampler"] = takes_the_second
        elif kind < 0.22:
            # Only the sampler sees that no token is left.
            params["logit_bias"] = dict.fromkeys(range(self.vocab_size), -np.inf)
        params |= self._newer_params(len(self.asks))
        return Ask(
            prefix[: rng.choice([0, 8, 32, 70])] + tail,
            params,
            comes_at=rng.randrange(60),
            priority=rng.choice([0, 0, 0, -1, 1]),
            abort_at=rng.randint(0, 12) if rng.random() < 0.1 else None,
        )

    def _newer_params(self, number: int) -> dict[str, Any]:
        """Masks, stop sequences, XTC and log-probabilities of prompts, from draws of their own."""
        rng = random.Random(self.seed * 1000 + number)
        params: dict[str, Any] = {}
        if rng.random() < 0.2:
            params["prompt_logprobs"] = rng.randint(0, 3)
        if rng.random() < 0.15:
            params["allowed_token_ids"] = rng.sample(range(self.vocab_size), self.vocab_size // 2)
        if rng.random() < 0.2:
            params["min_tokens"] = rng.randint(0, 12)
            params["max_tokens"] = rng.randint(12, 30)
        if rng.random() < 0.2:
            pairs = [rng.choices(range(self.vocab_size), k=2) for _ in range(400)]
            params["stop_token_ids"] = [*pairs, rng.randrange(self.vocab_size)]
        if rng.random() < 0.15:
            params |= {"xtc_probability": 0.5, "xtc_threshold": 0.01, "xtc_special_tokens": [3]}
        return params

    def run(self, model: Any, tokenizer: Any = None, **options: Any) -> Run:
        """
        Args:
            options: of the engine; ``speculation``, or what it makes of the engine, is put into
                the scheduler. ``adapter_of`` has the adapter of each request, and
                ``before_adding`` is called with the engine and that adapter.
        """
        adapter_of = options.pop("adapter_of", {})
        before_adding = options.pop("before_adding", lambda engine, adapter: None)
        speculation = options.pop("speculation", NO_SPECULATION)
        engine = make_engine(model, tokenizer, **self.options, **options)
        engine.scheduler.speculation = speculation(engine) if callable(speculation) else speculation
        result = Run(engine)
        coming = sorted(self.asks, key=lambda name: (self.asks[name].comes_at, int(name)))
        num_steps = 0
        while coming or engine.has_unfinished_requests():
            while coming and self.asks[coming[0]].comes_at <= num_steps:
                name = coming.pop(0)
                ask = self.asks[name]
                params = SamplingParams(**ask.params)
                adapter = adapter_of.get(name)
                before_adding(engine, adapter)
                engine.add_request(name, ask.tokens, params, priority=ask.priority, adapter=adapter)
            for output in engine.step():
                ask, num_tokens = self.asks[output.request_id], len(output.outputs[0].token_ids)
                if output.finished:
                    result.outputs[output.request_id] = output
                elif ask.abort_at is not None and num_tokens >= ask.abort_at:
                    engine.abort(output.request_id)
            check_scheduler(engine.scheduler)
            result.num_in_flight += len(engine.steps.in_flight)
            num_steps += 1
        assert_nothing_held(engine)
        assert set(result.outputs) == set(self.asks)
        return result


@dataclass
class Run:
    engine: Engine
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    num_in_flight: int = 0  # steps after which another one was in flight

    @property
    def answers(self) -> dict[SeqId, list[int]]:
        return {
            (name, completion.index): completion.token_ids
            for name, output in self.outputs.items()
            for completion in output.outputs
        }


def bans_the_last_token(tokens: mx.array, logits: mx.array) -> mx.array:
    logits[:, tokens[-1]] = -mx.inf
    return logits


def raises_at(num_tokens: int) -> Any:
    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size >= num_tokens:
            raise LookupError("now")
        return logits

    return processor


def takes_the_second(logprobs: mx.array) -> mx.array:
    return mx.argsort(logprobs, axis=-1)[:, -2]


def assert_same(ours: RequestOutput, theirs: RequestOutput, atol: float = 2e-5) -> None:
    """``atol`` is of log-probabilities."""
    # How much of a prompt was scored before an abort depends on when it came.
    if ours.error is None and ours.outputs[0].token_ids:
        assert_same_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs, atol)
    for one, other in zip(ours.outputs, theirs.outputs, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text), ours.request_id
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        assert_same_logprobs(one.logprobs, other.logprobs, atol)
    assert type(ours.error) is type(theirs.error) and str(ours.error) == str(theirs.error)


def assert_same_logprobs(ours: Any, theirs: Any, atol: float) -> None:
    assert (ours is None) == (theirs is None)
    for entries, expected in zip(ours or (), theirs or (), strict=True):
        assert (entries is None) == (expected is None)
        if entries is None:
            continue
        assert {token: e.rank for token, e in entries.items()} == {
            token: e.rank for token, e in expected.items()
        }
        np.testing.assert_allclose(
            [entry.logprob for entry in entries.values()],
            [entry.logprob for entry in expected.values()],
            rtol=2e-6,  # Where steps are put together otherwise, 16 units of float32's last place.
            atol=atol,
        )


def assert_all_same(ahead: Run, waiting: Run, atol: float = 2e-5) -> None:
    assert waiting.num_in_flight == 0 < ahead.num_in_flight
    for name, output in waiting.outputs.items():
        assert_same(ahead.outputs[name], output, atol)


def assert_all_same_but_aborts(drafting: Run, plain: Run, atol: float = 2e-5) -> None:
    """An abort comes between two steps, of which one with drafts gives more tokens."""
    for name, output in plain.outputs.items():
        both = [*output.outputs, *drafting.outputs[name].outputs]
        if all(each.finish_reason != "abort" for each in both):
            assert_same(drafting.outputs[name], output, atol)
            continue
        for one, other in zip(drafting.outputs[name].outputs, output.outputs, strict=True):
            assert all(a == b for a, b in zip(one.token_ids, other.token_ids, strict=False))
