"""What every KV cache does, whatever stores its rows: steps, sequences, and memory."""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import mlx.core as mx

from mlx_paged.cache.config import KVCacheConfig
from mlx_paged.cache.layer import LayerKV
from mlx_paged.cache.step_states import put_states, states_before
from mlx_paged.core import (
    BlockCopy,
    BlockPool,
    BlockTable,
    KeyShift,
    KVCacheManager,
    SequenceStates,
)
from mlx_paged.errors import CacheFullError
from mlx_paged.ops import AttentionMetadata, Backend, KVFormat, Parts, StepState
from mlx_paged.request import SeqId

# The key of a mapping that a caller hands in. Mapping is invariant in its keys: with SeqId for
# them, a type checker would refuse a dict[str, int].
AnySeqId: TypeAlias = Any
# Rows of every layer: one array per layer, or a single array where all layers are alike.
LayerRows: TypeAlias = Sequence[mx.array] | mx.array

INITIAL_BLOCKS = 64
ALL_LAYERS = slice(None)


@dataclass(frozen=True, eq=False)
class KVSnapshot:
    """One sequence's K and V as they were stored, independent of the cache they came from."""

    formats: tuple[KVFormat, ...]  # of each layer
    # Per layer the parts of K and V, [num_kv_heads, num_tokens, width] each
    rows: tuple[tuple[Parts, Parts], ...]

    @property
    def num_tokens(self) -> int:
        return self.rows[0][0][0].shape[1]

    @property
    def keys(self) -> tuple[mx.array, ...]:
        """Dense, per layer ``[num_kv_heads, num_tokens, key_dim]``."""
        layers = zip(self.formats, self.rows, strict=True)
        return tuple(form.unrotated(form.key.decode(k)) for form, (k, _) in layers)

    @property
    def values(self) -> tuple[mx.array, ...]:
        """Dense, per layer ``[num_kv_heads, num_tokens, value_dim]``."""
        layers = zip(self.formats, self.rows, strict=True)
        return tuple(form.value.decode(v) for form, (_, v) in layers)


@dataclass(frozen=True)
class KVCacheStats:
    """What a cache holds now."""

    num_seqs: int
    num_tokens: int
    nbytes_used: int  # of the blocks in use
    nbytes_held: int  # allocated for K/V
    blocks_used: int
    num_blocks: int  # the budget


