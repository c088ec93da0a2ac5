"""What attention must know about a step: which rows go to which slots, and which blocks each query
reads.

Built once per step on the host and shared by all layers. Plain lists of integers: a step has few
sequences and most have one new token, where a call into numpy costs more than the loop it replaces.
Every range is checked here, or compared with a slab in O(1) at the door, so that no operation has
to read an array back from the device to check it."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeGuard, TypeVar

import mlx.core as mx

T = TypeVar("T")

# MLX hands inputs of fewer elements to a kernel in another address space: another kernel to
# compile.
MIN_ELEMENTS = 8


def padded(values: Sequence[int], filler: int = 0) -> mx.array:
    """``[max(len(values), MIN_ELEMENTS)] int32``, what a kernel takes; no thread reads what was
    added.
    """
    return mx.array([*values, *[filler] * (MIN_ELEMENTS - len(values))], dtype=mx.int32)


def _is_list_of_integers(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int for value in values)


@dataclass(frozen=True, eq=False)
class SlotMapping:
    """The slot of each new K/V row: ``slot = block_id * block_size + offset``; a slot below 0 is
    padding, skipped.

    vLLM: ``slot_mapping``. Build with :meth:`build`.
    """

    slots: list[int]  # [num_tokens]
    block_size: int

    @classmethod
    def build(cls, slots: Sequence[int] | mx.array, block_size: int) -> SlotMapping:
        """Raises ``ValueError`` when ``slots`` is not one-dimensional, not of integers, or names a
        slot twice.
        """
        to_list = getattr(slots, "tolist", None)  # of an array, of numpy too
        values: object = list(slots) if to_list is None else to_list()
        if not _is_list_of_integers(values):
            raise ValueError(
                f"[slot_mapping] slots must be integers of shape [num_tokens], got {slots!r}"
            )
        live = [slot for slot in values if slot >= 0]
        if len(set(live)) != len(live):
            slot, times = Counter(live).most_common(1)[0]
            raise ValueError(f"[slot_mapping] slot {slot} is named {times} times")
        return cls(values, block_size)

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    @cached_property
    def packed(self) -> mx.array:
        """``[max(num_tokens, 8)] int32``, filled up with padding: what a kernel takes."""
        return padded(self.slots, -1)

    @cached_property
    def max_slot(self) -> int:
        return max(self.slots, default=-1)

    @cached_property
    def only_slot(self) -> tuple[int, int] | None:
        """Block id and offset when there is one row and it is not padding: the decode step of a
        single sequence.
        """
        return (
            divmod(self.slots[0], self.block_size)
            if len(self.slots) == 1 and self.slots[0] >= 0
            else None
        )

    @cached_property
    def rows(self) -> mx.array | None:
        """Indices of the rows that are not padding, ``[num_live] int32``; ``None`` when no row is
        padding.
        """
        if min(self.slots, default=0) >= 0:
            return None
        return mx.array([row for row, slot in enumerate(self.slots) if slot >= 0], dtype=mx.int32)

    @cached_property
    def block_ids(self) -> mx.array:
        """``[num_live] int32``"""
        return mx.array(
            [slot // self.block_size for slot in self.slots if slot >= 0], dtype=mx.int32
        )

    @cached_property
    def offsets(self) -> mx.array:
        """``[num_live] int32``"""
        return mx.array(
            [slot % self.block_size for slot in self.slots if slot >= 0], dtype=mx.int32
        )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    scale: float
    window: int | None = None
    sinks: mx.array | None = None


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step of a ragged batch: sequence ``s`` has ``context_lens[s]`` tokens, its last
    ``query_lens[s]`` are new.

    Build with :meth:`build`, or directly what needs no checks. vLLM's names where it has them, but
    nothing is padded: the queries of all sequences lie behind one another in one flat
    ``[num_tokens]`` axis, sequence ``s`` at ``cu_seqlens_q[s] : cu_seqlens_q[s + 1]``."""

    block_tables: list[array[int]]  # per sequence, the blocks of its context, int32
    context_lens: list[int]  # tokens in the cache after this step's writes
    query_lens: list[int]
    block_size: int
    shares_new_blocks: bool = (
        False  # a block table names a block that another sequence writes in this step
    )
    num_logit_rows: list[int] | None = None
    known_max_block_id: int | None = None  # saves looking at each
    _plans: dict[Hashable, object] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        block_tables: Sequence[Sequence[int]],
        context_lens: Sequence[int],
        query_lens: Sequence[int],
        block_size: int,
        shares_new_blocks: bool = False,
    ) -> AttentionMetadata:
        """Check the lists against one another.

        Args:
            block_tables: block ids per sequence; those behind its context (reserved ones) are left
                out.
            shares_new_blocks: whether a sequence reads blocks that another one writes in this step,
                as when both begin with the same prompt. Then the rows of all are written before any
                is read, which costs a dispatch.

        Raises:
            ValueError: lists of different lengths, a query run that is empty or longer than its
                context, a block table too short for its context, a negative block id.
        """
        if not len(block_tables) == len(context_lens) == len(query_lens):
            raise ValueError(
                f"[attention_metadata] {len(block_tables)} block_tables, {len(context_lens)} context_lens and "
                f"{len(query_lens)} query_lens must be one per sequence"
            )
        tables = []
        for seq, (table, context_len, query_len) in enumerate(
            zip(block_tables, context_lens, query_lens, strict=True)
        ):
            if not 0 < query_len <= context_len:
                raise ValueError(
                    f"[attention_metadata] sequence {seq}: query_len {query_len} must be within 1..context_len "
                    f"{context_len}"
                )
            num_blocks = -(-context_len // block_size)
            if len(table) < num_blocks:
                raise ValueError(
                    f"[attention_metadata] sequence {seq}: {context_len} tokens need {num_blocks} blocks of "
                    f"{block_size}, the block table has {len(table)}"
                )
            # A copy: the caller's table changes with the next step.
            blocks = table[:num_blocks] if type(table) is array else array("i", table[:num_blocks])
            if min(blocks) < 0:
                raise ValueError(
                    f"[attention_metadata] sequence {seq}: block id {min(blocks)} is negative"
                )
            tables.append(blocks)
        return cls(tables, list(context_lens), list(query_lens), block_size, shares_new_blocks)

    def plan(self, key: Hashable, make: Callable[[], T]) -> T:
        """What a backend derives from this step: made for the first layer, reused by the others."""
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]  # type: ignore[return-value]

    @cached_property
    def slot_mapping(self) -> SlotMapping:
        """Where the new tokens go: the last ``query_lens[s]`` positions of each sequence."""
        block_size = self.block_size
        if self.max_query_len == 1:
            slots = [
                table[-1] * block_size + (context_len - 1) % block_size
                for table, context_len in zip(self.block_tables, self.context_lens, strict=True)
            ]
            return SlotMapping(slots, block_size)
        slots = []
        for table, context_len, query_len in zip(
            self.block_tables, self.context_lens, self.query_lens, strict=True
        ):
            position = context_len - query_len
            while position < context_len:
                index, offset = divmod(position, self.block_size)
                count = min(self.block_size - offset, context_len - position)
                slot = table[index] * self.block_size + offset
                slots.extend(range(slot, slot + count))
                position += count
        return SlotMapping(slots, self.block_size)

    def packed_block_table(self, seq: int) -> mx.array:
        """``[max(num_blocks, 8)] int32``, filled up with the null block: what a kernel takes."""
        table = self.block_tables[seq]
        return self.plan(("block_table", seq), lambda: padded(table))

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @cached_property
    def cu_seqlens_q(self) -> list[int]:
        """``[num_seqs + 1]``"""
        return [0, *itertools.accumulate(self.query_lens)]

    @cached_property
    def positions(self) -> mx.array:
        runs = zip(self.context_lens, self.query_lens, strict=True)
        return mx.array([p for end, n in runs for p in range(end - n, end)], dtype=mx.int32)

    @property
    def _logit_counts(self) -> list[int]:
        return [1] * self.num_seqs if self.num_logit_rows is None else self.num_logit_rows

    @cached_property
    def logit_rows(self) -> mx.array | None:
        counts = self._logit_counts
        if counts == self.query_lens:
            return None
        runs = zip(self.cu_seqlens_q[1:], counts, strict=True)
        return mx.array([row for end, n in runs for row in range(end - n, end)], dtype=mx.int32)

    @cached_property
    def logit_queries(self) -> AttentionMetadata:
        if self.logit_rows is None:
            return self
        seqs = [seq for seq, n in enumerate(self._logit_counts) if n]
        return AttentionMetadata(
            [self.block_tables[seq] for seq in seqs],
            [self.context_lens[seq] for seq in seqs],
            [self._logit_counts[seq] for seq in seqs],
            self.block_size,
            known_max_block_id=self.known_max_block_id,
        )

    @cached_property
    def max_query_len(self) -> int:
        return max(self.query_lens, default=0)

    @cached_property
    def max_block_id(self) -> int:
        if self.known_max_block_id is not None:
            return self.known_max_block_id
        return max(map(max, self.block_tables), default=-1)

    def map_parts(
        self,
        kind: Callable[[int], Hashable],
        operation: Callable[..., mx.array],
        *packed: mx.array,
    ) -> mx.array:
        """Cut the step into the sequences of each kind of query run, and put the results back in
        order.

        Args:
            kind: of a ``query_len``.
            operation: called with each part and its rows of ``packed``; returns as many rows.
            packed: arrays ``[num_tokens, ...]``.
        """
        parts = self.plan(("parts", kind), lambda: self._parts(kind))
        if len(parts) == 1:
            return operation(self, *packed)
        results = [operation(part, *(array[rows] for array in packed)) for part, rows in parts]
        row_order = self.plan(
            ("row_order", kind), lambda: mx.argsort(mx.concatenate([rows for _, rows in parts]))
        )
        return mx.concatenate(results)[row_order]

    def _parts(self, kind: Callable[[int], Hashable]) -> list[tuple[AttentionMetadata, mx.array]]:
        seqs_of_kind: dict[Hashable, list[int]] = {}
        for seq, query_len in enumerate(self.query_lens):
            seqs_of_kind.setdefault(kind(query_len), []).append(seq)
        return [self._select(seqs) for seqs in seqs_of_kind.values()]

    def _select(self, seqs: list[int]) -> tuple[AttentionMetadata, mx.array]:
        starts = self.cu_seqlens_q
        part = AttentionMetadata(
            [self.block_tables[seq] for seq in seqs],
            [self.context_lens[seq] for seq in seqs],
            [self.query_lens[seq] for seq in seqs],
            self.block_size,
            known_max_block_id=self.known_max_block_id,
        )
        return part, mx.array(
            [row for seq in seqs for row in range(starts[seq], starts[seq + 1])], dtype=mx.int32
        )
