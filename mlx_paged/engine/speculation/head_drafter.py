"""``HeadDrafter``: drafts by a head of the model, which reads the hidden rows of its steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from mlx_paged.cache import PagedKVCache
from mlx_paged.core import KVCacheManager
from mlx_paged.engine.request import PENDING_TOKEN, Completion
from mlx_paged.engine.scheduling.batch import Batch
from mlx_paged.engine.speculation.draft_model import DraftModel, DraftRun, DraftState, known_tokens
from mlx_paged.models.mlx_lm.draft_head import Head
from mlx_paged.ops import StepState

# Rows that are kept although the head has computed their tokens: a recurrent model computes up to
# this many tokens again when a draft is rejected.
NUM_ROWS_KEPT = 16
# Of this many first drafts, a head that fits its model has more accepted than this share: 0.45 to
# 0.94 are published, and a head with one fault of conversion has 0.01 to 0.3.
NUM_COUNTED = 256
LEAST_ACCEPTANCE = 0.2


class KeptRows(NamedTuple):
    """The hidden rows of the tokens ``begin:end`` of a sequence: those of a step from ``first`` on.

    The rows are sliced when they are needed, since most steps of an answer need none.
    """

    begin: int
    end: int
    step_rows: mx.array  # [num_rows, hidden_size]
    first: int

    def slice(self, begin: int, end: int) -> mx.array:
        begin, end = max(begin, self.begin), min(end, self.end)
        return self.step_rows[self.first + begin - self.begin : self.first + end - self.begin]


@dataclass(slots=True)
class HeadState(DraftState):
    """
    Attributes:
        rows: of adjacent tokens, in order, up to the last token that the model has computed.
    """

    rows: list[KeptRows] = field(default_factory=list)

    def begin(self, start: int) -> None:
        """Begin a step that computes the tokens from ``start`` on."""
        self.num_computed = min(self.num_computed, start)
        if self.rows and self.rows[-1].end > start:
            # What came after it was lost to a preemption or a rollback.
            self.rows = [each._replace(end=min(each.end, start)) for each in self.rows]
            self.rows = [each for each in self.rows if each.begin < each.end]
        if not self.rows or self.rows[-1].end < start:
            # The tokens before it are those of a block that another request has computed.
            self.rows, self.num_computed = [], start

    def keep(self, rows: KeptRows) -> None:
        first_needed = self.num_computed - NUM_ROWS_KEPT
        self.rows = [each for each in self.rows if each.end > first_needed]
        self.rows.append(rows)


class HeadDrafter(DraftModel):
    """Drafts by a head, whose layer follows the model's in the same cache.

    Slot i of that layer belongs to the pair (hidden row of token i - 1, token i), so that a block
    depends on the same tokens in all layers: prefix hits, forks, swapping and disks need no rule of
    their own. The hidden row of each block's last token is in one more layer, for a request that
    continues after it.

    In a step with drafts, the first pass of the head computes the tokens that lack its K/V, each
    further pass one draft. K/V of drafts are computed again from the model's own rows, whether the
    drafts were accepted or not.

    Args:
        model: the head.
        cache: has the head's layer and that of hidden rows last.
        manager: of the block tables of the cache's sequences.
    """

    model: Head
    cache: PagedKVCache

    def __init__(self, model: Head, cache: PagedKVCache, manager: KVCacheManager):
        super().__init__(model, cache, manager)
        self.takes_normed = model.takes_normed
        self._no_row = mx.zeros((1, model.hidden_size), model.dtype)
        mx.eval(self._no_row)
        self._num_counted = self._num_accepted = 0
        # The last layer holds hidden rows.
        self._layers = slice(len(cache.layers) - 2, len(cache.layers) - 1)
        self._group = cache.config.group_of(len(cache.layers) - 1)

    def note(self, completion: Completion, num_drafts: int, num_accepted: int) -> None:
        super().note(completion, num_drafts, num_accepted)
        is_made = bool(self._state_of(completion, completion.num_computed_tokens).drafts)
        if not is_made or not num_drafts or self._num_counted == NUM_COUNTED:
            return
        self._num_counted += 1
        self._num_accepted += num_accepted > 0
        if self._num_counted == NUM_COUNTED and self._num_accepted < LEAST_ACCEPTANCE * NUM_COUNTED:
            warnings.warn(
                f"[engine] {self._num_accepted} of the first {NUM_COUNTED} drafts of the head "
                f"{self.model.name} were accepted, fewer than {LEAST_ACCEPTANCE:.0%}: answers are "
                "right, but drafts cost more than they gain. Likely causes: norms that were "
                "converted twice or not at all, a head of another version of the model, a head in "
                "too few bits, or text that is hard to predict",
                stacklevel=2,
            )

    def run(self, batch: Batch, states: Sequence[StepState] | None) -> None:
        """Launch the computation of the drafts of a step, before the model's."""
        runs, drafted = [], []
        size = self.cache.config.block_size
        for part in batch.scheduled:
            completion = part.completion
            num_drafts = part.draft_token_ids.count(PENDING_TOKEN)
            state = self._state_of(completion, part.start)
            state.begin(part.start)
            state.drafts = []
            if num_drafts:
                end = part.start + part.num_new_tokens - num_drafts
                runs.append(DraftRun(completion, state.num_computed, end, 1))
                drafted.append((completion, state, num_drafts))
            elif state.num_computed // size < part.start // size:
                # Accepted drafts have filled a block, which others may hit.
                runs.append(DraftRun(completion, state.num_computed, part.start, 0))
        if runs:
            made = self._catch_up(runs, known_tokens(runs), batch.shares_new_blocks)
            self._draw(drafted, *made)

    def follow(
        self,
        batch: Batch,
        tokens: mx.array,
        hidden: mx.array | None,
        states: Sequence[StepState] | None,
    ) -> None:
        """Keep the hidden rows of a step, and compute the head's K/V of prompts and of blocks that
        are full now: others may hit them.
        """
        assert hidden is not None
        self._keep_last_rows(batch, hidden)
        size = self.cache.config.block_size
        runs: list[DraftRun] = []
        token_ids: list[int] = []
        pending: list[tuple[int, int]] = []  # the places in token_ids and in tokens
        row = 0
        for part in batch.scheduled:
            completion = part.completion
            state = self._state_of(completion, part.start)
            end = part.start + part.num_new_tokens
            state.keep(KeptRows(part.start, end, hidden, row))
            row += part.num_new_tokens
            if PENDING_TOKEN in part.draft_token_ids:
                continue  # It was computed to make them.
            end -= len(part.draft_token_ids)
            is_full = state.num_computed // size < end // size
            if end - part.start > 1 or is_full:
                runs.append(DraftRun(completion, state.num_computed, end, 0))
                token_ids += completion.token_ids[state.num_computed : end]
                if part.has_pending_token:
                    pending.append((len(token_ids) - 1, row - 1))
        if not runs:
            return
        known = mx.array(token_ids, dtype=mx.int32)
        if pending:
            places, rows = mx.array(list(zip(*pending, strict=True)), dtype=mx.int32)
            known[places] = tokens[rows]
        self._wait_for(hidden)
        self._catch_up(runs, known, batch.shares_new_blocks)
        self._shorten_rows(runs)

    def _keep_last_rows(self, batch: Batch, hidden: mx.array) -> None:
        """Keep the rows of the last tokens of the blocks that a step has filled."""
        size = self.cache.config.block_size
        blocks: list[int] = []
        rows: list[int] = []
        row = 0
        for part in batch.scheduled:
            first, last = part.start // size, (part.start + part.num_new_tokens) // size
            if first < last:
                blocks += self._table(part.completion)[first:last]
                ends = range((first + 1) * size, (last + 1) * size, size)
                rows += [row + end - 1 - part.start for end in ends]
            row += part.num_new_tokens
        if blocks:
            self._wait_for(hidden)
            self.cache.layers[-1].write_hidden_rows(blocks, hidden[mx.array(rows)])

    def _wait_for(self, hidden: mx.array) -> None:
        """Wait for the model's part of a step where slabs that it still reads would be copied by
        the next write.
        """
        if not self.cache.can_run_ahead:
            mx.eval(hidden, self.cache.arrays)

    def _table(self, completion: Completion) -> list[int]:
        return self._manager.groups[completion.seq_id][self._group].block_ids

    def _catch_up(
        self, runs: Sequence[DraftRun], tokens: mx.array, shares_new_blocks: bool
    ) -> tuple[mx.array, mx.array | None]:
        """Compute the head's K/V of known tokens ``[num_tokens]``, from the model's rows."""
        rows: list[mx.array] = []
        for completion, begin, end, *_ in runs:
            state = self._state_of(completion, begin)
            first = begin - 1
            if not state.rows or state.rows[0].begin > first:
                rows.append(self._row_before(completion, begin))
                first += 1
            used = [each for each in state.rows if each.end > first and each.begin < end - 1]
            rows += [each.slice(first, end - 1) for each in used]
            state.num_computed = end
        return self._compute(runs, tokens, mx.concatenate(rows), shares_new_blocks)

    def _row_before(self, completion: Completion, position: int) -> mx.array:
        """The hidden row ``[1, hidden_size]`` before a request's first own token. It is zeros
        before the first token of all, and where it is not known: within a block that the request
        copied from another.
        """
        index, offset = divmod(position, self.cache.config.block_size)
        if offset or not index:
            return self._no_row
        block_id = self._table(completion)[index - 1]
        return self.cache.layers[-1].read_hidden_row(block_id, self.model.hidden_size)

    def _shorten_rows(self, runs: Sequence[DraftRun]) -> None:
        """Keep the last rows of long runs only: copies, as a slice keeps all rows of its step."""
        for completion, begin, end, *_ in runs:
            state = self._state_of(completion, begin)
            (*_, last) = state.rows
            if end - begin > NUM_ROWS_KEPT:
                first = max(last.begin, end - NUM_ROWS_KEPT)
                rows = last.slice(first, last.end)
                copied = mx.take(rows, mx.arange(len(rows)), axis=0)
                mx.async_eval(copied)
                state.rows = [KeptRows(first, last.end, copied, 0)]

    def _compute(
        self,
        runs: Sequence[DraftRun],
        tokens: mx.array,
        rows: mx.array | None,
        shares_new_blocks: bool = False,
    ) -> tuple[mx.array, mx.array | None]:
        """K/V of drafts do not count as computed, since their rows are the head's own."""
        assert rows is not None
        with self._open_pass(runs, shares_new_blocks):
            made = self.model.draft(tokens, rows, self.cache.layers[self._layers])
            self._launch(*made)
        return made

    def _state_of(self, completion: Completion, num_computed: int) -> HeadState:
        state = completion.draft_state
        if not isinstance(state, HeadState):
            state = HeadState(num_computed)
            first = completion.request.completions[0].draft_state
            if isinstance(first, HeadState):  # It was forked from the first completion.
                state.rows = list(first.rows)
            completion.draft_state = state
        return state


