"""`SchedulerOutput`: one step, as the scheduler chose it and the model runner does it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mlx_paged.core import BlockCopy
from mlx_paged.request import Request, SeqId


class SwapOut(NamedTuple):
    """K/V to copy to host memory before anything is written: the first ``num_tokens`` tokens in
    these blocks.
    """

    seq_id: SeqId
    block_ids: list[int]
    num_tokens: int


class SwapIn(NamedTuple):
    """K/V to copy back: of the tokens ``start : end`` of a sequence, into the blocks that it has
    now.
    """

    seq_id: SeqId
    start: int
    end: int


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. To be done in this order: swap out, copy, swap in, compute."""

    requests: list[Request] = field(default_factory=list)  # in the order of the packed input
    num_new_tokens: list[int] = field(default_factory=list)  # of each
    copies: list[list[BlockCopy]] = field(default_factory=list)  # one list after the other
    swap_outs: list[SwapOut] = field(default_factory=list)
    swap_ins: list[SwapIn] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)  # those that could not go on
    new_block_ids: set[int] = field(
        default_factory=set
    )  # that others may hit, and that this step fills
    hit_block_ids: set[int] = field(default_factory=set)  # of the requests admitted

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new_tokens)

    @property
    def shares_new_blocks(self) -> bool:
        """Whether a request reads blocks that another one fills in this step."""
        return not self.new_block_ids.isdisjoint(self.hit_block_ids)
