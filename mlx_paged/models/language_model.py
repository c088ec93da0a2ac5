"""The interface of models that run here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_paged.argument_values import kind_of
from mlx_paged.cache import LayerKV, LayerSpec
from mlx_paged.errors import ArgumentError


class ModelArgs(Protocol):
    """The fields of a model's configuration that are read outside of the model."""

    vocab_size: int
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None


class LanguageModel(Module, ABC):
    """A model for packed input: the tokens of a ragged batch on one axis, without padding.

    To add one, write ``models/<model_type>.py`` with a ``Model`` and a ``ModelArgs``, like
    :mod:`mlx_paged.models.qwen3`.

    Attributes:
        args: the model's configuration.
        name: of the folder, repository or file that it was loaded from, or empty.
        path: of that folder or file, if it is known.
        description: its type and how it runs, for the first line that programs print.
        group: the ranks that its heads are split over; ``None`` if this process has all of them.
    """

    args: ModelArgs
    name: str = ""
    path: Path | None = None
    description: str
    group: mx.distributed.Group | None = None

    @property
    @abstractmethod
    def dtype(self) -> mx.Dtype:
        """Of the activations."""

    @property
    @abstractmethod
    def layer_specs(self) -> list[LayerSpec]:
        """The K/V of each layer, usually in :attr:`dtype`; layers may differ."""

    @property
    def num_layers(self) -> int:
        """The number of layers that mix the tokens of a sequence, with or without K/V."""
        return len(self.layer_specs)

    @property
    def runs_packed(self) -> bool:
        """Whether all new tokens of a step run together, not one sequence at a time."""
        return True

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states that recurrent layers keep of a sequence; 0 without such layers.

        A model with states reads and sets ``step.states``.
        """
        return 0

    @property
    def state_layout(self) -> tuple[str, ...]:
        """Per recurrent cache, the dtypes and shapes of its arrays as text."""
        return ()

    @property
    def keeps_kv(self) -> bool:
        """Whether any layer has K/V; otherwise :attr:`layer_specs` has a single unused layer."""
        return True

    def stock_caches(self) -> list[tuple[Any, int | None]]:
        """The empty caches that mlx-lm makes for this model, each with the index of the layer whose
        K/V it holds; ``None`` for one without K/V.
        """
        return [(stock_cache(spec.window), layer) for layer, spec in enumerate(self.layer_specs)]

    def shard(self, group: mx.distributed.Group) -> None:
        """Keep this rank's share of the weights (tensor parallelism). The logits are the same on
        all ranks, and :attr:`layer_specs` has the heads of this rank.

        Raises:
            ArgumentError: names a size that is not divisible; nothing was changed.
            NotImplementedError: the model can't be split.
        """
        raise NotImplementedError(f"[{type(self).__module__}] can't be split over ranks")

    def rotate_keys(self, layer: int, keys: mx.array, distance: int) -> mx.array:
        """Keys as a layer would have computed them at positions higher by ``distance``.

        Rotations add up, so already rotated keys are rotated further.

        Args:
            keys: ``[num_tokens, num_kv_heads, key_dim]``, in any floating dtype.

        Raises:
            NotImplementedError: positions are not encoded as a rotation of the keys.
        """
        raise NotImplementedError(f"[{type(self).__module__}] can't rotate keys")

    @abstractmethod
    def __call__(
        self,
        tokens: mx.array,  # [num_tokens] int32, packed
        layers: Sequence[LayerKV],
        logit_rows: mx.array | None = None,  # [num_rows] int32
    ) -> mx.array:
        """Run the open step of a cache.

        A layer calls ``update_and_attend`` of its entry in ``layers`` with K and V of all tokens;
        positions are ``layers[0].offset``. The last layer may skip queries whose logits are not
        needed.

        Args:
            layers: ``cache.layers``.
            logit_rows: ``step.logit_rows``, the rows whose logits are needed; ``None`` for all.

        Returns:
            Logits ``[num_rows, vocab_size]``.
        """


def rotate_on(rope: Callable[..., mx.array], keys: mx.array, distance: int) -> mx.array:
    """Implements :meth:`LanguageModel.rotate_keys` for keys that ``rope`` has rotated.

    Args:
        rope: a RoPE module of mlx-lm or MLX, called with an ``offset``.
        keys: ``[num_tokens, num_kv_heads, key_dim]``, in any floating dtype.
    """
    # Some kinds of scaling also multiply keys, which must not happen twice.
    length = rope(mx.ones((1, 1, 1, keys.shape[-1])), offset=0)
    rotated = rope(keys.astype(mx.float32)[:, :, None] / length, offset=distance)
    return rotated.squeeze(2).astype(keys.dtype)


def stock_cache(window: int | None) -> KVCache | RotatingKVCache:
    """An empty cache of mlx-lm for one layer."""
    return KVCache() if window is None else RotatingKVCache(window)


def check_model(model: object) -> LanguageModel:
    """``model`` as a :class:`LanguageModel`. A model of :func:`mlx_paged.load` is one already; a
    model of ``mlx_lm.load`` is adapted, and tested the first time.

    Raises:
        ArgumentError: it is neither, or can't run here.
    """
    if isinstance(model, LanguageModel):
        return model
    # Imported here, since adapted models are subclasses of this module's class.
    from mlx_paged.models.mlx_lm.loaded import adapted, is_called_as_mlx_lm

    if not is_called_as_mlx_lm(model):
        kind = f"{type(model).__module__}.{kind_of(model)}".removeprefix("builtins.")
        raise ArgumentError(
            f"[model] model must be one that mlx_paged.load or mlx_lm.load returns, got {kind}",
            "model",
        )
    assert isinstance(model, Module)
    return adapted(model)


def model_type_of(model: LanguageModel) -> str:
    """The model's ``model_type``, for messages."""
    return str(getattr(model, "model_type", type(model).__name__))
