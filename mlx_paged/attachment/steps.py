"""One call of an attached model as one step of its cache: prefix hits, slots for the tokens to
compute, and rollback if it fails.

A sequence whose blocks were lost is recomputed from its tokens at its next call.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_paged.attachment.sequences import CachedSequence, CachedSequences
from mlx_paged.attachment.token_history import CallTokens
from mlx_paged.core import BlockHash, ComputedBlocks, extend_block_hashes
from mlx_paged.errors import CacheFullError
from mlx_paged.ops import AttentionMetadata

# The longest run whose logits are all computed, for speculation; of a longer one, a part of a
# prompt, those of the last token are.
MAX_LOGIT_ROWS = 16


@dataclass(slots=True)
class Run:
    """The new tokens of one sequence in a call: the columns ``begin : end`` of a row.

    The first ``num_hit_tokens`` are found in the prefix cache and not computed.
    """

    sequence: CachedSequence
    row: int
    begin: int
    end: int
    num_hit_tokens: int = 0
    seq_id: int = -1  # whose block table has the slots for them
    block_hashes: list[BlockHash] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    @property
    def num_computed(self) -> int:
        return self.num_tokens - self.num_hit_tokens

    @property
    def num_logit_rows(self) -> int:
        """The number of last tokens whose logits the step computes."""
        return self.num_computed if self.num_computed <= MAX_LOGIT_ROWS else 1

    @property
    def is_moved(self) -> bool:
        """Whether the sequence moves to cached blocks of a longer prefix than its own blocks."""
        return self.seq_id != self.sequence.state.seq_id


class StepOfCall:
    """Allocates slots for the runs of one call.

    Args:
        kept: sequences whose blocks must not be freed for it.
    """

    def __init__(
        self, sequences: CachedSequences, tokens: CallTokens, kept: Container[CachedSequence] = ()
    ):
        self._sequences = sequences
        self._cache = sequences.cache
        self._manager = sequences.held.manager
        self._tokens = tokens
        self._kept = kept
        self._reserved: list[Run] = []
        self._new_block_ids: set[int] = set()
        self._shares_new_blocks = False

    @contextmanager
    def open(self, runs: Sequence[Run]) -> Iterator[AttentionMetadata]:
        """Open a step for the tokens of these runs that have to be computed; at least one run.

        Raises:
            CacheFullError: they exceed the budget.
        """
        try:
            for run in runs:
                self._reserve(run)
            with self._cache.open_step(
                [self._manager.groups[run.seq_id] for run in runs],
                [run.num_computed for run in runs],
                [run.num_logit_rows for run in runs],
                self._shares_new_blocks,
            ) as step:
                yield step
            for run in runs:
                self._keep(run)
        except Exception:
            self._take_back()
            raise
        except BaseException:
            # Ctrl-C may have left anything but the lists of tokens inconsistent; these are enough
            # to recompute everything.
            self._sequences.held.reset()
            raise

    def _reserve(self, run: Run) -> None:
        cache, manager, state = self._cache, self._manager, run.sequence.state
        self._sequences.enter_full_blocks(state)
        computed = self._find(run)
        run.seq_id = state.seq_id
        if computed.num_tokens > len(state.tokens):
            run.num_hit_tokens = computed.num_tokens - len(state.tokens)
            run.seq_id = self._sequences.new_id()
            self._shares_new_blocks |= any(
                block.block_id in self._new_block_ids for block in computed.blocks
            )
        else:
            computed = ComputedBlocks()
        num_needed = manager.num_needed_blocks(run.seq_id, run.num_computed, computed)
        cache.make_room(num_needed)
        self._reserved.append(run)
        while True:
            copies = manager.allocate_slots(run.seq_id, run.num_computed, computed)
            if copies is not None:
                break
            if not self._sequences.give_up_one(self._kept):
                raise self._full(run, num_needed)
        cache.copy_blocks(copies)
        if run.block_hashes:
            manager.cache_blocks(run.seq_id, run.block_hashes)
            self._new_block_ids.update(self._written_block_ids(run))

    def _find(self, run: Run) -> ComputedBlocks:
        """The cached blocks of the sequence with its new tokens. Runs shorter than a block are not
        looked up, so that decodes and speculation never wait for their tokens to be read.
        """
        state, block_size = run.sequence.state, self._cache.config.block_size
        if run.num_tokens < block_size:
            return ComputedBlocks()
        ids = [*state.tokens.read(), *self._tokens.ids[run.row][run.begin : run.end]]
        run.block_hashes = state.block_hashes.copy()
        extend_block_hashes(run.block_hashes, ids, block_size)
        return self._manager.get_computed_blocks(run.block_hashes, len(ids))

    def _full(self, run: Run, num_needed: int) -> CacheFullError:
        cache = self._cache
        return CacheFullError(
            f"[attach] {run.num_tokens} more tokens of a sequence need {num_needed} blocks of "
            f"{cache.config.block_size}, the budget holds {cache.config.num_blocks} and the "
            f"sequences of this call have {cache.pool.num_used_blocks} already; raise "
            "kv_cache_bytes, or call the model with fewer sequences"
        )

    def _written_block_ids(self, run: Run) -> list[int]:
        """The blocks that the step writes for a run."""
        begin = len(run.sequence.state.tokens) + run.num_hit_tokens
        block_size = self._cache.config.block_size
        return [
            block.block_id
            for table in self._manager.groups[run.seq_id]
            for block in table.blocks[(begin - table.num_evicted_tokens) // block_size :]
        ]

    def _take_back(self) -> None:
        manager = self._manager
        try:
            # Evaluate what the failed step has written: another thread can't do it later.
            mx.eval(self._cache.arrays)
        except Exception:
            self._sequences.held.reset()
            return
        for run in reversed(self._reserved):
            if run.seq_id not in manager.tables:
                continue
            if run.block_hashes:
                # No other sequence may find rows that were never written.
                self._cache.pool.evict_blocks(self._written_block_ids(run))
            num_tokens = len(run.sequence.state.tokens)
            if run.is_moved or not num_tokens:
                manager.free(run.seq_id)
            else:
                manager.trim(run.seq_id, num_tokens)

    def _keep(self, run: Run) -> None:
        state, former_id = run.sequence.state, run.sequence.state.seq_id
        state.seq_id = run.seq_id
        state.last_call = self._sequences.num_calls
        state.tokens.append(self._tokens, run.row, run.begin, run.end)
        if run.block_hashes:
            state.block_hashes = run.block_hashes
        if run.seq_id != former_id and former_id in self._manager.tables:
            self._manager.free(former_id)
