"""``Speculation``: which requests of a step try drafts, and how many. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_paged.core import KVCacheManager
from mlx_paged.engine.batch import Batch, Scheduled
from mlx_paged.engine.draft_gate import ALWAYS, DraftGate
from mlx_paged.engine.drafts import Drafter
from mlx_paged.request import Request

# The tokens beside which a request of a recurrent model still tries drafts: its next one, and some
# that were computed with drafts before and have no state. Without drafts, they get one.
MAX_RUN = 7


@dataclass(frozen=True)
class Speculation:
    """Who makes drafts, and the rule for how many of them a step verifies.

    Args:
        drafter: makes them; ``None`` for none.
        num_draft_tokens: the most that a request has in a step.
    """

    drafter: Drafter | None = None
    num_draft_tokens: int = 0
    gate: DraftGate = ALWAYS

    @property
    def is_on(self) -> bool:
        return self.drafter is not None and self.num_draft_tokens > 0

    @property
    def max_more(self) -> int:
        """The most rows of a request in a step with drafts, beside its next token."""
        return self.num_draft_tokens + (MAX_RUN - 1 if self.gate.repeats_runs else 0)

    def is_likely(self, running: Sequence[Request]) -> bool:
        """Whether requests that run are likely to have drafts that pay."""
        if not self.is_on:
            return False
        decoding = [request for request in running if request.num_output_tokens]
        return any(self.num_drafts(decoding, [1] * len(decoding), len(running), len(running)))

    def num_drafts(
        self,
        requests: Sequence[Request],
        run_lengths: Sequence[int],
        num_rows: int,
        num_tokens: int,
    ) -> Sequence[int]:
        """How many drafts each request should try.

        Args:
            run_lengths: its rows without drafts.
            num_rows: of the step without drafts.
            num_tokens: that the step gives without drafts.
        """
        drafter = self.drafter
        assert drafter is not None, "speculation is on"
        acceptances = list(map(drafter.acceptance, requests))
        if not any(acceptances):
            return [0] * len(requests)
        most = self.num_draft_tokens
        return self.gate.num_drafts(acceptances, run_lengths, num_rows, num_tokens, most)

    def propose(self, request: Request, num_drafts: int) -> list[int]:
        assert self.drafter is not None, "speculation is on"
        return self.drafter.propose(request, num_drafts)

    def made(self, part: Scheduled) -> Sequence[int]:
        """The drafts of a part whose step was computed."""
        assert self.drafter is not None, "speculation is on"
        return self.drafter.made(part)

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Note how many drafts of a request were verified, and how many of them were accepted."""
        if self.drafter is not None:
            self.drafter.note(request, num_drafts, num_accepted)


NO_SPECULATION = Speculation()


def add_drafts(
    plan: Batch, speculation: Speculation, manager: KVCacheManager, max_model_len: int | None
) -> None:
    """Let requests try drafts, with what the step leaves when all others have got theirs."""
    decodes = [
        (index, part)
        for index, part in enumerate(plan.scheduled)
        if _may_have_drafts(part, manager)
    ]
    if not decodes:
        return
    num_rows = sum(part.num_new_tokens for part in plan.scheduled)
    num_tokens = sum(part.num_logit_rows - part.num_scored_rows for part in plan.scheduled)
    requests = [part.request for _, part in decodes]
    run_lengths = [part.num_new_tokens for _, part in decodes]
    counts = speculation.num_drafts(requests, run_lengths, num_rows, num_tokens)
    for (index, part), wanted in zip(decodes, counts, strict=True):
        request = part.request
        num_drafts = (
            min(wanted, _max_num_drafts(plan, request, manager, max_model_len)) if wanted else 0
        )
        if num_drafts > 0:
            drafts = speculation.propose(request, num_drafts)
            copies = manager.allocate_slots(request.seq_id, num_drafts)
            assert copies == [], "the slots are those of its own or of empty blocks"
            request.num_computed_tokens += num_drafts
            plan.token_budget -= num_drafts
            num_run = part.num_new_tokens + num_drafts
            plan.scheduled[index] = part._replace(
                num_new_tokens=num_run, num_logit_rows=1 + num_drafts, draft_token_ids=drafts
            )


def _may_have_drafts(part: Scheduled, manager: KVCacheManager) -> bool:
    """Whether a part of a step is a decode, or repeats a few tokens of a recurrent model first.

    Where the tokens of a recurrent model reach the end of a block, the block is named, and its
    state may be a checkpoint: neither is taken back with drafts behind them.
    """
    if not part.num_logit_rows or part.num_scored_rows or not part.request.num_output_tokens:
        return False
    if manager.states is None:
        return part.num_new_tokens == 1
    block_size, end = manager.pool.block_size, part.start + part.num_new_tokens
    return part.num_new_tokens <= MAX_RUN and end // block_size == part.start // block_size


def _max_num_drafts(
    plan: Batch, request: Request, manager: KVCacheManager, max_model_len: int | None
) -> int:
    """How many drafts a request may have in this step: within the step's budget and the end of
    the answer, in slots for which nothing is evicted and no request is preempted.
    """
    tables = manager.groups[request.seq_id]
    num_new_blocks = manager.pool.num_empty_blocks // len(tables)
    num_slots = min(table.num_unfilled_slots for table in tables)
    num_slots += num_new_blocks * manager.pool.block_size
    most = min(plan.token_budget, num_slots, manager.max_more(request.seq_id))
    limit = request.params.max_tokens
    if limit is not None and limit >= 0:
        most = min(most, limit - request.num_output_tokens - 1)
    if max_model_len is not None:
        most = min(most, max_model_len - request.num_tokens - 1)
    return most
