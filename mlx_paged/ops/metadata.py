"""What attention must know about a step: which rows go to which slots, and which blocks each query reads.

Built once per step on the host, from plain lists, and shared by all layers. Every range is checked here or compared
with a slab in O(1) at the door, so that no operation has to read an array back from the device to check it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import mlx.core as mx
import numpy as np

T = TypeVar("T")

# Query runs up to this length are decoded block by block; longer ones gather their blocks and use MLX's own SDPA.
# Block-parallel attention reads a block once per query token of the run, a gather once per run.
MAX_DECODE_QUERY_LEN = 8


@dataclass(frozen=True, eq=False)
class SlotMapping:
    """The slot of each new K/V row: ``slot = block_id * block_size + offset``; a slot below 0 is padding, skipped.

    vLLM: ``slot_mapping``. Build with :meth:`build`.
    """

    slots: np.ndarray  # [num_tokens] int32, host
    block_size: int

    @classmethod
    def build(cls, slots: Sequence[int] | np.ndarray | mx.array, block_size: int) -> SlotMapping:
        """Raises ``ValueError`` when ``slots`` is not one-dimensional, not of integers, or names a slot twice."""
        host = np.asarray(slots) if len(slots) else np.zeros(0, np.int32)
        if host.ndim != 1 or host.dtype.kind not in "iu":
            raise ValueError(
                f"[slot_mapping] slots must be integers of shape [num_tokens], got {host.dtype} {list(host.shape)}"
            )
        live = host[host >= 0]
        if live.size > 1:
            unique, counts = np.unique(live, return_counts=True)
            if unique.size != live.size:
                raise ValueError(f"[slot_mapping] slot {unique[counts > 1][0]} is named {counts.max()} times")
        return cls(host.astype(np.int32), block_size)

    @property
    def num_tokens(self) -> int:
        return self.slots.size

    @cached_property
    def max_slot(self) -> int:
        return int(self.slots.max(initial=-1))

    @cached_property
    def rows(self) -> mx.array | None:
        """Indices of the rows that are not padding, ``[num_live] int32``; ``None`` when no row is padding."""
        live = np.flatnonzero(self.slots >= 0)
        return None if live.size == self.slots.size else mx.array(live.astype(np.int32))

    @cached_property
    def only_slot(self) -> tuple[int, int] | None:
        """Block id and offset when there is one row and it is not padding: the decode step of a single sequence."""
        return divmod(int(self.slots[0]), self.block_size) if self.slots.size == 1 and self.slots[0] >= 0 else None

    @cached_property
    def block_ids(self) -> mx.array:
        """``[num_live] int32``"""
        return mx.array(self.slots[self.slots >= 0] // self.block_size)

    @cached_property
    def offsets(self) -> mx.array:
        """``[num_live] int32``"""
        return mx.array(self.slots[self.slots >= 0] % self.block_size)


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step of a ragged batch: sequence ``s`` has ``context_lens[s]`` tokens, its last ``query_lens[s]`` are new.

    Build with :meth:`build`; vLLM's names where it has them, but nothing is padded: the block tables of all sequences
    lie behind one another in one flat array, sequence ``s`` at ``cu_num_blocks[s] : cu_num_blocks[s + 1]``, and so do
    the queries, at ``cu_seqlens_q[s] : cu_seqlens_q[s + 1]``. All arrays are int32 on the host.
    """

    block_tables: np.ndarray  # [num_blocks of all sequences]
    cu_num_blocks: np.ndarray  # [num_seqs + 1]
    context_lens: np.ndarray  # [num_seqs], tokens in the cache after this step's writes
    cu_seqlens_q: np.ndarray  # [num_seqs + 1]
    block_size: int
    _plans: dict[Hashable, object] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        block_tables: Sequence[Sequence[int]],
        context_lens: Sequence[int],
        query_lens: Sequence[int],
        block_size: int,
    ) -> AttentionMetadata:
        """Check the lists against one another.

        Args:
            block_tables: block ids per sequence; those behind its context (reserved ones) are left out.

        Raises:
            ValueError: lists of different lengths, a query run that is empty or longer than its context, a block table
                too short for its context, a negative block id.
        """
        if not len(block_tables) == len(context_lens) == len(query_lens):
            raise ValueError(
                f"[attention_metadata] {len(block_tables)} block_tables, {len(context_lens)} context_lens and "
                f"{len(query_lens)} query_lens must be one per sequence"
            )
        num_blocks = [-(-context_len // block_size) for context_len in context_lens]
        for seq, table in enumerate(block_tables):
            if not 0 < query_lens[seq] <= context_lens[seq]:
                raise ValueError(
                    f"[attention_metadata] sequence {seq}: query_len {query_lens[seq]} must be within 1..context_len "
                    f"{context_lens[seq]}"
                )
            if len(table) < num_blocks[seq]:
                raise ValueError(
                    f"[attention_metadata] sequence {seq}: {context_lens[seq]} tokens need {num_blocks[seq]} blocks of "
                    f"{block_size}, the block table has {len(table)}"
                )
        flat = itertools.chain.from_iterable(
            itertools.islice(table, n) for table, n in zip(block_tables, num_blocks, strict=True)
        )
        blocks = np.fromiter(flat, dtype=np.int32, count=sum(num_blocks))
        if blocks.size and blocks.min() < 0:
            raise ValueError(f"[attention_metadata] block id {blocks.min()} is negative")
        return cls(
            block_tables=blocks,
            cu_num_blocks=_cumulative(num_blocks),
            context_lens=np.array(context_lens, dtype=np.int32),
            cu_seqlens_q=_cumulative(query_lens),
            block_size=block_size,
        )

    @cached_property
    def slot_mapping(self) -> SlotMapping:
        """Where the new tokens go, the last ``query_lens[s]`` positions of each sequence."""
        block_index, offset = np.divmod(self.query_positions, self.block_size)
        blocks = self.block_tables[self.cu_num_blocks[self.query_seqs] + block_index]
        return SlotMapping(blocks * self.block_size + offset, self.block_size)

    def plan(self, key: Hashable, make: Callable[[], T]) -> T:
        """What a backend derives from this step: made for the first layer, reused by the others."""
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]  # type: ignore[return-value]

    @property
    def num_seqs(self) -> int:
        return self.context_lens.size

    @cached_property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens_q[-1])

    @cached_property
    def query_lens(self) -> np.ndarray:
        """``[num_seqs]``"""
        return np.diff(self.cu_seqlens_q)

    @cached_property
    def max_query_len(self) -> int:
        return int(self.query_lens.max(initial=0))

    @cached_property
    def max_block_id(self) -> int:
        return int(self.block_tables.max(initial=-1))

    @cached_property
    def query_seqs(self) -> np.ndarray:
        """The sequence of each query token, ``[num_tokens]``."""
        return np.repeat(np.arange(self.num_seqs, dtype=np.int32), self.query_lens)

    @cached_property
    def query_positions(self) -> np.ndarray:
        """The position of each query token in its sequence, ``[num_tokens]``."""
        first_positions = self.context_lens - self.query_lens
        return np.arange(self.num_tokens, dtype=np.int32) + (first_positions - self.cu_seqlens_q[:-1])[self.query_seqs]

    def block_table(self, seq: int) -> np.ndarray:
        """``[num_blocks]`` of one sequence."""
        return self.block_tables[self.cu_num_blocks[seq] : self.cu_num_blocks[seq + 1]]

    @cached_property
    def by_query_len(self) -> tuple[tuple[AttentionMetadata, mx.array | None], ...]:
        """The step cut into its decodes and its prefills, each with the rows of the flat query axis that it holds.

        One part with ``None`` (all rows, in order) when the step is of one kind.
        """
        is_decode = self.query_lens <= MAX_DECODE_QUERY_LEN
        if is_decode.all() or not is_decode.any():
            return ((self, None),)
        return tuple(self._select(chosen) for chosen in (is_decode, ~is_decode))

    def _select(self, chosen: np.ndarray) -> tuple[AttentionMetadata, mx.array]:
        num_blocks = np.diff(self.cu_num_blocks)
        rows = np.flatnonzero(chosen[self.query_seqs]).astype(np.int32)
        part = AttentionMetadata(
            block_tables=self.block_tables[np.repeat(chosen, num_blocks)],
            cu_num_blocks=_cumulative(num_blocks[chosen]),
            context_lens=self.context_lens[chosen],
            cu_seqlens_q=_cumulative(self.query_lens[chosen]),
            block_size=self.block_size,
        )
        return part, mx.array(rows)


def _cumulative(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """``[0, l0, l0 + l1, ...]``, ``[len(lengths) + 1] int32``."""
    out = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=out[1:])
    return out
