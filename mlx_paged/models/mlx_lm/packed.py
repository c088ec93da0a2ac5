"""A model of mlx-lm, unmodified, for packed input: each token is a row of length 1 in its batch.

Rows of a batch are independent of each other except through their caches. So a prompt, a chunk of
one, a decode and any mix of them are the same thing to the model, and nothing is padded: its batch
is the packed axis, ``cache.offset`` is the position of each row, and attention is that of the
caches here (:mod:`mlx_paged.models.mlx_lm.attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.cache import LayerKV, LayerSpec
from mlx_paged.models.language_model import LanguageModel, rotate_on, stock_cache
from mlx_paged.models.mlx_lm.final_norm import rows_wanted
from mlx_paged.models.mlx_lm.model_args import MlxLmArgs, describe
from mlx_paged.models.mlx_lm.packed_kv import PackedKV
from mlx_paged.models.mlx_lm.recording import record_packed


class PackedModel(LanguageModel):
    """A model of mlx-lm on the caches of this package.

    Args:
        model: as mlx-lm loads it; its modules and weights stay as they are.
        config: its ``config.json``.

    Raises:
        UnsuitableModelError: it can't run on packed input.
    """

    def __init__(self, model: Module, config: dict[str, Any]):
        super().__init__()
        self._recording = record_packed(model)
        self.args = MlxLmArgs.read(config, self._recording.vocab_size)
        self.description = describe(config, "packed")
        self.inner = model

    def __call__(
        self, tokens: mx.array, layers: Sequence[LayerKV], logit_rows: mx.array | None = None
    ) -> mx.array:
        recording, offset = self._recording, layers[0].offset
        entries = [
            PackedKV(None if index is None else layers[index], offset)
            for index in recording.entries
        ]
        wanted = logit_rows if recording.keeps_wanted_rows else None
        with rows_wanted(wanted, 0):
            logits: mx.array = self["inner"](tokens[:, None], cache=entries)
        logits = logits.squeeze(1)
        return logits if wanted is logit_rows else logits[logit_rows]

    def stock_caches(self) -> list[tuple[Any, int | None]]:
        recording = self._recording
        return [
            (stock_cache(window), layer)
            for window, layer in zip(recording.windows, recording.entries, strict=True)
        ]

    def rotate_keys(self, layer: int, keys: mx.array, distance: int) -> mx.array:
        rope = self._recording.ropes[layer]
        if rope is None:
            raise NotImplementedError(f"{self.description}, does not end keys with a rotation")
        return rotate_on(rope, keys, distance)

    @property
    def dtype(self) -> mx.Dtype:
        return self._recording.layers[0].format.dtype

    @property
    def layer_specs(self) -> list[LayerSpec]:
        return list(self._recording.layers)
