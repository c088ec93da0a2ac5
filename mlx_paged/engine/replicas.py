"""What the ranks of a model tell each other about an engine's steps.

Every rank has an engine with a scheduler of its own. Given the same requests in the same order and
the same tokens, schedulers do the same: they look at no clock, and at no memory but the pool's. So
rank 0, the leader, sends the others what was asked, says when a step begins, and what it drew.
Followers draw no tokens: they need neither the functions of a request nor its grammar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import mlx.core as mx

from mlx_paged.distributed import Ranks
from mlx_paged.engine.request_state import RequestState
from mlx_paged.engine.sampler import SampledToken, SampledTokens, sample
from mlx_paged.engine.scheduler import Scheduler
from mlx_paged.engine.shared_values import as_json
from mlx_paged.engine.step_budget import TokenBudgets
from mlx_paged.request import Request

Results: TypeAlias = "list[SampledToken | Exception]"

# Of a request, beside its prompt and its parameters.
_ASKED = ("request_id", "seed", "priority", "cache_salt", "no_store")


def state_of_scheduler(scheduler: Scheduler) -> list[int]:
    """Numbers that differ soon if two schedulers do."""
    pool = scheduler.manager.pool
    return [
        scheduler.num_steps,
        len(scheduler.running),
        len(scheduler.waiting),
        sum(request.num_computed_tokens for request in scheduler.running),
        sum(len(request.token_ids) for request in scheduler.running),
        pool.num_blocks,
        pool.num_free_blocks,
        scheduler.swap_space.num_used_tokens,
    ]


class Replicas:
    """Draws the tokens of an engine's steps; where there are several ranks, on rank 0, which tells
    the others what it took on and what it drew.

    What a follower hears between two steps is for :mod:`mlx_paged.engine.following`.

    Args:
        ranks: ``None`` for a process that has the whole model.
        run_ahead: whether steps are launched before the tokens of the one before are read. These
            then travel in MLX's graph, too.
    """

    def __init__(self, ranks: Ranks | None, run_ahead: bool):
        self._ranks = ranks
        self._followers = ranks if ranks is not None and ranks.is_leader else None
        self._leader = ranks if ranks is not None and not ranks.is_leader else None
        self._run_ahead = run_ahead

    def add(self, state: RequestState) -> None:
        """A request is taken on."""
        if self._followers is not None:
            request = state.requests[0]
            self._followers.send(
                "add",
                {
                    "prompt_token_ids": request.token_ids,
                    "params": as_json(request.params),
                    **{name: getattr(request, name) for name in _ASKED},
                },
            )

    def abort(self, state: RequestState) -> None:
        """A request is ended from outside."""
        # Another request may have the id of one that is finished by now.
        if self._followers is not None and not all(each.is_finished for each in state.requests):
            self._followers.send("abort", state.output.request_id)

    def begin_step(self, scheduler: Scheduler, budgets: TokenBudgets) -> None:
        """A step begins."""
        if self._followers is not None:
            self._followers.send("step", [*budgets, *state_of_scheduler(scheduler)])

    def sample(
        self,
        logits: mx.array,  # [num_rows, vocab_size]
        rows: Sequence[int],
        requests: Sequence[Request],
        num_before: Sequence[int] | None = None,
    ) -> SampledTokens:
        """As :func:`mlx_paged.engine.sampler.sample`; a follower launches no draw."""
        if self._leader is None:
            sampled = sample(logits, rows, requests, num_before)
        else:
            sampled = SampledTokens(requests, (), mx.zeros((len(requests),), dtype=mx.int32))
        if self._ranks is None or not self._run_ahead or not requests:
            return sampled
        token_ids = mx.distributed.all_sum(sampled.token_ids, group=self._ranks.group)
        mx.async_eval(token_ids)
        return dataclasses.replace(sampled, token_ids=token_ids)

    def read(self, sampled: SampledTokens) -> Results:
        """Wait for tokens; an exception fails its request."""
        if self._leader is not None:
            _, drawn = self._leader.receive("drawn")
            return [
                RuntimeError("[ranks] failed on rank 0") if token is None else SampledToken(token)
                for token in drawn
            ]
        results = sampled.read()
        if self._followers is not None:
            drawn = [None if isinstance(each, Exception) else each.token_id for each in results]
            self._followers.send("drawn", drawn)
        return results

    def failed(self, error: BaseException) -> None:
        """A step raised in the middle, so the ranks do not agree any more."""
        if self._ranks is not None:
            self._ranks.fail(error)
