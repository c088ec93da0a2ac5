"""``Sequences``: the use of a cache without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakSet

import mlx.core as mx

from mlx_paged.cache.base import KVCache
from mlx_paged.cache.contiguous import ContiguousKVCache
from mlx_paged.cache.paged import PagedKVCache
from mlx_paged.cache.step_states import forget_before, put_states, states_before
from mlx_paged.core import BlockTable, KVCacheManager, SequenceStates
from mlx_paged.errors import CacheFullError
from mlx_paged.ops import AttentionMetadata, StateStack
from mlx_paged.options.argument_values import whole
from mlx_paged.request import SeqId

# The key of a mapping argument. Mapping is invariant in its keys: with SeqId, a type checker would
# reject a dict[str, int].
AnySeqId: TypeAlias = Any
# Rows of every layer: one array per layer, or a single array where all layers have the same shape.
RowsByLayer: TypeAlias = Sequence[mx.array] | mx.array


@dataclass(frozen=True)
class KVCacheStats:
    """Current figures of a cache."""

    num_seqs: int
    num_tokens: int
    nbytes_used: int  # of the blocks in use
    nbytes_held: int  # allocated for K/V
    blocks_used: int
    num_blocks: int  # the budget


class Sequences:
    """The sequences of a cache that is used without an engine.

    A sequence is any hashable id; it begins with its first step and ends with :meth:`free`. A step
    adds tokens to some sequences::

        sequences = Sequences(cache)
        with sequences.step({"a": 1, "b": 17}) as step:  # a decode and a prompt of 17: 18 rows
            logits = model(tokens, cache.layers, step.logit_rows)
            mx.eval(logits, cache.arrays)                # before the next step is built

    If the body raises, the step is rolled back. ``seq in sequences`` tests for a sequence, and
    ``list(sequences)`` lists all, oldest first.

    Attributes:
        cache: their K/V.
        manager: their blocks.
    """

    def __init__(self, cache: KVCache):
        self.cache = cache
        states = SequenceStates() if cache.config.state_nbytes else None
        self.manager = KVCacheManager(cache.pool, cache.config.retentions, states)
        self._prefix = f"[{cache.kind} cache]"  # of messages
        self._has_open_step = False
        # Of recurrent layers: the stacks before the newest step, while all their states are held.
        self._stacks_before = WeakSet[StateStack]()

    def __contains__(self, seq: SeqId) -> bool:
        return seq in self.manager.groups

    def __iter__(self) -> Iterator[SeqId]:
        return iter(self.manager.groups)

    def reset(self) -> None:
        """Drop all sequences, and repair the cache after an interrupt."""
        self.manager.reset()
        self.cache.reset()

    # Steps

    @contextmanager
    def step(
        self,
        num_new_tokens: Mapping[AnySeqId, int],
        num_logit_rows: Sequence[int] | None = None,
    ) -> Iterator[AttentionMetadata]:
        """Allocate slots for new tokens of each sequence, in the mapping's order, and open a step.

        Args:
            num_new_tokens: per sequence, at least 1.
            num_logit_rows: per sequence, how many of its last tokens need logits.

        Raises:
            CacheFullError: they don't fit the budget; nothing has changed.
            ValueError: there are no sequences, or a sequence has no new tokens or more than may be
                added at once.
            RuntimeError: another step is open.
        """
        if self._has_open_step:
            raise RuntimeError(
                f"{self._prefix} a step is open already; finish it before the next one"
            )
        self._check_counts(num_new_tokens)
        manager = self.manager
        tables, states = manager.tables, manager.states
        snapshot = None if states is None else states.snapshot()
        lengths_before = {seq: tables[seq].num_tokens for seq in num_new_tokens if seq in tables}
        seq_ids, counts = list(num_new_tokens), list(num_new_tokens.values())
        try:
            self._has_open_step = True
            self._allocate_slots(num_new_tokens)
            made = states_before(manager, seq_ids, counts)
            groups = [manager.groups[seq] for seq in seq_ids]
            with self.cache.open_step(groups, counts, num_logit_rows, states=made) as step:
                yield step
            if made is not None:
                put_states(manager, seq_ids, counts, made)
        except BaseException:  # including KeyboardInterrupt
            for seq in num_new_tokens:
                if states is not None and snapshot is not None:
                    states.restore(seq, snapshot)
                if seq in lengths_before:
                    manager.trim(seq, lengths_before[seq])
                elif seq in tables:
                    self.free(seq)
            raise
        finally:
            self._has_open_step = False
        if made is not None:
            snapshot = None
            self._stacks_before = WeakSet(forget_before(made, self._stacks_before))

    def _check_counts(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        if not num_new_tokens:
            raise ValueError(f"{self._prefix} a step needs at least one sequence")
        for seq, num_new in num_new_tokens.items():
            if num_new < 1:
                raise ValueError(
                    f"{self._prefix} sequence {seq!r}: a step adds at least 1 token, got {num_new}"
                )
            max_run = self.manager.max_run(seq)
            if num_new > max_run:
                raise ValueError(
                    f"{self._prefix} sequence {seq!r}: a step adds at most {max_run} tokens "
                    f"here, because tokens leave the window after it; got {num_new}"
                )

    def _allocate_slots(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        cache, manager = self.cache, self.manager
        num_needed = sum(manager.num_needed_blocks(seq, n) for seq, n in num_new_tokens.items())
        if num_needed > cache.pool.num_free_blocks + cache.num_growable_blocks():
            raise self._full(f"{sum(num_new_tokens.values())} new tokens need {num_needed}")
        cache.make_room(num_needed)
        for seq, num_new in num_new_tokens.items():
            copies = manager.allocate_slots(seq, num_new)
            if copies is None:
                raise CacheFullError(
                    f"{self._prefix} the device has no more memory, though the budget allows more"
                )
            # Immediately: the next allocation may reuse a source.
            cache.copy_blocks(copies)
            if isinstance(cache, PagedKVCache):
                for group, shift in manager.take_key_shifts(seq):
                    cache.shift_keys(group, shift)

    def _full(self, needed: str) -> CacheFullError:
        return CacheFullError(
            f"{self._prefix} {needed} blocks of {self.cache.config.block_size}, the "
            f"budget holds {self._max_num_blocks} and {self.cache.pool.num_used_blocks} are in "
            "use; raise kv_cache_bytes or free a sequence"
        )

    @property
    def _max_num_blocks(self) -> int:
        """Blocks that fit the budget or, if less, the device."""
        return self.cache.pool.num_usable_blocks + self.cache.num_growable_blocks()

    # Sequences

    def __repr__(self) -> str:
        stats = self.stats()
        return f"Sequences({stats.num_seqs:,} of {stats.num_tokens:,} tokens in {self.cache!r})"

    def stats(self) -> KVCacheStats:
        stats, config = self.manager.stats(), self.cache.config
        return KVCacheStats(
            num_seqs=stats.num_requests,
            num_tokens=stats.num_tokens,
            nbytes_used=stats.num_used_blocks * config.nbytes_per_block,
            nbytes_held=self.cache.nbytes_held,
            blocks_used=stats.num_used_blocks,
            num_blocks=config.num_blocks,
        )

    def seq_len(self, seq: SeqId) -> int:
        """Tokens of a sequence; 0 if there is no such sequence."""
        return self.manager.num_tokens(seq)

    def max_seq_len(self, seq: SeqId) -> int:
        """The length to which a new or existing sequence could grow next to the others."""
        num_free = self._max_num_blocks - self.cache.pool.num_used_blocks
        if not self.manager.keeps_all:
            num_held = sum(map(len, self.manager.groups.get(seq, ())))
            return self.manager.block_need.max_num_tokens(num_free + num_held)
        if seq not in self:
            return num_free * self.cache.config.block_size
        table = self.manager.tables[seq]
        # The copy-on-write of a shared tail takes a block.
        num_copied = int(table.num_unfilled_slots > 0 and table.num_new_blocks(1) > 0)
        if num_copied > num_free:
            return table.num_tokens
        return table.capacity + (num_free - num_copied) * self.cache.config.block_size

    def block_ids(self, seq: SeqId) -> tuple[int, ...]:
        """The block table of a sequence in the first group of layers; ``KeyError`` if there is no
        such sequence.
        """
        return tuple(self._table(seq).block_ids)

    def trim(self, seq: SeqId, length: int) -> None:
        """Drop a sequence's tokens from position ``length`` on (``trim_to``, after speculation or
        an edited turn).

        Raises:
            KeyError: no such sequence.
            ValueError: ``length`` is negative or beyond the sequence.
            BlockTableError: evicted tokens would be needed again.
        """
        num_tokens = self._table(seq).num_tokens
        if not 0 <= length <= num_tokens:
            raise ValueError(f"{self._prefix} trim: length {length} must be within 0..{num_tokens}")
        self.manager.trim(seq, length)

    def free(self, seq: SeqId) -> None:
        """End a sequence; raises ``KeyError`` if there is no such sequence."""
        self._table(seq)
        self.manager.free(seq)
        if isinstance(self.cache, ContiguousKVCache):
            self.cache.drop_ended()

    def fork(self, seq: SeqId, new_seq: SeqId) -> None:
        """Add a second sequence with the same tokens, which shares their K/V until one of the two
        writes.

        Raises:
            KeyError: no such sequence.
            ValueError: ``new_seq`` exists already.
            CacheFullError: the copy of a contiguous cache doesn't fit.
        """
        table = self._table(seq)
        if new_seq in self:
            raise ValueError(f"{self._prefix} fork: sequence {new_seq!r} exists already")
        if not isinstance(self.cache, ContiguousKVCache):
            self.manager.fork(seq, new_seq)
        elif self.cache.fork(self.manager, seq, new_seq):
            mx.eval(self.cache.arrays)
        else:
            raise self._full(f"a fork of {table.num_tokens} tokens needs {len(table)}")

    def materialize(self, seq: SeqId, layer: int) -> tuple[mx.array, mx.array]:
        """A copy of the dense K and V of one layer, ``[num_kv_heads, num_tokens, key_dim]`` and
        ``value_dim``, of the tokens that the layer keeps.

        Raises:
            KeyError: there is no such sequence.
            ArgumentError: there is no such layer.
        """
        self._table(seq)
        last = len(self.cache.layers) - 1
        whole(0, last, f"within 0..{last}").check(f"{self.cache.kind} cache", "layer", layer)
        table = self.manager.groups[seq][self.cache.config.group_of(layer)]
        kv = self.cache.layers[layer]
        form = kv.spec.format
        k, v = kv.stored_rows(table) if table.num_held_tokens else kv.spec.zeros(0)
        # A view that stays alive would make the next write copy the whole array. The product is
        # exact and, unlike mx.contiguous, never shares the memory of a contiguous view.
        keys, values = form.decode(tuple(part * 1 for part in k), tuple(part * 1 for part in v))
        keys = form.unrotated(keys)
        mx.eval(keys, values)
        return keys, values

    def append(self, seq: SeqId, k: RowsByLayer, v: RowsByLayer) -> None:
        """Append rows of one or more tokens in all layers (``push_row`` elsewhere), without a
        model.

        Args:
            k: per layer ``[num_tokens, num_kv_heads, key_dim]``, or one array of all layers.
            v: the same, with ``value_dim``.

        Raises:
            ValueError: a shape doesn't match the cache.
            CacheFullError: they don't fit the budget; nothing has changed.
        """
        self._check_rows(k, v)
        with self.step({seq: k[0].shape[0]}):
            for index, layer in enumerate(self.cache.layers):
                layer.update(k[index], v[index])
                mx.eval(self.cache.arrays)

    def _check_rows(self, k: RowsByLayer, v: RowsByLayer) -> None:
        if not len(k) == len(v) == len(self.cache.layers):
            raise ValueError(
                f"{self._prefix} append: expected rows of {len(self.cache.layers)} layers, got "
                f"{len(k)} of K and {len(v)} of V"
            )
        num_tokens = k[0].shape[0]
        for index, layer in enumerate(self.cache.layers):
            spec = layer.spec
            for name, rows, width in (("k", k, spec.key_dim), ("v", v, spec.value_dim)):
                expected = (num_tokens, spec.num_kv_heads, width)
                if rows[index].shape != expected:
                    raise ValueError(
                        f"{self._prefix} append: expected {name}[{index}] of shape "
                        f"[num_tokens, num_kv_heads, width] = {list(expected)}, got "
                        f"{list(rows[index].shape)}"
                    )

    def _table(self, seq: SeqId) -> BlockTable:
        if seq not in self:
            raise KeyError(f"{self._prefix} no sequence {seq!r}; it holds {list(self)}")
        return self.manager.tables[seq]
