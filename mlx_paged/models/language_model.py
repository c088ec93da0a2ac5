"""What every model here offers beyond MLX's ``Module``, whose type knows none of its attributes."""

from __future__ import annotations

from typing import Any, Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.cache import KVCache


class ModelArgs(Protocol):
    """The fields of a model's configuration that are read outside of the model."""

    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None


class LanguageModel(Module):
    """A model for packed input.

    :class:`mlx_paged.models.qwen3.Model` says what the call takes and returns.

    Attributes:
        args: the model's configuration.
        dtype: of its activations, and so of K/V.
    """

    args: ModelArgs

    @property
    def dtype(self) -> mx.Dtype:
        raise NotImplementedError

    def __call__(
        self,
        tokens: mx.array,
        positions: mx.array,
        cache: KVCache,
        last_rows: mx.array | None = None,
    ) -> mx.array:
        raise NotImplementedError


def as_language_model(model: Module) -> LanguageModel:
    """``model`` by the type that it has.

    Users give a ``Module``; what it offers is checked elsewhere, by its attributes.
    """
    return cast(LanguageModel, model)
