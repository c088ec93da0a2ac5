"""``AttentionMetadata``: the slots that a step's rows go to and the blocks that its queries read.

A step is described once, on the host, for all layers. Its lists are plain lists of integers: a step
has few sequences and most have one new token, where a call into numpy costs more than the loop that
it replaces. The operations check it against a slab in O(1), without reading from the device.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar, cast

import mlx.core as mx
import numpy as np

from mlx_paged.ops.formats import Parts
from mlx_paged.ops.states import StepState

T = TypeVar("T")
Rows: TypeAlias = tuple[mx.array, mx.array]  # K and V
StoredRows: TypeAlias = tuple[Parts, Parts]  # K and V, as slabs hold them

# MLX passes smaller inputs in another address space, which would be another kernel to compile.
MIN_ELEMENTS = 8


def padded(values: Sequence[int], filler: int = 0) -> mx.array:
    """``[max(len(values), MIN_ELEMENTS)] int32`` for a kernel; no thread reads the padding."""
    return mx.array([*values, *[filler] * (MIN_ELEMENTS - len(values))], dtype=mx.int32)


def rounded_up(count: int, steps: int) -> int:
    """``count``, at least 1, rounded up to one of ``steps`` sizes per power of two; unchanged up to
    ``2 * steps``.

    Sizes that grow with a context repeat this way, so that MLX can reuse buffers. The padding is
    less than ``1 / steps``.
    """
    step = max(1, (1 << (count - 1).bit_length()) // (2 * steps))
    return -(-count // step) * step


@dataclass(frozen=True, eq=False)
class SlotMapping:
    """The slot of each new K/V row: ``slot = block_id * block_size + offset``; a slot below 0 is
    padding, skipped.

    vLLM: ``slot_mapping``.
    """

    slots: list[int]  # [num_tokens], unique except for padding
    block_size: int
    _places: dict[int, tuple[mx.array, mx.array, mx.array]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    @cached_property
    def packed(self) -> mx.array:
        """``[max(num_tokens, 8)] int32`` with padding, for a kernel."""
        return padded(self.slots, -1)

    @cached_property
    def max_slot(self) -> int:
        return max(self.slots, default=-1)

    @cached_property
    def only_slot(self) -> tuple[int, int] | None:
        """Block id and offset of the row if there is only one, as in a single decode."""
        is_one = len(self.slots) == 1 and self.slots[0] >= 0
        return divmod(self.slots[0], self.block_size) if is_one else None

    @cached_property
    def live_rows(self) -> mx.array | None:
        """``[num_live] int32``, the rows that are not padding; ``None`` when no row is padding."""
        if min(self.slots, default=0) >= 0:
            return None
        return mx.array([row for row, slot in enumerate(self.slots) if slot >= 0], dtype=mx.int32)

    def places(self, num_kv_heads: int) -> tuple[mx.array, mx.array, mx.array]:
        """Block id, head and offset of each row that is not padding, ``[num_live, num_kv_heads]
        uint32`` each: the form to which MLX would convert the indices of every scatter.
        """
        found = self._places.get(num_kv_heads)
        if found is None:
            slots = np.array([slot for slot in self.slots if slot >= 0], dtype=np.uint32)[:, None]
            heads = np.arange(num_kv_heads, dtype=np.uint32)
            shape = len(slots), num_kv_heads
            block_ids, of_heads, offsets = (
                mx.array(np.ascontiguousarray(np.broadcast_to(each, shape)))
                for each in (slots // self.block_size, heads, slots % self.block_size)
            )
            found = self._places[num_kv_heads] = block_ids, of_heads, offsets
        return found


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """The arguments of one layer's attention that are not arrays of tokens."""

    scale: float  # of the scores, usually ``key_dim ** -0.5``
    window: int | None = None  # each query sees its last ``window`` tokens, itself included
    sinks: mx.array | None = None  # [num_heads], learned attention-sink logits (MLX's argument)
    # Scores become ``softcap * tanh(score / softcap)`` before they are masked (Gemma 2); no sinks.
    softcap: float | None = None
    # Whether K holds latents and V their rotated keys (MLA, DeepSeek-V2): queries have a part for
    # each, ``[num_tokens, num_heads, key_dim + value_dim]``, and the values are the latents.
    holds_latents: bool = False


