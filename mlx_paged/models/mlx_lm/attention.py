"""The attention of mlx-lm's models, where it is computed on the caches of this package.

A model of mlx-lm gives its new K and V to a cache, gets back those of the whole sequence, and hands
them to ``scaled_dot_product_attention``, a function that its module has imported. The caches here
give a model its own rows back, as arrays that know whose they are. :func:`attend_on_our_caches`
puts a function in the place of mlx-lm's that asks such arrays to attend, and passes all others on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

_NAME = "scaled_dot_product_attention"
_MODULES = "mlx_lm.models."


class Owner(Protocol):
    """What hands out :class:`FetchedKeys`."""

    def attend(
        self,
        queries: mx.array,
        keys: FetchedKeys,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As mlx-lm's ``scaled_dot_product_attention``."""
        ...


class FetchedKeys(mx.array):
    """K as a cache hands it to a model. What a model computes from it is a plain array."""

    owner: Owner
    values: FetchedValues


class FetchedValues(mx.array):
    """V as a cache hands it to a model.

    Models with latents (MLA) put the rotated part of K in the place of V, multiply rotated queries
    by it, and hand on these scores as a mask. Here the product is left open.
    """

    def swapaxes(self, axis1: int, axis2: int) -> mx.array:  # type: ignore[override]
        return self if {axis1 % 4, axis2 % 4} == {2, 3} else mx.swapaxes(self, axis1, axis2)

    def __rmatmul__(self, queries: mx.array) -> RopeScores:  # type: ignore[misc]
        return RopeScores(queries, self)


@dataclass(frozen=True, eq=False)
class RopeScores:
    """The scores of rotated queries, ``[num_tokens, num_heads, 1, rope_dim]``, before they are
    multiplied.
    """

    queries: mx.array
    keys: FetchedValues


@dataclass(frozen=True)
class WindowMask:
    """A causal mask of which each query sees its last ``window`` tokens, itself included."""

    window: int


def attend_on_our_caches() -> None:
    """Let all modules of mlx-lm's models that are imported by now ask :class:`FetchedKeys`."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_MODULES) and hasattr(module, _NAME):
            attention = getattr(module, _NAME)
            if not hasattr(attention, "__wrapped__"):
                setattr(module, _NAME, _asking_the_keys(attention))


def _asking_the_keys(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(original)
    def scaled_dot_product_attention(
        queries: mx.array, keys: mx.array, values: mx.array, *args: Any, **kwargs: Any
    ) -> mx.array:
        if isinstance(keys, FetchedKeys):
            return keys.owner.attend(queries, keys, values, *args, **kwargs)
        return original(queries, keys, values, *args, **kwargs)

    return scaled_dot_product_attention
