"""What the gather kernel must know of the sequences whose K and V it copies, in one int32 array."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_paged.ops.metadata import AttentionMetadata, Rows, padded


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """The sequences of one dispatch."""

    array: mx.array  # int32: 2 numbers per block, then 3 per sequence
    num_blocks: int  # over all sequences
    num_tokens: list[int]  # of each sequence

    @classmethod
    def of(cls, step: AttentionMetadata) -> GatherPlan:
        """The plan of all sequences of ``step``, packed for its first layer."""
        return step.derived((cls,), lambda: cls.pack(step.block_tables, step.context_lens))

    @classmethod
    def pack(cls, block_tables: Sequence[Sequence[int]], num_tokens: list[int]) -> GatherPlan:
        """Per block its id and its sequence; per sequence its first block, its first token, and its
        tokens.
        """
        lengths = [len(table) for table in block_tables]
        num_blocks = sum(lengths)
        records = array("i", bytes(4 * 2 * num_blocks))
        records[0::2] = array("i", itertools.chain.from_iterable(block_tables))
        records[1::2] = array(
            "i", itertools.chain.from_iterable(map(itertools.repeat, range(len(lengths)), lengths))
        )
        first_blocks = itertools.accumulate(lengths, initial=0)
        first_tokens = itertools.accumulate(num_tokens, initial=0)
        for record in zip(first_blocks, first_tokens, num_tokens, strict=False):
            records.extend(record)
        return cls(padded(records), num_blocks, num_tokens)

    def split(self, keys: mx.array, values: mx.array, num_kv_heads: int) -> list[Rows]:
        """Each sequence's K and V, ``[num_kv_heads, num_tokens, width]``, of what the kernel wrote,
        ``[num_tokens * num_kv_heads, width]``.
        """
        ends = [num_kv_heads * end for end in itertools.accumulate(self.num_tokens)]
        pieces = (
            [piece.reshape(num_kv_heads, -1, rows.shape[1]) for piece in mx.split(rows, ends[:-1])]
            if len(ends) > 1
            else [rows.reshape(num_kv_heads, -1, rows.shape[1])]
            for rows in (keys, values)
        )
        return [*zip(*pieces, strict=True)]