class StepPart(NamedTuple):
    """The sequences of a step whose query runs share a kernel."""

    capacity: int  # the smallest supported length that holds their runs; 0 if they are longer
    step: AttentionMetadata
    rows: mx.array | None  # [num_tokens of the part] int32, its rows; None for the whole step

    def take(self, q: mx.array, kv_rows: Rows | None) -> tuple[mx.array, Rows | None]:
        """The part's rows of the step's packed queries, and of its K and V if given."""
        rows = self.rows
        if rows is None:
            return q, kv_rows
        if kv_rows is None:
            return q[rows], None
        k, v = kv_rows
        return q[rows], (k[rows], v[rows])


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step of a ragged batch: sequence ``s`` has ``context_lens[s]`` tokens, and its last
    ``query_lens[s]`` are new.

    The lists are not checked: the :class:`KVCacheManager` guarantees that they are consistent.
    Names are vLLM's where it has them, but nothing is padded: the new tokens of all sequences share
    one flat axis ``[num_tokens]``, where sequence ``s`` has
    ``cu_seqlens_q[s] : cu_seqlens_q[s + 1]``.
    """

    block_tables: list[array[int]]  # per sequence, the blocks of its context and no more, int32
    context_lens: list[int]  # tokens in the block table after this step's writes
    query_lens: list[int]
    block_size: int
    # Whether a sequence reads blocks that another one writes in this step, as when both begin with
    # the same prompt. Then all rows are written before any is read, which costs a dispatch.
    shares_new_blocks: bool = False
    # Per sequence, how many of its last tokens need logits: more than one for speculation, none for
    # an incomplete prompt. None for one each.
    num_logit_rows: list[int] | None = None
    # False if the single row of num_logit_rows is not read.
    wants_logits: bool = True
    known_max_block_id: int | None = None  # saves a search through the tables
    # Per sequence, how much the positions of its tokens exceed their indices in its context, after
    # evictions; None for 0 everywhere.
    position_offsets: list[int] | None = None
    # Per sequence, for models with recurrent layers only.
    states: list[StepState] | None = None
    _derived: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """A value that is made for the first layer of this step and reused by the others."""
        if key not in self._derived:
            self._derived[key] = make()
        return cast(T, self._derived[key])

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @cached_property
    def max_query_len(self) -> int:
        return max(self.query_lens, default=0)

    @cached_property
    def max_block_id(self) -> int:
        if self.known_max_block_id is not None:
            return self.known_max_block_id
        return max(map(max, self.block_tables), default=-1)

    @cached_property
    def cu_seqlens_q(self) -> list[int]:
        """``[num_seqs + 1]``"""
        return [0, *itertools.accumulate(self.query_lens)]

    @cached_property
    def positions(self) -> mx.array:
        """``[num_tokens] int32``, the position of each new token in its sequence."""
        ends: Iterable[int] = self.context_lens
        if self.position_offsets is not None:
            ends = map(operator.add, ends, self.position_offsets)
        runs = zip(ends, self.query_lens, strict=True)
        return mx.array([p for end, n in runs for p in range(end - n, end)], dtype=mx.int32)

    @property
    def first_position(self) -> int:
        """The position of the first new token of the first sequence."""
        num_before = self.context_lens[0] - self.query_lens[0]
        return (
            num_before if self.position_offsets is None else num_before + self.position_offsets[0]
        )

    @cached_property
    def slot_mapping(self) -> SlotMapping:
        """The slots of the new tokens: the last ``query_lens[s]`` of each sequence."""
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
                index, offset = divmod(position, block_size)
                count = min(block_size - offset, context_len - position)
                slot = table[index] * block_size + offset
                slots.extend(range(slot, slot + count))
                position += count
        return SlotMapping(slots, block_size)

    @property
    def with_history(self) -> AttentionMetadata:
        """The step restricted to sequences with earlier tokens."""
        # A reference to itself would keep a step's arrays until the next garbage collection.
        return self.derived("with_history", self._select_with_history) or self

    def _select_with_history(self) -> AttentionMetadata | None:
        """``None`` for the whole step."""
        runs = zip(self.context_lens, self.query_lens, strict=True)
        seqs = [seq for seq, (context_len, query_len) in enumerate(runs) if context_len > query_len]
        return None if len(seqs) == self.num_seqs else self._select(seqs, self.query_lens)

    @cached_property
    def logit_rows(self) -> mx.array | None:
        """``[num_rows] int32``, the rows of the tokens that need logits; ``None`` for all.

        vLLM: ``logits_indices``.
        """
        counts = self.logit_counts
        if counts == self.query_lens:
            return None
        runs = zip(self.cu_seqlens_q[1:], counts, strict=True)
        return mx.array([row for end, n in runs for row in range(end - n, end)], dtype=mx.int32)

    @property
    def logit_queries(self) -> AttentionMetadata:
        """The step restricted to the queries of :attr:`logit_rows` and their sequences."""
        if self.logit_rows is None:
            return self
        counts = self.logit_counts
        seqs = [seq for seq, count in enumerate(counts) if count]
        return self.derived("logit_queries", lambda: self._select(seqs, counts))

    def parts(self, capacities: tuple[int, ...]) -> tuple[list[StepPart], mx.array | None]:
        """Divide the step by the length of its query runs.

        The part of a run depends only on its own length, so that the bits of its result don't
        depend on the rest of the batch.

        Args:
            capacities: the longest run of each part, ascending; longer runs are a separate part.

        Returns:
            The parts, and the order ``[num_tokens] int32`` that restores the order of their
            concatenated rows; ``None`` if there is one part.
        """
        cut = self.derived(("parts", capacities), lambda: self._cut_into_parts(capacities))
        # A reference to itself would keep a step's arrays until the next garbage collection.
        return ([StepPart(cut, self, None)], None) if isinstance(cut, int) else cut

    def _cut_into_parts(
        self, capacities: tuple[int, ...]
    ) -> int | tuple[list[StepPart], mx.array | None]:
        """The parts and the order of their rows, or the capacity of the only part."""
        seqs_of: dict[int, list[int]] = {}
        for seq, query_len in enumerate(self.query_lens):
            capacity = next((n for n in capacities if query_len <= n), 0)
            seqs_of.setdefault(capacity, []).append(seq)
        if len(seqs_of) == 1:
            return next(iter(seqs_of))
        starts = self.cu_seqlens_q
        parts, all_rows = [], []
        for capacity, seqs in seqs_of.items():
            rows = [row for seq in seqs for row in range(starts[seq], starts[seq + 1])]
            part = self._select(seqs, self.query_lens)
            parts.append(StepPart(capacity, part, mx.array(rows, dtype=mx.int32)))
            all_rows += rows
        row_order = sorted(range(len(all_rows)), key=all_rows.__getitem__)
        return parts, mx.array(row_order, dtype=mx.int32)

    def token_by_token(self, longest: int) -> AttentionMetadata:
        """The step with a sequence of its own for each token of the query runs of up to ``longest``
        tokens, so that attention sums for it in the order of a step that has this token only.
        """
        if not any(1 < query_len <= longest for query_len in self.query_lens):
            return self
        seqs: list[int] = []
        begins: list[int] = []
        ends: list[int] = []
        logit_counts: list[int] = []
        for seq, query_len in enumerate(self.query_lens):
            size = 1 if query_len <= longest else query_len
            num_before = query_len - self.logit_counts[seq]  # tokens without logits
            for begin in range(0, query_len, size):
                seqs.append(seq)
                begins.append(begin)
                ends.append(begin + size)
                logit_counts.append(max(0, begin + size - max(begin, num_before)))
        return replace(
            self.runs_of(seqs, begins, ends),
            shares_new_blocks=True,
            num_logit_rows=logit_counts,
            wants_logits=self.wants_logits,
        )

    def runs_of(
        self, seqs: Sequence[int], begins: Sequence[int], ends: Sequence[int]
    ) -> AttentionMetadata:
        """The step of these sequences, each restricted to its new tokens ``begin : end``."""
        context_lens = [
            self.context_lens[seq] - self.query_lens[seq] + end
            for seq, end in zip(seqs, ends, strict=True)
        ]
        return AttentionMetadata(
            [
                self.block_tables[seq][: -(-context_len // self.block_size)]
                for seq, context_len in zip(seqs, context_lens, strict=True)
            ],
            context_lens,
            list(map(operator.sub, ends, begins)),
            self.block_size,
            known_max_block_id=self.known_max_block_id,
            position_offsets=self.position_offsets and [self.position_offsets[seq] for seq in seqs],
        )

    @property
    def logit_counts(self) -> list[int]:
        """How many of the last tokens of each sequence need logits."""
        return [1] * self.num_seqs if self.num_logit_rows is None else self.num_logit_rows

    def _select(self, seqs: list[int], query_lens: list[int]) -> AttentionMetadata:
        """The step restricted to ``seqs``, each with its last ``query_lens[seq]`` queries."""
        return AttentionMetadata(
            [self.block_tables[seq] for seq in seqs],
            [self.context_lens[seq] for seq in seqs],
            [query_lens[seq] for seq in seqs],
            self.block_size,
            known_max_block_id=self.known_max_block_id,
            position_offsets=self.position_offsets and [self.position_offsets[seq] for seq in seqs],
        )


# A decode step without host values, for tracing


def traced_decode(
    block_size: int,
    positions: mx.array,  # [num_tokens] int32
    derived: Mapping[Hashable, object],
    slots: mx.array | None = None,
    states: list[StepState] | None = None,
) -> AttentionMetadata:
    """A step of single tokens that consists of arrays only.

    A trace is replayed with the arrays of other steps, so any host value that it reads would be
    baked in. Here lengths, block ids and slots are missing: reading one raises ``RuntimeError``.

    Args:
        derived: the values that :meth:`AttentionMetadata.derived` returns, by key.
        slots: :attr:`SlotMapping.packed`, if it is read.
        states: with arrays of the trace, for a model with recurrent layers.
    """
    num_tokens = positions.shape[0]
    unknown: list[Any] = cast(Any, _Unknown(num_tokens))
    query_lens = [1] * num_tokens
    step = AttentionMetadata(
        unknown, unknown, query_lens, block_size, known_max_block_id=0, states=states
    )
    slot_mapping = SlotMapping(unknown, block_size)
    # Set the cached properties. The values were checked against the slabs when the step was
    # planned.
    vars(slot_mapping)["max_slot"] = -1
    if slots is not None:
        vars(slot_mapping)["packed"] = slots
    vars(step).update(positions=positions, slot_mapping=slot_mapping)
    for key, value in derived.items():
        step.derived(key, lambda value=value: value)  # type: ignore[misc]
    return step


class _Unknown(Sequence[int]):
    """A sequence with a length whose items can't be read."""

    def __init__(self, length: int):
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: object) -> NoReturn:
        raise RuntimeError("[traced step] a trace can't read host values, which change every step")
