"""``KVCache``: what all KV caches share, however they store rows: blocks, growth, an open step."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import mlx.core as mx

from mlx_paged.cache.config import KVCacheConfig
from mlx_paged.cache.layer import LayerKV
from mlx_paged.core import BlockCopy, BlockPool, BlockTable, KVCacheManager, SharedBudget
from mlx_paged.ops import AttentionMetadata, Backend, StepState
from mlx_paged.request import SeqId

INITIAL_BLOCKS = 64
ALL_LAYERS = slice(None)


class KVCache(ABC):
    """K/V of several sequences in all layers of a model, in blocks of a pool.

    A :class:`KVCacheManager` over the pool assigns blocks to sequences: that of an engine, or of
    :class:`Sequences` where a cache is used without one. A step adds rows to allocated slots::

        with cache.open_step(tables, [1, 17]) as step:  # a decode and a prompt of 17: 18 rows
            logits = model(tokens, cache.layers, step.logit_rows)
            mx.eval(logits, cache.arrays)               # before the next step is built

    Args:
        config: shape and budget.
        initial_blocks: blocks to allocate at first; more are added when they are needed.

    Attributes:
        pool: the blocks, including the null block.
        all_can: called before the pool changes with whether this cache can make the change; returns
            whether all ranks that hold a part of the K/V can. The default is for a single process.
        shared_budget: that recurrent states share with the blocks, if they do.
        max_single_run: query runs of up to this many tokens attend token by token, with the bits of
            steps of one token (:meth:`AttentionMetadata.token_by_token`); 0 for none.
    """

    kind: ClassVar[str]

    def __init__(self, config: KVCacheConfig, initial_blocks: int = INITIAL_BLOCKS):
        self.config = config
        self.all_can: Callable[[bool], bool] = bool
        self.shared_budget: SharedBudget | None = None
        self.max_single_run = 0
        self._num_budget_blocks = config.num_blocks
        # The open step for each group of layers, and the layers that it runs.
        self._steps: Sequence[AttentionMetadata] = ()
        self._open_layers = ALL_LAYERS
        self._initial_blocks = min(initial_blocks, config.num_blocks)
        self.pool = BlockPool(self._initial_blocks + 1, config.block_size)
        self._begin()

    def __repr__(self) -> str:
        config = self.config
        return (
            f"{type(self).__name__}({config.num_blocks:,} blocks of {config.block_size} tokens, "
            f"{self.nbytes_held:,} of {config.nbytes:,} bytes held)"
        )

    def reset(self) -> None:
        """Drop all K/V, an open step, and storage that an interrupt left inconsistent. Block tables
        over the pool have to be dropped as well (:meth:`KVCacheManager.reset`).
        """
        self.close_step()
        self.pool.reset(self._initial_blocks + 1)
        self._begin()

    def _begin(self) -> None:
        self._num_available_blocks: int | None = None
        self._allocate_layers()

    # Implemented by each kind of storage

    @property
    @abstractmethod
    def layers(self) -> Sequence[LayerKV]:
        """One per layer of the model: all that a model sees of a cache."""

    @property
    def backend(self) -> Backend | None:
        """The attention backend; ``None`` is MLX's own SDPA."""
        return None

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next step may be built while one runs, without copies of K/V."""
        return False

    @abstractmethod
    def _allocate_layers(self) -> None:
        """Drop the layers, then make new ones with storage for the blocks of the pool."""

    @abstractmethod
    def _prepare(
        self, tables: Sequence[Sequence[BlockTable]], steps: Sequence[AttentionMetadata]
    ) -> None:
        """Prepare storage for the rows of a step, which is described for each group of layers.

        Args:
            tables: of each sequence of the step, as for :meth:`open_step`.
        """

    @abstractmethod
    def _finish(self) -> None:
        """Called after the body of a step has returned."""

    @abstractmethod
    def _grow(self, num_new_blocks: int) -> bool:
        """Allocate storage for more blocks, or return False and change nothing without memory."""

    @abstractmethod
    def _fit(self) -> None:
        """Free storage that no sequence needs, after the pool has shrunk."""

    def fork(self, manager: KVCacheManager, seq: SeqId, new_seq: SeqId) -> bool:
        """Add a sequence that begins with the tokens of another one; returns False, without a
        change, if it does not fit. Both share all blocks until one of them writes.
        """
        manager.fork(seq, new_seq)
        return True

    @abstractmethod
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in all layers: ``(source, destination)`` ids."""

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """The arrays whose evaluation completes all writes of the last step."""

    @property
    @abstractmethod
    def nbytes_held(self) -> int:
        """Bytes allocated for K/V."""

    # Steps

    @contextmanager
    def open_step(
        self,
        tables: Sequence[Sequence[BlockTable]],
        num_new_tokens: Sequence[int],
        num_logit_rows: Sequence[int] | None = None,
        shares_new_blocks: bool = False,
        layers: slice = ALL_LAYERS,
        context_lens: Sequence[int] | None = None,
        states: list[StepState] | None = None,
        reads_only: bool = False,
    ) -> Iterator[AttentionMetadata]:
        """Open a step whose slots are allocated. No block table may change until it is closed.

        Args:
            tables: per sequence, in the order of the packed rows, the block tables of all groups of
                layers (``manager.groups[seq]``).
            num_new_tokens: per sequence, the number of its last allocated slots to fill.
            num_logit_rows: per sequence, how many of its last tokens need logits; 1 by default. If
                none do, the step still has one row of logits, since some MLX operations don't
                accept empty arrays.
            shares_new_blocks: see :class:`AttentionMetadata`.
            layers: the layers that the step runs, if two models share the cache.
            context_lens: per sequence, where its new tokens end; by default after all allocated
                slots.
            states: per sequence, for a model with recurrent layers, which updates them.
            reads_only: whether the K/V of the new tokens are stored already.
        """
        wants_logits = True
        if num_logit_rows is not None:
            num_logit_rows = list(num_logit_rows)
            wants_logits = any(num_logit_rows)
            if not wants_logits:
                num_logit_rows[-1] = 1
        steps = [
            self._step_of(
                [of_groups[group] for of_groups in tables],
                num_new_tokens,
                num_logit_rows,
                shares_new_blocks,
                context_lens,
                wants_logits,
                states,
            )
            for group in range(len(self.config.groups))
        ]
        self._steps, self._open_layers = steps, layers
        try:
            if not reads_only:
                self._prepare(tables, steps)
            opened = range(len(self.layers))[layers]
            for layer_group, group_step in zip(self.config.groups, steps, strict=True):
                for index in layer_group.layers:
                    if index in opened:
                        self.layers[index].open(group_step)
            yield steps[0]
            if not reads_only:
                self._finish()
        finally:
            self.close_step()

    def _step_of(
        self,
        tables: Sequence[BlockTable],
        num_new_tokens: Sequence[int],
        num_logit_rows: list[int] | None,
        shares_new_blocks: bool,
        ends: Sequence[int] | None,
        wants_logits: bool,
        states: list[StepState] | None,
    ) -> AttentionMetadata:
        """A step of one group of layers, whose new tokens end at ``ends``."""
        # Valid by construction: the manager guarantees it. No table changes during the step, so its
        # live arrays can be used.
        block_tables = [table.packed_block_ids for table in tables]
        context_lens = [table.num_held_tokens for table in tables]
        offsets = None
        if not self.config.keeps_all:
            offsets = [
                table.num_evicted_tokens - table.positions.position_origin for table in tables
            ]
        if ends is not None:
            pairs = zip(tables, ends, strict=True)
            context_lens = [end - table.num_evicted_tokens for table, end in pairs]
            # A table ends with the block of the last token.
            lens = zip(block_tables, context_lens, strict=True)
            block_tables = [table[: -(-end // self.config.block_size)] for table, end in lens]
        step = AttentionMetadata(
            block_tables,
            context_lens,
            list(num_new_tokens),
            self.config.block_size,
            shares_new_blocks,
            num_logit_rows,
            wants_logits,
            known_max_block_id=self.pool.num_blocks - 1,
            position_offsets=offsets,
            states=states,
        )
        return step.token_by_token(self.max_single_run)

    def close_step(self) -> None:
        """Close the open step, if there is one, whether or not its rows were written."""
        self._steps = ()
        for layer in self.layers:
            layer.close()

    # Memory

    @property
    def nbytes_budget(self) -> int:
        """The budget in bytes, with the recurrent states that share it."""
        if self.shared_budget is not None:
            return self.shared_budget.sizes.budget
        return (self._num_budget_blocks + 1) * self.config.nbytes_per_block

    def set_budget(self, nbytes: int) -> int:
        """Change the budget, to at most the one that the cache was made with; returns by how many
        blocks the pool has to shrink for it. Then :meth:`shrink_slabs` completes the change.
        """
        if self.shared_budget is not None:
            return self.shared_budget.set_budget(nbytes)
        num_blocks = max(1, nbytes // self.config.nbytes_per_block - 1)
        self._num_budget_blocks = min(num_blocks, self.config.num_blocks)
        return max(0, self.pool.num_usable_blocks - self._num_budget_blocks)

    def max_num_blocks(self, num_seqs: int = 1) -> int:
        """The most blocks that the budget holds beside the recurrent states of this many sequences,
        if no others run.
        """
        if self.shared_budget is None:
            return self._available(self._num_budget_blocks)
        return self._available(self.shared_budget.sizes.max_num_blocks(num_seqs))

    def num_growable_blocks(self, num_new_seqs: int = 0) -> int:
        """Blocks that may be added to the pool within the budget while these more sequences run;
        negative if their recurrent states take some of its blocks.
        """
        most = self._num_budget_blocks
        if self.shared_budget is not None:
            most = self.shared_budget.max_num_blocks(num_new_seqs)
        return self._available(most) - self.pool.num_usable_blocks

    def _available(self, num_blocks: int) -> int:
        most = self._num_available_blocks
        return num_blocks if most is None else min(num_blocks, most)

    def make_room(self, num_blocks: int, num_new_seqs: int = 0, num_found: int = 0) -> None:
        """Grow until ``num_blocks`` can be allocated without an eviction, as far as the budget and
        the device allow.

        Args:
            num_new_seqs: sequences that begin with these blocks.
            num_found: free blocks of the prefix cache that they begin with, too.
        """
        most = self.num_growable_blocks(num_new_seqs)
        num_missing = min(num_blocks - self.pool.num_empty_blocks, most)
        if num_missing <= 0:
            return
        if self.shared_budget is not None:
            most = min(most, self.shared_budget.make_room(num_blocks + num_found, num_new_seqs))
            num_missing = min(num_missing, most)
            if num_missing <= 0:
                return
        num_usable = self.pool.num_usable_blocks
        # Doubling keeps the cost of the copies constant per token. If it fails, what is needed may
        # still fit.
        doubled = min(max(num_missing, num_usable), most)
        for num_new_blocks in dict.fromkeys((doubled, num_missing)):
            has_grown = self._grow(num_new_blocks)
            if self.all_can(has_grown):
                self.pool.grow(num_new_blocks)
                return
            if has_grown:
                self._fit()
        # The present size is the budget until memory is freed by a shrink.
        self._num_available_blocks = num_usable
        warnings.warn(
            f"[{self.kind} cache] no memory for more than {num_usable} blocks, which are the "
            "budget now",
            stacklevel=2,
        )

    def make_room_for_states(self, num_new_seqs: int) -> bool:
        """Make the recurrent states of more sequences fit into the budget by the eviction of
        checkpoints; False, without a change, if slabs have to shrink first.
        """
        shared = self.shared_budget
        return shared is None or shared.make_room_for_states(num_new_seqs)

    def num_blocks_to_shrink_by(self, num_new_seqs: int) -> int:
        """By how many blocks the pool has to shrink for the recurrent states of more sequences."""
        shared = self.shared_budget
        return 0 if shared is None else shared.num_blocks_to_shrink_by(num_new_seqs)

    def shrink_slabs(self, copies: Sequence[BlockCopy]) -> None:
        """Shrink the slabs to the pool, after these copies of blocks that have moved, and evict
        checkpoints that the budget no longer holds.
        """
        self.copy_blocks(copies)
        self._fit()
        if self.shared_budget is not None:
            self.shared_budget.evict_excess()

    def shrink(self) -> int:
        """Free memory that no sequence needs; returns how many bytes. Blocks cached there are
        evicted, and the remaining slabs are copied.

        Raises:
            RuntimeError: a step is open.
        """
        if self._steps:
            raise RuntimeError(f"[{self.kind} cache] a step is open; shrink after it")
        self._num_available_blocks = None
        used = (block.block_id for block in reversed(self.pool.blocks) if block.ref_cnt)
        num_blocks = max(next(used, 0), self._initial_blocks) + 1
        before = self.nbytes_held
        if num_blocks < self.pool.num_blocks:
            is_shrunk = self.pool.shrink_to(num_blocks)
            assert is_shrunk, "no block after the last used one is in use"
        self._fit()
        return before - self.nbytes_held
