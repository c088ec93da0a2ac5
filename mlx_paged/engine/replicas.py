"""How an engine's steps stay the same on all ranks of a model.

Every rank has its own engine and scheduler. Schedulers read no clock, and no memory but the pool's,
so the same requests in the same order and the same tokens give the same plans. Rank 0, the leader,
sends the requests, the start of each step and the sampled tokens. Followers sample nothing, so they
need neither the functions of a request nor its grammar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import mlx.core as mx

from mlx_paged.distributed import Ranks
from mlx_paged.engine.request import Completion, SampledToken
from mlx_paged.engine.sampler import SampledTokens, sample
from mlx_paged.engine.scheduler import Scheduler

Results: TypeAlias = "list[SampledToken | Exception]"


def state_of_scheduler(scheduler: Scheduler) -> list[int]:
    """Numbers that soon differ if two schedulers have diverged."""
    pool = scheduler.manager.pool
    return [
        scheduler.num_steps,
        len(scheduler.running),
        len(scheduler.waiting),
        sum(completion.num_computed_tokens for completion in scheduler.running),
        sum(len(completion.token_ids) for completion in scheduler.running),
        pool.num_blocks,
        pool.num_free_blocks,
        scheduler.swap_space.num_used_tokens,
    ]


class Replicas:
    """Samples the tokens of an engine's steps. With several ranks, rank 0 samples and sends the
    tokens, and everything else that followers need (:mod:`mlx_paged.engine.following`).

    Args:
        ranks: ``None`` for a model that is not split.
        run_ahead: whether a step is launched before the tokens of the previous one are read. The
            tokens then also travel in MLX's graph.
    """

    def __init__(self, ranks: Ranks | None, run_ahead: bool):
        self._ranks = ranks
        self._leader = None if ranks is None or ranks.is_leader else ranks
        self._run_ahead = run_ahead

    def tell(self, kind: str, value: Callable[[], object] = lambda: None) -> None:
        """On rank 0, send a message to the others; ``value`` is called only there."""
        if self._ranks is not None and self._ranks.is_leader:
            self._ranks.send(kind, value())

    def sample(
        self,
        logits: mx.array,  # [num_rows, vocab_size]
        rows: Sequence[int],
        completions: Sequence[Completion],
        num_before: Sequence[int] | None = None,
    ) -> SampledTokens:
        """As :func:`mlx_paged.engine.sampler.sample`; a follower samples nothing."""
        if self._leader is None:
            sampled = sample(logits, rows, completions, num_before)
        else:
            sampled = SampledTokens(completions, (), mx.zeros((len(completions),), dtype=mx.int32))
        if self._ranks is None or not self._run_ahead or not completions:
            return sampled
        token_ids = mx.distributed.all_sum(sampled.token_ids, group=self._ranks.group)
        mx.async_eval(token_ids)
        return dataclasses.replace(sampled, token_ids=token_ids)

    def read(self, sampled: SampledTokens) -> Results:
        """Wait for the tokens; an exception stands for a request that failed."""
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
        """End all ranks: a step raised on this one, so they have diverged."""
        if self._ranks is not None:
            self._ranks.fail(error)
