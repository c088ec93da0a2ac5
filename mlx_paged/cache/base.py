"""What every KV cache does, however it stores its rows: blocks, growth, and an open step."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import mlx.core as mx

from mlx_paged.cache.config import KVCacheConfig
from mlx_paged.cache.layer import LayerKV
from mlx_paged.core import BlockCopy, BlockPool, BlockTable
from mlx_paged.ops import AttentionMetadata, Backend, StepState

INITIAL_BLOCKS = 64
ALL_LAYERS = slice(None)


class KVCache(ABC):
    """K/V of several sequences in all layers of a model, in blocks of a pool.

    Which blocks are whose is for a :class:`KVCacheManager` over the pool: that of an engine, or of
    :class:`Sequences` where a cache is used without one. A step adds rows to the slots that their
    block tables have for them::

        with cache.open_step(tables, [1, 17]) as step:  # a decode and a prompt of 17: 18 rows
            logits = model(tokens, cache.layers, step.logit_rows)
            mx.eval(logits, cache.arrays)               # before the next step is built

    Args:
        config: shape and budget.
        initial_blocks: blocks to begin with; more are added when they are needed.

    Attributes:
        pool: the blocks. It has one more than sequences can hold, the null block.
        all_can: whether all processes that hold a part of these K/V can do what this cache can;
            called before the pool changes. A cache that is used by itself asks no one.
    """

    kind: ClassVar[str]

    def __init__(self, config: KVCacheConfig, initial_blocks: int = INITIAL_BLOCKS):
        self.config = config
        self.all_can: Callable[[bool], bool] = bool
        # The open one, for each group of layers, and which layers it runs.
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
        """Forget all K/V, an open step, and storage that an interrupt left uneven. Block tables
        over the pool have to be forgotten, too (:meth:`KVCacheManager.reset`).
        """
        self.close_step()
        self.pool.reset(self._initial_blocks + 1)
        self._begin()

    def _begin(self) -> None:
        self._max_num_blocks = self.config.num_blocks
        self._allocate_layers()

    # What a kind of storage implements

    @property
    @abstractmethod
    def layers(self) -> Sequence[LayerKV]:
        """One per layer of the model, which sees nothing else of a cache."""

    @property
    def backend(self) -> Backend | None:
        """What computes attention; ``None`` is MLX's own SDPA."""
        return None

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next step may be built while one runs, and nothing is copied for that."""
        return False

    @abstractmethod
    def _allocate_layers(self) -> None:
        """Drop the layers, then make new ones with storage for the blocks of the pool."""

    @abstractmethod
    def _prepare(
        self, tables: Sequence[Sequence[BlockTable]], steps: Sequence[AttentionMetadata]
    ) -> None:
        """Make storage ready for the rows of a step that opens, described for each group of layers.

        Args:
            tables: of each sequence of the step, as :meth:`open_step` has them.
        """

    @abstractmethod
    def _finish(self) -> None:
        """The body of a step has returned."""

    @abstractmethod
    def _grow(self, num_new_blocks: int) -> bool:
        """Make storage ready for more blocks; False, and nothing has changed, if there is no
        memory.
        """

    @abstractmethod
    def _fit(self) -> None:
        """Give back storage that no sequence needs, after the pool has shrunk."""

    @abstractmethod
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in all layers: ``(source, destination)`` ids."""

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for every write of the last step to have happened."""

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
    ) -> Iterator[AttentionMetadata]:
        """Open a step whose slots are allocated; it is closed in any case. No table may change
        before that.

        Args:
            tables: of each sequence, in the order of the packed rows, the block tables of all
                groups of layers (``manager.groups[seq]``).
            num_new_tokens: of each sequence, the last ones that it has slots for.
            num_logit_rows: of how many of its last tokens each sequence wants logits; 1 of each by
                default. If no sequence wants any, the step still has one row of logits: MLX
                refuses some products of no rows.
            shares_new_blocks: see :class:`AttentionMetadata`.
            layers: those that the step runs; of two models on one cache, each runs its own.
            context_lens: of each sequence, where its new tokens end; by default all that it has
                slots for.
            states: of each sequence, for a model with recurrent layers, which sets what follows.
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
            self._prepare(tables, steps)
            opened = range(len(self.layers))[layers]
            for layer_group, group_step in zip(self.config.groups, steps, strict=True):
                for index in layer_group.layers:
                    if index in opened:
                        self.layers[index].open(group_step)
            yield steps[0]
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
        # Valid by construction: the manager guarantees it. No table changes before the step is
        # over, so its live arrays will do.
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
        return AttentionMetadata(
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

    def close_step(self) -> None:
        """Forget the open step, if there is one, whether or not its rows were written."""
        self._steps = ()
        for layer in self.layers:
            layer.close()

    # Memory

    @property
    def num_growable_blocks(self) -> int:
        """Blocks that the budget allows beyond those in the pool."""
        return self._max_num_blocks - self.pool.num_usable_blocks

    def make_room(self, num_blocks: int) -> None:
        """Grow until ``num_blocks`` can be taken without evicting any, as far as the budget and the
        device allow.
        """
        num_missing = min(num_blocks - self.pool.num_empty_blocks, self.num_growable_blocks)
        if num_missing <= 0:
            return
        num_usable = self.pool.num_usable_blocks
        # Doubling makes the copies of growth a constant per token. Where that can't be had, what is
        # needed may be.
        doubled = min(max(num_missing, num_usable), self.num_growable_blocks)
        for num_new_blocks in dict.fromkeys((doubled, num_missing)):
            has_grown = self._grow(num_new_blocks)
            if self.all_can(has_grown):
                self.pool.grow(num_new_blocks)
                return
            if has_grown:
                self._fit()
        # What there is, is the budget from now on, until memory is given back.
        self._max_num_blocks = num_usable
        warnings.warn(
            f"[{self.kind} cache] no memory for more than {num_usable} blocks, which are the "
            "budget now",
            stacklevel=2,
        )

    def shrink(self) -> int:
        """Give back memory that no sequence needs; returns how many bytes. What is cached there is
        forgotten, and what stays is copied.

        Raises:
            RuntimeError: a step is open.
        """
        if self._steps:
            raise RuntimeError(f"[{self.kind} cache] a step is open; shrink after it")
        self._max_num_blocks = self.config.num_blocks
        used = (block.block_id for block in reversed(self.pool.blocks) if block.ref_cnt)
        num_blocks = max(next(used, 0), self._initial_blocks) + 1
        before = self.nbytes_held
        if num_blocks < self.pool.num_blocks:
            is_shrunk = self.pool.shrink_to(num_blocks)
            assert is_shrunk, "no block after the last used one is in use"
        self._fit()
        return before - self.nbytes_held
