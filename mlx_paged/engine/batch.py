"""``Batch``: one step as the scheduler planned it. Pure Python: the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from mlx_paged.core import BlockCopy, BlockLoad, KeyShift
from mlx_paged.engine.swap_space import SwapName
from mlx_paged.request import PENDING_TOKEN, Request


class Scheduled(NamedTuple):
    """A request's part of a step: the tokens ``start : start + num_new_tokens`` are computed, the
    last of which may be drafts.
    """

    request: Request
    start: int
    num_new_tokens: int
    num_logit_rows: int  # logits wanted, of its last tokens; 0 while more of its prompt is left
    # Of these, the first ones, which are for the log-probabilities of the prompt.
    num_scored_rows: int = 0
    draft_token_ids: Sequence[int] = ()

    @property
    def has_pending_token(self) -> bool:
        """Whether its last token is one that the step before samples."""
        return self.request.token_ids[self.start + self.num_new_tokens - 1] == PENDING_TOKEN


class SwapOut(NamedTuple):
    """Copy these blocks of each group of layers to host memory.

    Attributes:
        name: what the swap space has them under.
    """

    name: SwapName
    block_ids: list[list[int]]


class CopyBlocks(NamedTuple):
    """Copy blocks within the slabs, for copy-on-write."""

    copies: list[BlockCopy]


class ShiftKeys(NamedTuple):
    """Copy blocks of a group of layers, with K rotated: sinks follow their window."""

    group: int
    shift: KeyShift


class SwapIn(NamedTuple):
    """Copy blocks back, into those that the sequence has now.

    Attributes:
        name: what the swap space has them under.
    """

    name: SwapName
    loads: list[BlockLoad]


Transfer: TypeAlias = SwapOut | CopyBlocks | ShiftKeys | SwapIn


@dataclass(slots=True)
class Batch:
    """One step: the transfers, one after the other, then the requests, in the packed order.

    The scheduler fills it while it plans the step; its budgets are what is left then.
    """

    token_budget: int = field(default=0, compare=False)
    scored_rows_budget: int = field(default=0, compare=False)
    only: Request | None = field(default=None, compare=False)  # no other request may run
    # The tokens of the step before were not read when it was planned.
    is_ahead: bool = field(default=False, compare=False)
    scheduled: list[Scheduled] = field(default_factory=list)
    swap_outs: list[SwapOut] = field(default_factory=list)
    copies: list[CopyBlocks | SwapIn | ShiftKeys] = field(default_factory=list)  # in this order
    preempted: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)  # could not go on
    begun: list[Request] = field(default_factory=list)  # of ``scheduled``, those that never ran
    # This step fills them, and others may hit them. One that a token fills which the step before
    # samples is added when that token is known.
    new_block_ids: set[int] = field(default_factory=set)
    hit_block_ids: set[int] = field(default_factory=set)  # found by the requests that were admitted

    @property
    def transfers(self) -> list[Transfer]:
        """Blocks are swapped out before others write them."""
        return [*self.swap_outs, *self.copies]

    @property
    def requests(self) -> list[Request]:
        return [part.request for part in self.scheduled]

    @property
    def token_ids(self) -> list[int]:
        """``[num_tokens]``, packed."""
        token_ids: list[int] = []
        for request, start, num_new_tokens, _, _, draft_token_ids in self.scheduled:
            token_ids += request.token_ids[start : start + num_new_tokens]
            token_ids += draft_token_ids
        return token_ids

    @property
    def num_tokens(self) -> int:
        return sum([part.num_new_tokens for part in self.scheduled])

    @property
    def num_gathered_tokens(self) -> int:
        """Tokens before the chunks of prompts, whose K/V the step gathers."""
        parts = self.scheduled
        return sum(
            [each.start for each in parts if each.num_new_tokens > 1 and not each.draft_token_ids]
        )

    @property
    def drafted(self) -> list[Scheduled]:
        """The parts with drafts, whose next tokens are not known yet: the step has to be read
        before the next one is planned.
        """
        return [part for part in self.scheduled if part.draft_token_ids]

    @property
    def shares_new_blocks(self) -> bool:
        """Whether a request reads blocks that another one fills in this step."""
        return not self.new_block_ids.isdisjoint(self.hit_block_ids)