class AssistantDrafter(HeadDrafter):
    """Drafts by an assistant, which reads the model's K/V and keeps none.

    Each pass of a round is a step of the last token with K/V that writes nothing, so that queries
    have its position and see what it sees. Of hidden rows it needs that token's only, which is of
    the request's latest step.
    """

    def __init__(self, model: Head, cache: PagedKVCache, manager: KVCacheManager):
        super().__init__(model, cache, manager)
        self._layers = slice(len(cache.layers))

    def follow(
        self,
        batch: Batch,
        tokens: mx.array,
        hidden: mx.array | None,
        states: Sequence[StepState] | None,
    ) -> None:
        """Keep the hidden rows of a step."""
        assert hidden is not None
        runs, row = [], 0
        for part in batch.scheduled:
            end = part.start + part.num_new_tokens
            state = self._state_of(part.completion, part.start)
            state.rows, state.num_computed = [KeptRows(part.start, end, hidden, row)], end
            runs.append(DraftRun(part.completion, part.start, end, 0))
            row += part.num_new_tokens
        self._shorten_rows(runs)

    def _row_before(self, completion: Completion, position: int) -> mx.array:
        return self._no_row  # No layer of the cache holds rows.

    def _compute(
        self,
        runs: Sequence[DraftRun],
        tokens: mx.array,
        rows: mx.array | None,
        shares_new_blocks: bool = False,
    ) -> tuple[mx.array, mx.array | None]:
        assert rows is not None
        ends = [(run.completion, run.completion.num_tokens - 1) for run in runs]
        read = [DraftRun(completion, end - 1, end, 1) for completion, end in ends]
        with self._open_pass(read, shares_new_blocks=False, reads_only=True):
            made = self.model.draft(tokens, rows, self.cache.layers[self._layers])
            self._launch(*made)
        return made
