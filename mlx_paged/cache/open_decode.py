"""A decode of a paged cache as a function of arrays, for tracing: what is constant from step to
step, and what changes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import mlx.core as mx

from mlx_paged.ops import KVHandle, Parts, StepState


class PlanShape(NamedTuple):
    """The attributes of an ``AttentionPlan`` that kernel calls use, besides its array."""

    group: int  # of layers
    key: Hashable  # of the plan in the group's step
    size: int  # of its array
    num_partitions: int
    num_partial_rows: int


class DecodeShape(NamedTuple):
    """What the graph of a decode depends on: steps with equal shapes differ only in arrays."""

    num_tokens: int
    num_blocks: int  # of the slabs
    layers: range  # that run
    plans: tuple[PlanShape, ...]


class DecodeArrays(NamedTuple):
    """The arrays that a decode reads, besides its tokens and the model's weights."""

    positions: mx.array  # [num_tokens] int32
    plans: list[mx.array]  # in the order of ``DecodeShape.plans``
    slots: list[mx.array]  # per group, packed; empty if kernels read them from the plans
    keys: list[Parts]  # the K slabs of each layer
    values: list[Parts]  # the V slabs of each layer
    fences: list[mx.array]  # of each slab


class OpenDecode(NamedTuple):
    """The open step of a cache, if it is a decode that can be traced."""

    shape: DecodeShape
    arrays: DecodeArrays
    slabs: list[KVHandle]  # for the next fences
    states: list[StepState] | None  # of a model with recurrent layers