class KVCache(ABC):
    """K/V of several sequences in all layers of a model.

    A sequence is any hashable id; it begins with the first step that names it and ends with
    :meth:`free`. A step adds tokens to some sequences::

        with cache.step({"a": 1, "b": 17}) as step:     # a decode and a prompt of 17: 18 rows
            logits = model(tokens, cache.layers, step.logit_rows)
            mx.eval(logits, cache.arrays)               # before the next step is built

    If the body raises, the step did not happen. A scheduler, which allocates through
    :attr:`manager` and takes back what failed itself, uses :meth:`scheduled_step`.

    Args:
        config: shape and budget.
        initial_blocks: blocks to begin with; more are added when they are needed.

    Attributes:
        manager: which blocks each sequence holds.
        pool: the blocks. It has one more than sequences can hold, the null block.
        all_can: whether all who hold a part of these K/V can do what this cache can; asked before
            the pool changes. A cache of its own asks nobody.
    """

    kind: ClassVar[str]
    manager: KVCacheManager
    pool: BlockPool

    def __init__(self, config: KVCacheConfig, initial_blocks: int = INITIAL_BLOCKS):
        self.config = config
        self.all_can: Callable[[bool], bool] = bool
        # The open one, for each group of layers, and which layers it runs.
        self._steps: Sequence[AttentionMetadata] = ()
        self._open_layers = ALL_LAYERS
        self._initial_blocks = min(initial_blocks, config.num_blocks)
        self.reset()

    def reset(self) -> None:
        """Forget everything: sequences, the prefix cache, an open step, and storage that an
        interrupt left uneven.
        """
        self.close_step()
        self._max_num_blocks = self.config.num_blocks
        self.pool = BlockPool(self._initial_blocks + 1, self.config.block_size)
        self._allocate_layers()
        self.manager = self._new_manager()

    def keep_checkpoints(self, num_checkpoints: int) -> None:
        """Keep so many states at the ends of blocks for prefix hits, of a model with recurrent
        layers. What the cache holds is forgotten.
        """
        self.config = replace(self.config, num_checkpoints=num_checkpoints)
        self.reset()

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

    @property
    def can_swap(self) -> bool:
        """Whether ``read_blocks`` and ``write_blocks`` are there."""
        return False

    @abstractmethod
    def _allocate_layers(self) -> None:
        """Drop the layers, then make new ones with storage for the blocks of the pool."""

    def _new_manager(self) -> KVCacheManager:
        retentions = [group.retention for group in self.config.groups]
        states = SequenceStates(self.config.num_checkpoints) if self.config.state_nbytes else None
        return KVCacheManager(self.pool, retentions=retentions, states=states)

    @abstractmethod
    def _prepare(self, seq_ids: Sequence[SeqId], steps: Sequence[AttentionMetadata]) -> None:
        """Make storage ready for the rows of a step of these sequences that opens, described for
        each group of layers.
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
    def _stored_parts(self, seq: SeqId, layer: int) -> tuple[Parts, Parts]:
        """The parts of K and V that a layer keeps of a sequence, ``[num_kv_heads, num_tokens,
        width]`` each; they may be views.
        """

    def gather_blocks(self, layer: int, block_ids: Sequence[int]) -> tuple[Parts, Parts]:
        """What is stored in full blocks: the parts of K and V, ``[num_kv_heads, num_blocks *
        block_size, width]`` each. They may be views: copy them before the next write.
        """
        raise NotImplementedError(f"[{self.kind} cache] has no rows of blocks")

    def fill_blocks(
        self, block_ids: Sequence[Sequence[int]], rows: Iterable[tuple[Parts, Parts]]
    ) -> None:
        """Write full blocks, as :meth:`gather_blocks` returned them, and wait for it.

        Args:
            block_ids: of each group of layers, taken from :attr:`pool`.
            rows: of each layer, in order. Each layer's are taken when those of the one before were
                written.
        """
        raise NotImplementedError(f"[{self.kind} cache] has no rows of blocks")

    @abstractmethod
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in all layers: ``(source, destination)`` ids."""

    def shift_keys(self, group: int, shift: KeyShift) -> None:
        """Copy blocks in the layers of a group, with K rotated on by ``shift.distance``
        positions.
        """
        raise NotImplementedError(f"[{self.kind} cache] keeps all tokens where they are")

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for every write of the last step to have happened."""

    @property
    @abstractmethod
    def nbytes_held(self) -> int:
        """Bytes allocated for K/V."""

    def wait_for_writes(self) -> None:
        """Wait for what was written so far, before the host reads it."""
        mx.eval(self.arrays)

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        """Copies of blocks of a group of layers, whose steps have been read."""
        raise NotImplementedError(f"[{self.kind} cache] has no blocks to copy out")

    def write_blocks(self, group: int, block_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        """Fill blocks of a group of layers with what :meth:`read_blocks` returned, of a cache of
        the same layers and block size.

        Raises:
            ValueError: contents of another size.
        """
        raise NotImplementedError(f"[{self.kind} cache] has no blocks to fill")

    # Steps

    @contextmanager
    def step(
        self,
        num_new_tokens: Mapping[AnySeqId, int],
        num_logit_rows: Sequence[int] | None = None,
    ) -> Iterator[AttentionMetadata]:
        """Allocate slots for new tokens of each sequence, in the mapping's order, and open a step.

        Args:
            num_new_tokens: of each sequence, at least 1.
            num_logit_rows: as in :meth:`scheduled_step`.

        Raises:
            CacheFullError: the budget can't hold them; nothing was changed.
            ValueError: no sequence, a sequence without a new token, or with more than may be added
                at once (:meth:`KVCacheManager.max_run`).
            RuntimeError: another step of this cache is open.
        """
        if self._steps:
            raise RuntimeError(
                f"[{self.kind} cache] a step is open already; finish it before the next one"
            )
        self._check_counts(num_new_tokens)
        tables, states = self.manager.tables, self.manager.states
        states_before = None if states is None else states.snapshot()
        lengths_before = {seq: tables[seq].num_tokens for seq in num_new_tokens if seq in tables}
        try:
            self._allocate_slots(num_new_tokens)
            seq_ids, counts = list(num_new_tokens), list(num_new_tokens.values())
            with self.scheduled_step(seq_ids, counts, num_logit_rows) as step:
                yield step
        except BaseException:  # Ctrl-C, too.
            for seq in num_new_tokens:
                if states is not None and states_before is not None:
                    states.restore(seq, states_before)
                if seq in lengths_before:
                    self.manager.trim(seq, lengths_before[seq])
                elif seq in tables:
                    self.free(seq)
            raise

    def _check_counts(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        if not num_new_tokens:
            raise ValueError(f"[{self.kind} cache] a step needs at least one sequence")
        for seq, num_new in num_new_tokens.items():
            if num_new < 1:
                raise ValueError(
                    f"[{self.kind} cache] sequence {seq!r}: a step adds at least 1 token, "
                    f"got {num_new}"
                )
            max_run = self.manager.max_run(seq)
            if num_new > max_run:
                raise ValueError(
                    f"[{self.kind} cache] sequence {seq!r}: a step adds at most {max_run} tokens "
                    f"here, since others leave the window then; got {num_new}"
                )

    def _allocate_slots(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        num_needed = sum(
            self.manager.num_needed_blocks(seq, n) for seq, n in num_new_tokens.items()
        )
        if num_needed > self.pool.num_free_blocks + self.num_growable_blocks:
            raise CacheFullError(
                f"[{self.kind} cache] {sum(num_new_tokens.values())} new tokens need {num_needed} "
                f"blocks of {self.config.block_size}, the budget holds {self._max_num_blocks} and "
                f"{self.pool.num_used_blocks} are in use; raise kv_cache_bytes or free a sequence"
            )
        self.make_room(num_needed)
        for seq, num_new in num_new_tokens.items():
            copies = self.manager.allocate_slots(seq, num_new)
            if copies is None:
                raise CacheFullError(
                    f"[{self.kind} cache] the device has no more memory, though the budget would "
                    "allow it"
                )
            # At once: a source may be handed out again by the next sequence's allocation.
            self.copy_blocks(copies)
            for group, shift in self.manager.take_key_shifts(seq):
                self.shift_keys(group, shift)

    @contextmanager
    def scheduled_step(
        self,
        seq_ids: Sequence[SeqId],
        num_new_tokens: Sequence[int],
        num_logit_rows: Sequence[int] | None = None,
        shares_new_blocks: bool = False,
        layers: slice = ALL_LAYERS,
        context_lens: Sequence[int] | None = None,
    ) -> Iterator[AttentionMetadata]:
        """Open a step whose slots were allocated through :attr:`manager`; it is closed whatever
        happens.

        Args:
            seq_ids: the sequences, in the order of the packed rows.
            num_new_tokens: of each sequence, the last ones that it has slots for.
            num_logit_rows: of how many of its last tokens each sequence wants logits; 1 of each by
                default. If no sequence wants any, the step has one row of logits all the same: MLX
                refuses some products of no rows.
            shares_new_blocks: see :class:`AttentionMetadata`.
            layers: those that the step runs; of two models on one cache, each runs its own.
            context_lens: of each sequence, where its new tokens end; by default all that it has
                slots for.
        """
        states = states_before(self.manager, seq_ids, num_new_tokens, num_logit_rows)
        wants_logits = True
        if num_logit_rows is not None:
            num_logit_rows = list(num_logit_rows)
            wants_logits = any(num_logit_rows)
            if not wants_logits:
                num_logit_rows[-1] = 1
        tables = [self.manager.groups[seq] for seq in seq_ids]
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
            self._prepare(seq_ids, steps)
            opened = range(len(self.layers))[layers]
            for layer_group, group_step in zip(self.config.groups, steps, strict=True):
                for index in layer_group.layers:
                    if index in opened:
                        self.layers[index].open(group_step)
            yield steps[0]
            self._finish()
            if states is not None:
                put_states(self.manager, seq_ids, states)
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
        if not self.manager.keeps_all:
            offsets = [table.num_evicted_tokens - table.base for table in tables]
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
        """Forget the open step, if there is one, whatever became of its rows."""
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
        tables = itertools.chain.from_iterable(self.manager.groups.values())
        last_used = max((block.block_id for table in tables for block in table), default=0)
        num_blocks = max(last_used, self._initial_blocks) + 1
        before = self.nbytes_held
        if num_blocks < self.pool.num_blocks:
            is_shrunk = self.pool.shrink_to(num_blocks)
            assert is_shrunk, "no block behind the last used one is in use"
        self._fit()
        return before - self.nbytes_held

    def stats(self) -> KVCacheStats:
        stats = self.manager.stats()
        return KVCacheStats(
            num_seqs=stats.num_requests,
            num_tokens=stats.num_tokens,
            nbytes_used=stats.num_used_blocks * self.config.nbytes_per_block,
            nbytes_held=self.nbytes_held,
            blocks_used=stats.num_used_blocks,
            num_blocks=self.config.num_blocks,
        )

    # Sequences

    @property
    def seqs(self) -> list[SeqId]:
        """The sequences held, oldest first."""
        return list(self.manager.tables)

    def seq_len(self, seq: SeqId) -> int:
        """Tokens held of a sequence; 0 when there is no such sequence."""
        return self.manager.num_tokens(seq)

    def max_seq_len(self, seq: SeqId) -> int:
        """The length to which a sequence, held already or not, could grow if the others stay as
        they are.
        """
        num_free = self._max_num_blocks - self.pool.num_used_blocks
        if not self.manager.keeps_all:
            num_held = sum(map(len, self.manager.groups.get(seq, ())))
            return self.manager.max_num_tokens(num_free + num_held)
        if seq not in self.manager.tables:
            return num_free * self.config.block_size
        table = self.manager.tables[seq]
        # A shared tail is copied before it is written, and the copy takes a block.
        num_copied = int(table.num_unfilled_slots > 0 and table.num_new_blocks(1) > 0)
        if num_copied > num_free:
            return table.num_tokens
        return table.capacity + (num_free - num_copied) * self.config.block_size

    def block_ids(self, seq: SeqId) -> tuple[int, ...]:
        """The block table of a sequence, that of the first group of layers; ``KeyError`` when there
        is no such sequence.
        """
        return tuple(self._table(seq).block_ids)

    def trim(self, seq: SeqId, length: int) -> None:
        """Forget a sequence's tokens from position ``length`` on (``trim_to``, after speculation or
        an edited turn).

        Raises:
            KeyError: no such sequence.
            ValueError: ``length`` is negative or beyond the sequence.
            BlockTableError: tokens that have left the window would be needed again.
        """
        num_tokens = self._table(seq).num_tokens
        if not 0 <= length <= num_tokens:
            raise ValueError(
                f"[{self.kind} cache] trim: length {length} must be within 0..{num_tokens}"
            )
        self.manager.trim(seq, length)

    def free(self, seq: SeqId) -> None:
        """Forget a sequence; raises ``KeyError`` when there is no such sequence."""
        self._table(seq)
        self.manager.free(seq)

    def fork(self, seq: SeqId, new_seq: SeqId) -> None:
        """A second sequence with the same tokens, sharing their K/V until one of the two writes.

        Raises:
            KeyError: no such sequence.
            ValueError: ``new_seq`` exists.
            CacheFullError: a contiguous cache copies the K/V, and the copy doesn't fit.
        """
        table = self._table(seq)
        if new_seq in self.manager.tables:
            raise ValueError(f"[{self.kind} cache] fork: sequence {new_seq!r} exists already")
        if not self.try_fork(seq, new_seq):
            raise CacheFullError(
                f"[{self.kind} cache] a fork of {table.num_tokens} tokens needs "
                f"{len(table.block_ids)} blocks of {self.config.block_size}, the budget holds "
                f"{self._max_num_blocks} and {self.pool.num_used_blocks} are in use; raise "
                "kv_cache_bytes or free a sequence"
            )

    def try_fork(self, seq: SeqId, new_seq: SeqId) -> bool:
        """:meth:`fork` of a scheduler; False, and nothing has changed, where the copy that it needs
        does not fit.
        """
        self.manager.fork(seq, new_seq)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all that sequences left, or return False and change nothing while there are
        sequences.
        """
        return self.manager.reset_prefix_cache()

    def materialize(self, seq: SeqId, layer: int) -> tuple[mx.array, mx.array]:
        """Dense K and V of one layer, ``[num_kv_heads, num_tokens, key_dim]`` and ``value_dim``,
        independent of the cache; ``KeyError`` if not there. They are those of the tokens that the
        layer keeps.
        """
        form = self.layers[layer].spec.format
        keys, values = form.decode(*self.copy_parts(seq, layer))
        keys = form.unrotated(keys)
        mx.eval(keys, values)
        return keys, values

    def copy_parts(self, seq: SeqId, layer: int) -> tuple[Parts, Parts]:
        """What is stored of a sequence in a layer: the parts of K and V, ``[num_kv_heads,
        num_tokens, width]`` each, evaluated and independent of the cache; ``KeyError`` if there is
        no such sequence.
        """
        self._table(seq)
        table = self.manager.groups[seq][self.config.group_of(layer)]
        if table.num_held_tokens == 0:
            return self.layers[layer].spec.zeros(0)
        k, v = self._stored_parts(seq, layer)
        # A view that stays alive would make the next write copy the whole array behind it. The
        # product is exact and, unlike mx.contiguous, never shares the memory of a view that is
        # contiguous already.
        k, v = tuple(part * 1 for part in k), tuple(part * 1 for part in v)
        mx.eval(k, v)
        return k, v

    def append(self, seq: SeqId, k: LayerRows, v: LayerRows) -> None:
        """Append rows of one or more tokens in all layers (``push_row`` elsewhere; a model appends
        through :meth:`LayerKV.update_and_attend` instead).

        Args:
            k: per layer ``[num_tokens, num_kv_heads, key_dim]``, or one array of all layers.
            v: the same, with ``value_dim``.

        Raises:
            ValueError: a shape that doesn't fit the cache.
            CacheFullError: the budget can't hold them; nothing was changed.
        """
        self._check_rows(k, v)
        rows = [
            layer.spec.format.encode(k[index], v[index]) for index, layer in enumerate(self.layers)
        ]
        self.append_parts(seq, k[0].shape[0], rows)

    def _check_rows(self, k: LayerRows, v: LayerRows) -> None:
        if not len(k) == len(v) == len(self.layers):
            raise ValueError(
                f"[{self.kind} cache] append: expected rows of {len(self.layers)} layers, got "
                f"{len(k)} of K and {len(v)} of V"
            )
        num_tokens = k[0].shape[0]
        for index, layer in enumerate(self.layers):
            spec = layer.spec
            for name, rows, width in (("k", k, spec.key_dim), ("v", v, spec.value_dim)):
                expected = (num_tokens, spec.num_kv_heads, width)
                if rows[index].shape != expected:
                    raise ValueError(
                        f"[{self.kind} cache] append: expected {name}[{index}] of shape "
                        f"[num_tokens, num_kv_heads, width] = {list(expected)}, got "
                        f"{list(rows[index].shape)}"
                    )

    def append_parts(
        self, seq: SeqId, num_tokens: int, rows: Iterable[tuple[Parts, Parts]]
    ) -> None:
        """Append rows as the layers store them.

        Args:
            rows: of each layer the parts of K and V, ``[num_tokens, num_kv_heads, width]`` each.
                Each layer's are taken when those of the one before were written.

        Raises:
            CacheFullError: the budget can't hold them; nothing was changed.
        """
        with self.step({seq: num_tokens}):
            for layer, (k, v) in zip(self.layers, rows, strict=True):
                layer.write(k, v)
                mx.eval(self.arrays)

    def set_prompt(self, seq: SeqId, k: LayerRows, v: LayerRows) -> None:
        """Make these rows the whole sequence, in place of what it held (``set_prefill`` elsewhere);
        shapes and errors as :meth:`append`.
        """
        if seq in self.manager.tables:
            self.free(seq)
        self.append(seq, k, v)

    def snapshot(self, seq: SeqId) -> KVSnapshot:
        """A sequence's K/V as they are stored, evaluated and independent of this cache.

        Raises:
            KeyError: no such sequence.
            ValueError: some of its tokens have left the window, or the model keeps more of it than
                K/V.
        """
        self._table(seq)
        if self.config.state_nbytes:
            raise ValueError(
                f"[{self.kind} cache] snapshot: the model keeps a recurrent state beside K/V, and "
                "a snapshot holds K/V alone"
            )
        if any(table.num_evicted_tokens for table in self.manager.groups[seq]):
            raise ValueError(
                f"[{self.kind} cache] snapshot: tokens of sequence {seq!r} have left the window"
            )
        formats = tuple(layer.spec.format for layer in self.layers)
        rows = tuple(self.copy_parts(seq, layer) for layer in range(len(self.layers)))
        return KVSnapshot(formats, rows)

    def restore(self, seq: SeqId, snapshot: KVSnapshot) -> None:
        """Make ``seq`` hold a snapshot, of a cache of either kind; errors as :meth:`append`.

        A layer of the same format holds the same bits as before; another format stores what the
        rows of the snapshot stand for.
        """
        keys, values = (
            [rows.swapaxes(0, 1) for rows in part] for part in (snapshot.keys, snapshot.values)
        )
        self._check_rows(keys, values)
        rows = [
            _tokens_first(stored) if form == layer.spec.format else layer.spec.format.encode(k, v)
            for layer, form, stored, k, v in zip(
                self.layers, snapshot.formats, snapshot.rows, keys, values, strict=True
            )
        ]
        if seq in self.manager.tables:
            self.free(seq)
        self.append_parts(seq, snapshot.num_tokens, rows)

    def _table(self, seq: SeqId) -> BlockTable:
        if seq not in self.manager.tables:
            raise KeyError(f"[{self.kind} cache] no sequence {seq!r}; it holds {self.seqs}")
        return self.manager.tables[seq]


def _tokens_first(rows: tuple[Parts, Parts]) -> tuple[Parts, Parts]:
    k, v = rows
    return tuple(part.swapaxes(0, 1) for part in k), tuple(part.swapaxes(0, 1) for part in v)
