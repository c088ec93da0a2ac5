"""A decode step without host values, for tracing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn, cast

import mlx.core as mx

from mlx_paged.ops.metadata import AttentionMetadata, SlotMapping
from mlx_paged.ops.states import StepState


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
