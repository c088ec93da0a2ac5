"""A decode of a paged cache as a function of arrays: what stays the same from step to step, and
what does not.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import mlx.core as mx

from mlx_paged.ops import KVHandle, Parts, StepState


class PlanShape(NamedTuple):
    """What a kernel call takes of an ``AttentionPlan`` beside its array."""

    group: int  # of layers
    key: Hashable  # under which the step of the group keeps the plan
    size: int  # of its array
    num_partitions: int
    num_partial_rows: int


class DecodeShape(NamedTuple):
    """What the graph of a decode depends on: steps of equal shapes differ in their arrays only."""

    num_tokens: int
    num_blocks: int  # of the slabs
    layers: range  # that run
    plans: tuple[PlanShape, ...]


class DecodeArrays(NamedTuple):
    """The arrays that a decode reads, beside its tokens and the model's weights."""

    positions: mx.array  # [num_tokens] int32
    plans: list[mx.array]  # in the order of ``DecodeShape.plans``
    slots: list[mx.array]  # of each group, packed; none where kernels take them from plans
    keys: list[Parts]  # the K slabs of each layer
    values: list[Parts]  # the V slabs of each layer
    fences: list[mx.array]  # of each slab


class OpenDecode(NamedTuple):
    """The open step of a cache, where it is a decode as a function of arrays."""

    shape: DecodeShape
    arrays: DecodeArrays
    slabs: list[KVHandle]  # which take the next fences
    states: list[StepState] | None  # of a model with recurrent layers
