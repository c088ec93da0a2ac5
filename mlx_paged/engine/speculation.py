"""``Speculation``: which requests of a step have drafts, and how many. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_paged.core import KVCacheManager
from mlx_paged.engine.batch import Batch, Scheduled
from mlx_paged.engine.draft_gate import ALWAYS, DraftGate
from mlx_paged.engine.drafts import Drafter, PromptLookup
from mlx_paged.engine.request import Completion

# A request of a recurrent model may have drafts if its step computes at most this many other
# tokens: the next one, and those whose state was discarded with a rejected draft.
MAX_RUN = 7
_PROMPT_LOOKUP = PromptLookup()


@dataclass(frozen=True)
class Speculation:
    """A drafter, and the rule for how many drafts a step verifies.

    Args:
        num_draft_tokens: the most drafts of a request in a step; 0 for no speculation.
    """

    drafter: Drafter = _PROMPT_LOOKUP
    num_draft_tokens: int = 0
    gate: DraftGate = ALWAYS

    @property
    def is_on(self) -> bool:
        return self.num_draft_tokens > 0

    @property
    def max_more(self) -> int:
        """The most rows of a request in a step with drafts, in addition to its next token."""
        return self.num_draft_tokens + (MAX_RUN - 1 if self.gate.repeats_runs else 0)

    def is_likely(self, running: Sequence[Completion]) -> bool:
        """Whether running requests are likely to have drafts that pay off."""
        if not self.is_on:
            return False
        decoding = [completion for completion in running if completion.num_output_tokens]
        return any(self.num_drafts(decoding, [1] * len(decoding), len(running), len(running)))

    def num_drafts(
        self,
        completions: Sequence[Completion],
        run_lengths: Sequence[int],
        num_rows: int,
        num_tokens: int,
    ) -> Sequence[int]:
        """How many drafts each request should have.

        Args:
            run_lengths: rows of each request without drafts.
            num_rows: rows of the step without drafts.
            num_tokens: tokens that the step samples without drafts.
        """
        acceptances = list(map(self.drafter.acceptance, completions))
        if not any(acceptances):
            return [0] * len(completions)
        most = self.num_draft_tokens
        return self.gate.num_drafts(acceptances, run_lengths, num_rows, num_tokens, most)


NO_SPECULATION = Speculation()


def add_drafts(
    plan: Batch, speculation: Speculation, manager: KVCacheManager, max_model_len: int | None
) -> None:
    """Add drafts to the decodes of a step, within its remaining token budget."""
    decodes = [
        (index, part)
        for index, part in enumerate(plan.scheduled)
        if _may_have_drafts(part, manager)
    ]
    if not decodes:
        return
    num_rows = sum(part.num_new_tokens for part in plan.scheduled)
    num_tokens = sum(part.num_logit_rows - part.num_scored_rows for part in plan.scheduled)
    completions = [part.completion for _, part in decodes]
    run_lengths = [part.num_new_tokens for _, part in decodes]
    counts = speculation.num_drafts(completions, run_lengths, num_rows, num_tokens)
    for (index, part), wanted in zip(decodes, counts, strict=True):
        completion = part.completion
        num_drafts = (
            min(wanted, _max_num_drafts(plan, completion, manager, max_model_len)) if wanted else 0
        )
        if num_drafts > 0:
            drafts = speculation.drafter.propose(completion, num_drafts)
            copies = manager.allocate_slots(completion.seq_id, num_drafts)
            assert copies == [], "the slots are in blocks of its own or in empty ones"
            completion.num_computed_tokens += num_drafts
            plan.token_budget -= num_drafts
            num_run = part.num_new_tokens + num_drafts
            plan.scheduled[index] = part._replace(
                num_new_tokens=num_run, num_logit_rows=1 + num_drafts, draft_token_ids=drafts
            )


def _may_have_drafts(part: Scheduled, manager: KVCacheManager) -> bool:
    """Whether a part of a step is a decode, which may recompute a few tokens of a recurrent model.

    A run of a recurrent model that completes a block has no drafts: the block is hashed, and its
    state may become a checkpoint, neither of which can be rolled back.
    """
    if not part.num_logit_rows or part.num_scored_rows or not part.completion.num_output_tokens:
        return False
    if manager.states is None:
        return part.num_new_tokens == 1
    block_size, end = manager.pool.block_size, part.start + part.num_new_tokens
    return part.num_new_tokens <= MAX_RUN and end // block_size == part.start // block_size


def _max_num_drafts(
    plan: Batch, completion: Completion, manager: KVCacheManager, max_model_len: int | None
) -> int:
    """The most drafts of a request in this step: within the token budget, the length limits, and
    the slots that are free without an eviction or a preemption.
    """
    tables = manager.groups[completion.seq_id]
    num_new_blocks = manager.pool.num_empty_blocks // len(tables)
    num_slots = min(table.num_unfilled_slots for table in tables)
    num_slots += num_new_blocks * manager.pool.block_size
    most = min(plan.token_budget, num_slots, manager.max_more(completion.seq_id))
    limit = completion.request.params.max_tokens
    if limit is not None and limit >= 0:
        most = min(most, limit - completion.num_output_tokens - 1)
    if max_model_len is not None:
        most = min(most, max_model_len - completion.num_tokens - 1)
    return most
