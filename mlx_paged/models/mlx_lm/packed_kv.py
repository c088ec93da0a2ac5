"""One entry of the list of caches that a model of mlx-lm is called with in a packed step."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from mlx_paged.errors import UnsuitableModelError
from mlx_paged.models.mlx_lm.attention import (
    FetchedKeys,
    FetchedValues,
    RopeScores,
    WindowMask,
)


class AttentionLayer(Protocol):
    """The part of :class:`mlx_paged.cache.LayerKV` that is used here."""

    def update_and_attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array: ...

    def attend(self, q: mx.array, *, scale: float, sinks: mx.array | None) -> mx.array: ...

    def update_and_attend_latents(
        self, q: mx.array, latents: mx.array, rope_keys: mx.array
    ) -> mx.array: ...


class PackedKV:
    """A cache for a batch of tokens, each a batch entry of length 1.

    The names are mlx-lm's. There is no ``__len__``, because mlx-lm treats a falsy cache as none.

    Args:
        layer: computes attention; ``None`` for an entry in which the model keeps no K/V.
        offset: ``[num_tokens]``, the position of each token.

    Attributes:
        is_open: whether K and V were fetched and not attended to yet.
    """

    def __init__(self, layer: AttentionLayer | None, offset: mx.array):
        self.layer = layer
        self.offset = offset
        self.is_open = False
        self._is_written = False
        self._fetched: tuple[FetchedKeys, FetchedValues] | None = None

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> WindowMask | None:
        """The mask that the model passes to attention; a row of length 1 needs none."""
        return None if window_size is None else WindowMask(window_size)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[FetchedKeys, FetchedValues]:
        """Take K and V, ``[num_tokens, num_kv_heads, 1, width]``, and return the same rows."""
        if self._fetched is not None:
            raise UnsuitableModelError("it writes the K/V of a layer twice in one pass")
        if not keys.ndim == values.ndim == 4 or not keys.shape[2] == values.shape[2] == 1:
            raise UnsuitableModelError("its K and V are not one row per token")
        fetched = FetchedKeys(keys)
        fetched.owner = self
        fetched.values = FetchedValues(values)
        self._fetched = fetched, fetched.values
        self.is_open = True
        return self._fetched

    def keys_and_values(self) -> tuple[FetchedKeys, FetchedValues]:
        """The K and V that the step has written, for a layer that shares them."""
        if self._fetched is None:
            raise UnsuitableModelError("it reads the K/V of a layer before they are written")
        return self._fetched

    def attend(
        self,
        queries: mx.array,  # [num_tokens, num_heads, 1, key_dim]
        keys: FetchedKeys,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """As mlx-lm's ``scaled_dot_product_attention``: ``[num_tokens, num_heads, 1, value_dim]``.
        The window and the cap of scores are the layer's own.
        """
        layer = self.layer
        assert layer is not None, "nothing is fetched from an entry without K/V"
        if queries.ndim != 4 or queries.shape[2] != 1:
            raise UnsuitableModelError("its queries are not one row per token")
        self.is_open = False
        is_written, self._is_written = self._is_written, True
        q, k = queries.squeeze(2), keys.squeeze(2)
        if isinstance(mask, RopeScores):
            if is_written or values is not keys or mask.keys is not keys.values:
                raise UnsuitableModelError("its latents are used in an unknown way")
            both = mx.concatenate([q * scale, mask.queries.squeeze(2)], axis=-1)
            out = layer.update_and_attend_latents(both, k, keys.values.squeeze(2))
            return out[:, :, None]
        if values is not keys.values:
            raise UnsuitableModelError("it attends to other values than those of its cache")
        if is_written:
            out = layer.attend(q, scale=scale, sinks=sinks)
        else:
            out = layer.update_and_attend(q, k, values.squeeze(2), scale=scale, sinks=sinks)
        return out[:, :, None]
