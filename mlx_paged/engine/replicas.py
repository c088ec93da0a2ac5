"""What the ranks of a model tell each other about an engine's steps.

Every rank has an engine with a scheduler of its own. Given the same requests in the same order and
the same tokens, schedulers do the same: they look at no clock, and at no memory but the pool's. So
rank 0, the leader, sends the others what was asked, says when a step begins, and what it drew.
Followers draw no tokens: they need neither the functions of a request nor its grammar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from mlx_paged.distributed import Ranks
from mlx_paged.engine.sampler import SampledToken, SampledTokens, sample
from mlx_paged.engine.scheduler import Scheduler
from mlx_paged.engine.shared_values import as_json
from mlx_paged.request import Request

Results: TypeAlias = "list[SampledToken | Exception]"

# Of a request, beside its prompt.
_ASKED = ("request_id", "params", "seed", "priority", "cache_salt", "no_store")


def asked_of(request: Request) -> Any:
    """The arguments that make a request, for :func:`from_json`."""
    asked = {name: getattr(request, name) for name in _ASKED}
    return as_json({"prompt_token_ids": request.token_ids, **asked})


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
    the others what it drew, and what else they have to do.

    What a follower hears between two steps is for :mod:`mlx_paged.engine.following`.

    Args:
        ranks: ``None`` for a process that has the whole model.
        run_ahead: whether steps are launched before the tokens of the one before are read. These
            then travel in MLX's graph, too.
    """

    def __init__(self, ranks: Ranks | None, run_ahead: bool):
        self._ranks = ranks
        self._leader = None if ranks is None or ranks.is_leader else ranks
        self._run_ahead = run_ahead

    def tell(self, kind: str, value: Callable[[], object] = lambda: None) -> None:
        """On rank 0, tell the others; ``value`` is called there alone."""
        if self._ranks is not None and self._ranks.is_leader:
            self._ranks.send(kind, value())

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
        self.tell(
            "drawn",
            lambda: [None if isinstance(each, Exception) else each.token_id for each in results],
        )
        return results

    def failed(self, error: BaseException) -> None:
        """A step raised in the middle, so the ranks do not agree any more."""
        if self._ranks is not None:
            self._ranks.fail(error)
