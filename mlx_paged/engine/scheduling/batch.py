"""``Batch``: one step as the scheduler planned it. Pure Python: the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from mlx_paged.core import BlockCopy, BlockLoad, KeyShift
from mlx_paged.engine.request import PENDING_TOKEN, Completion
from mlx_paged.request import SeqId


class Scheduled(NamedTuple):
    """A request's part of a step: the tokens ``start : start + num_new_tokens`` are computed, the
    last of which may be drafts.
    """

    completion: Completion
    start: int
    num_new_tokens: int
    num_logit_rows: int  # of its last tokens; 0 before the end of its prompt
    # The first of these rows, which are for the log-probabilities of the prompt.
    num_scored_rows: int = 0
    draft_token_ids: Sequence[int] = ()

    @property
    def has_pending_token(self) -> bool:
        """Whether its last token is sampled by the previous step."""
        return self.completion.token_ids[self.start + self.num_new_tokens - 1] == PENDING_TOKEN


class SwapOut(NamedTuple):
    """Copy these blocks of each group of layers to the swap space."""

    seq_id: SeqId
    block_ids: list[list[int]]


class CopyBlocks(NamedTuple):
    """Copy blocks within the slabs, for copy-on-write."""

    copies: list[BlockCopy]


class ShiftKeys(NamedTuple):
    """Copy blocks of a group of layers with rotated keys, so that sinks follow their window."""

    group: int
    shift: KeyShift


class SwapIn(NamedTuple):
    """Copy blocks back from the swap space, into the new blocks of the sequence."""

    seq_id: SeqId
    loads: list[BlockLoad]


Transfer: TypeAlias = SwapOut | CopyBlocks | ShiftKeys | SwapIn
# What a step may hold: anything; or, in a deterministic engine, one chunk of a prompt, or only
# rows of requests whose prompts are computed.
Taken: TypeAlias = Literal["all", "chunk", "rows"]


@dataclass(slots=True)
class Batch:
    """One step: the transfers, in order, then the requests, in the packed order.

    The scheduler fills it while it plans the step; the budgets are what is still left.
    """

    token_budget: int = field(default=0, compare=False)
    scored_rows_budget: int = field(default=0, compare=False)
    only: Completion | None = field(default=None, compare=False)  # no other request may run
    # Planned before the tokens of the previous step were read.
    is_ahead: bool = field(default=False, compare=False)
    takes: Taken = field(default="all", compare=False)
    # Requests that don't fit in this step, while those of some other users are still admitted.
    passed: Sequence[Completion] = field(default=(), compare=False)
    scheduled: list[Scheduled] = field(default_factory=list)
    swap_outs: list[SwapOut] = field(default_factory=list)
    copies: list[CopyBlocks | SwapIn | ShiftKeys] = field(default_factory=list)  # in this order
    preempted: list[Completion] = field(default_factory=list)
    finished: list[Completion] = field(default_factory=list)  # can't continue
    begun: list[Completion] = field(default_factory=list)  # the ones that run for the first time
    # Blocks that this step fills, which others may hit. A block that is filled by a token of the
    # previous step is added when that token is known.
    new_block_ids: set[int] = field(default_factory=set)
    hit_block_ids: set[int] = field(default_factory=set)  # found by the admitted requests

    @property
    def is_full(self) -> bool:
        """Whether it has its chunk, beside which nothing else runs."""
        return self.takes == "chunk" and bool(self.scheduled)

    def holds(self, completion: Completion) -> bool:
        """Whether the next tokens of a running request are what it takes."""
        is_chunk = completion.num_computed_tokens < completion.num_prompt_tokens
        return is_chunk == (self.takes == "chunk")

    @property
    def transfers(self) -> list[Transfer]:
        """In order: blocks are swapped out before other transfers overwrite them."""
        return [*self.swap_outs, *self.copies]

    @property
    def completions(self) -> list[Completion]:
        return [part.completion for part in self.scheduled]

    @property
    def token_ids(self) -> list[int]:
        """``[num_tokens]``, packed."""
        token_ids: list[int] = []
        for completion, start, num_new_tokens, _, _, draft_token_ids in self.scheduled:
            token_ids += completion.token_ids[start : start + num_new_tokens]
            token_ids += draft_token_ids
        return token_ids

    @property
    def num_tokens(self) -> int:
        return sum([part.num_new_tokens for part in self.scheduled])

    @property
    def num_gathered_tokens(self) -> int:
        """The tokens before the chunks of prompts, whose K/V the step gathers."""
        parts = self.scheduled
        return sum(
            [each.start for each in parts if each.num_new_tokens > 1 and not each.draft_token_ids]
        )

    @property
    def drafted(self) -> list[Scheduled]:
        """The parts with drafts. A step with drafts has to be read before the next is planned."""
        return [part for part in self.scheduled if part.draft_token_ids]

    @property
    def shares_new_blocks(self) -> bool:
        """Whether a request reads blocks that another request fills in this step."""
        return not self.new_block_ids.isdisjoint(self.hit_block_ids)
