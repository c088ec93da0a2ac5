"""``GatherPlan``: the sequences whose K and V a gather kernel copies, in one int32 array."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_paged.ops.attention_plan import plan_size
from mlx_paged.ops.metadata import AttentionMetadata, Rows, rounded_up

# Sizes of results per power of two: more of them waste less memory, but buffers are reused less
# often while a context grows.
NUM_OUT_STEPS = 8


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """The sequences of one dispatch, followed by one of null blocks that pads the result."""

    array: mx.array  # int32: 2 numbers per block, then 3 per sequence, then zeros
    num_blocks: int  # over all sequences
    num_tokens: list[int]  # of each sequence, without the padding

    @classmethod
    def of(cls, step: AttentionMetadata) -> GatherPlan:
        """The plan of all sequences of ``step``, packed for its first layer."""
        return step.derived(
            (cls,), lambda: cls.pack(step.block_tables, step.context_lens, step.block_size)
        )

    @classmethod
    def pack(
        cls, block_tables: Sequence[Sequence[int]], num_tokens: list[int], block_size: int
    ) -> GatherPlan:
        """Per block its id and its sequence; per sequence its first block, its first token, and its
        number of tokens.

        Sizes are rounded up, so that a growing context reuses buffers.
        """
        total = sum(num_tokens)
        num_filling = rounded_up(total, NUM_OUT_STEPS) - total
        filling = [0] * -(-num_filling // block_size)
        lengths = [*map(len, block_tables), len(filling)]
        num_blocks = sum(lengths)
        records = array("i", bytes(4 * 2 * num_blocks))
        records[0::2] = array("i", itertools.chain(*block_tables, filling))
        records[1::2] = array(
            "i", itertools.chain.from_iterable(map(itertools.repeat, range(len(lengths)), lengths))
        )
        first_blocks = itertools.accumulate(lengths, initial=0)
        first_tokens = itertools.accumulate(num_tokens, initial=0)
        for record in zip(first_blocks, first_tokens, [*num_tokens, num_filling], strict=False):
            records.extend(record)
        records.frombytes(bytes(4 * (plan_size(len(records)) - len(records))))
        plan = mx.array(memoryview(records))  # type: ignore[arg-type]  # buffers
        return cls(plan, num_blocks, num_tokens)

    @property
    def num_out_tokens(self) -> int:
        """Tokens of the result, including the padding."""
        return rounded_up(sum(self.num_tokens), NUM_OUT_STEPS)

    def split(self, keys: mx.array, values: mx.array, num_kv_heads: int) -> list[Rows]:
        """Split the kernel's outputs, ``[num_out_tokens * num_kv_heads, width]``, into each
        sequence's K and V, ``[num_kv_heads, num_tokens, width]``.
        """
        ends = [num_kv_heads * end for end in itertools.accumulate(self.num_tokens)]
        starts = [0, *ends[:-1]]
        pieces = (
            [
                rows[start:end].reshape(num_kv_heads, -1, rows.shape[1])
                for start, end in zip(starts, ends, strict=True)
            ]
            for rows in (keys, values)
        )
        return [*zip(*pieces, strict=True)]
