"""K/V of a module that both attends and has a recurrent state (``baichuan_m1``): it attends by
groups of runs.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_paged.cache import LayerKV
from mlx_paged.models.mlx_lm.attention import FetchedKeys, FetchedValues
from mlx_paged.models.mlx_lm.packed_kv import PackedKV
from mlx_paged.models.mlx_lm.run_groups import RunGroup
from mlx_paged.ops import AttentionMetadata


class GroupKV(PackedKV):
    """A cache for the ``[num_runs, length]`` tokens of a group, which attend as a separate step."""

    def __init__(self, layer: LayerKV, group: RunGroup):
        runs = group.runs
        step = layer.step.runs_of(
            [run.seq for run in runs],
            [run.begin for run in runs],
            [run.begin + run.length for run in runs],
        )
        super().__init__(_OnStep(layer, step), step.positions[:: group.length])
        self._shape = len(runs), group.length

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[FetchedKeys, FetchedValues]:
        return super().update_and_fetch(_packed(keys), _packed(values))

    def attend(self, queries: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        out = super().attend(_packed(queries), *args, **kwargs)
        return out.reshape(*self._shape, out.shape[1], out.shape[3]).swapaxes(1, 2)


class _OnStep:
    """A layer whose calls run on another step than the open one."""

    def __init__(self, layer: LayerKV, step: AttentionMetadata):
        self._layer, self._step = layer, step

    def update_and_attend(self, *args: Any, **kwargs: Any) -> mx.array:
        whole = self._layer.step
        self._layer.open(self._step)
        try:
            return self._layer.update_and_attend(*args, **kwargs)
        finally:
            self._layer.open(whole)

    def attend(self, *args: Any, **kwargs: Any) -> mx.array:
        raise NotImplementedError("a module with a recurrent state attends to its own K/V")

    update_and_attend_latents = attend


def _packed(x: mx.array) -> mx.array:
    """``[num_runs, num_heads, length, width]`` as ``[num_tokens, num_heads, 1, width]``."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], 1, x.shape[3])
