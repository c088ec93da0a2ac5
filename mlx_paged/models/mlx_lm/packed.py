"""An unmodified model of mlx-lm on packed input: each token is a batch entry of length 1.

Entries of a batch depend on each other only through their caches. So prompts, chunks of prompts,
decodes and any mix of them look the same to the model, and nothing is padded: the batch is the
packed axis, ``cache.offset`` holds the position of each row, and attention is computed by this
package's caches (:mod:`mlx_paged.models.mlx_lm.attention`). Modules with a recurrent state, which
mix the tokens of a sequence, run by groups of runs (:mod:`mlx_paged.models.mlx_lm.mixers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.cache import LayerKV, LayerSpec
from mlx_paged.models.language_model import LanguageModel, rotate_on, stock_cache
from mlx_paged.models.mlx_lm.final_norm import rows_wanted
from mlx_paged.models.mlx_lm.mixers import PackedState
from mlx_paged.models.mlx_lm.model_args import MlxLmArgs, describe
from mlx_paged.models.mlx_lm.packed_kv import PackedKV
from mlx_paged.models.mlx_lm.recording import RecurrentCaches, record_packed
from mlx_paged.models.mlx_lm.run_groups import RunGroups
from mlx_paged.ops import AttentionMetadata


class PackedModel(LanguageModel):
    """A model of mlx-lm on the caches of this package.

    Args:
        model: as mlx-lm loads it; its modules and weights are not changed.
        config: its ``config.json``.

    Raises:
        UnsuitableModelError: it can't run on packed input.
    """

    def __init__(self, model: Module, config: dict[str, Any]):
        super().__init__()
        self._recurrent = RecurrentCaches(model)
        self._recording = record_packed(model, self._recurrent)
        self.args = MlxLmArgs.read(config, self._recording.vocab_size)
        self.description = describe(config, "packed, with state" if self.state_nbytes else "packed")
        self.inner = model

    def __call__(
        self, tokens: mx.array, layers: Sequence[LayerKV], logit_rows: mx.array | None = None
    ) -> mx.array:
        recording, step = self._recording, layers[0].step
        entries = [
            PackedKV(None if index is None else layers[index], step.positions)
            for index in recording.entries
        ]
        groups = self._groups_of(step)
        num_states = len(self._recurrent.num_slots)
        states = [PackedState(groups, index) for index in range(num_states)] if groups else []
        wanted = logit_rows if recording.keeps_wanted_rows else None
        with rows_wanted(wanted, 0):
            logits: mx.array = self["inner"](
                tokens[:, None], cache=self._recurrent.fill(entries, states)
            )
        logits = logits.squeeze(1)
        logits = logits if wanted is logit_rows else logits[logit_rows]
        return mx.depends(logits, groups.put_states()) if groups else logits

    def _groups_of(self, step: AttentionMetadata) -> RunGroups | None:
        """``None`` for a model without recurrent layers."""
        if not self._recurrent.num_slots:
            return None
        if step.states is None:
            raise ValueError(
                f"[packed] a {self.model_type} keeps a recurrent state of each sequence; pass the "
                "states when the step is opened"
            )
        return RunGroups(step, step.states, self._recurrent.num_slots)

    def stock_caches(self) -> list[tuple[Any, int | None]]:
        recording = self._recording
        return [
            (stock_cache(window), layer)
            for window, layer in zip(recording.windows, recording.entries, strict=True)
        ]

    def rotate_keys(self, layer: int, keys: mx.array, distance: int) -> mx.array:
        rope = self._recording.ropes[layer]
        if rope is None:
            raise NotImplementedError(
                f"{self.description}, has layers whose keys are not rotated as a whole"
            )
        return rotate_on(rope, keys, distance)

    @property
    def model_type(self) -> str:
        return self.description.partition(" ")[0]

    @property
    def state_nbytes(self) -> int:
        return self._recurrent.nbytes

    @property
    def state_layout(self) -> tuple[str, ...]:
        return self._recurrent.layout

    @property
    def keeps_kv(self) -> bool:
        return any(entry is not None for entry in self._recording.entries)

    @property
    def num_layers(self) -> int:
        return len(self._recurrent.caches)

    @property
    def dtype(self) -> mx.Dtype:
        return self._recording.layers[0].format.dtype

    @property
    def layer_specs(self) -> list[LayerSpec]:
        return list(self._recording.layers)
