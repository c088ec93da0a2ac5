"""Attention of mlx-lm's models on this package's caches.

A model of mlx-lm passes its new K and V to a cache, receives those of the whole sequence, and calls
``scaled_dot_product_attention`` with them, a function that its module has imported. A
:class:`PackedKV` returns the new rows, as arrays with a reference to it. :class:`AttentionPatch`
replaces mlx-lm's function with one that calls the cache's ``attend`` for such arrays, and the
original for all others. A few modules attend in another place, which is replaced in the same way.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

from mlx_paged.cache import LayerKV
from mlx_paged.errors import UnsuitableModelError

_NAME = "scaled_dot_product_attention"
_MODULES = "mlx_lm.models."
_OWN = "_mlx_paged_replaces"  # an attribute of a replacement: the original


class FetchedKeys(mx.array):
    """K as a cache returns it to a model. What a model computes from it is a plain array."""

    owner: PackedKV
    values: FetchedValues


class FetchedValues(mx.array):
    """V as a cache returns it to a model.

    Models with latents (MLA) store the rotated part of K in the place of V, multiply rotated
    queries by it, and pass the scores to attention as a mask. That product is deferred here.
    """

    def swapaxes(self, axis1: int, axis2: int) -> mx.array:  # type: ignore[override]
        return self if {axis1 % 4, axis2 % 4} == {2, 3} else mx.swapaxes(self, axis1, axis2)

    def __rmatmul__(self, queries: mx.array) -> RopeScores:  # type: ignore[misc]
        return RopeScores(queries, self)


@dataclass(frozen=True, eq=False)
class RopeScores:
    """The deferred product of rotated queries and keys."""

    queries: mx.array  # [num_tokens, num_heads, 1, rope_dim]
    keys: FetchedValues


@dataclass(frozen=True)
class WindowMask:
    """A causal mask in which a query attends to its last ``window`` tokens, itself included."""

    window: int


class PackedKV:
    """A cache for a batch of tokens, each a batch entry of length 1.

    The names are mlx-lm's. There is no ``__len__``, because mlx-lm treats a falsy cache as none.

    Args:
        layer: computes attention; ``None`` for an entry in which the model keeps no K/V.
        offset: ``[num_tokens]``, the position of each token.

    Attributes:
        is_open: whether K and V were fetched and not attended to yet.
    """

    def __init__(self, layer: LayerKV | None, offset: mx.array):
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

    def fetch_stored(self) -> tuple[FetchedKeys, FetchedValues]:
        """K and V for attention to those that are stored already."""
        self._is_written = True
        return self.update_and_fetch(mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1)))

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


class AttentionPatch:
    """While an object of this class lives, the modules of mlx-lm's models that were imported when
    it was made attend on :class:`FetchedKeys`. When the last one is gone, their functions are
    mlx-lm's own again.
    """

    def __init__(self) -> None:
        modules = list(_modules_of_models().values())
        with _lock:
            _num_users.update(modules)
            _put_functions()
        weakref.finalize(self, _leave, modules).atexit = False

    def __deepcopy__(self, memo: object) -> AttentionPatch:
        return self  # A copy of a model needs the replaced functions for as long as it lives.


# Reentrant, since the garbage collector may run a finalizer while the lock is held.
_lock = threading.RLock()
_num_users: Counter[ModuleType] = Counter()  # how many objects use a module


def _modules_of_models() -> dict[str, ModuleType]:
    return {name: sys.modules[name] for name in list(sys.modules) if name.startswith(_MODULES)}


def _leave(modules: list[ModuleType]) -> None:
    with _lock:
        _num_users.subtract(modules)
        _put_functions()


def _put_functions() -> None:
    """Replace the functions of each module that is in use, and restore those of all others, which
    may have imported a replacement from a module in use.
    """
    for name, module in _modules_of_models().items():
        places = [(_NAME, _on_fetched_keys), *_OTHER_PLACES.get(name, ())]
        for place, replace in places:
            holder, _, attribute = place.rpartition(".")
            owner: Any = getattr(module, holder) if holder else module
            found: Any = getattr(owner, attribute, None)
            own = getattr(found, _OWN, None)
            if found is None:
                continue
            if _num_users[module] > 0 and own is None:
                setattr(owner, attribute, replace(found))
            elif _num_users[module] == 0 and own is not None:
                setattr(owner, attribute, own)


def _on_fetched_keys(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(original)
    def scaled_dot_product_attention(
        queries: mx.array, keys: mx.array, values: mx.array, *args: Any, **kwargs: Any
    ) -> mx.array:
        if isinstance(keys, FetchedKeys):
            return keys.owner.attend(queries, keys, values, *args, **kwargs)
        return original(queries, keys, values, *args, **kwargs)

    setattr(scaled_dot_product_attention, _OWN, original)
    return scaled_dot_product_attention


def _mlx_on_fetched_keys(original: ModuleType) -> ModuleType:
    # MLX's function takes no cache.
    def attend(q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        if isinstance(k, FetchedKeys):
            return k.owner.attend(q, k, v, None, **kwargs)
        out: mx.array = original.fast.scaled_dot_product_attention(q, k, v, **kwargs)
        return out

    fast = _with_attributes(original.fast, {_NAME: attend})
    return _with_attributes(original, {"fast": fast, _OWN: original})


def _with_attributes(module: ModuleType, attributes: dict[str, Any]) -> ModuleType:
    """A copy of a module with some attributes replaced."""
    changed = ModuleType(module.__name__)
    vars(changed).update(attributes, __getattr__=functools.partial(getattr, module))
    return changed


def _gemma2_on_fetched_keys(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(original)
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, PackedKV):
            return original(self, x, mask, cache)

        def heads(rows: mx.array, num_heads: int) -> mx.array:
            return rows.reshape(*x.shape[:2], num_heads, self.head_dim).swapaxes(1, 2)

        queries = self.rope(heads(self.q_proj(x), self.n_heads), offset=cache.offset)
        keys = self.rope(heads(self.k_proj(x), self.n_kv_heads), offset=cache.offset)
        fetched, values = cache.update_and_fetch(keys, heads(self.v_proj(x), self.n_kv_heads))
        cap = self.attn_logit_softcapping
        out = cache.attend(queries, fetched, values, cache, self.scale, mask, softcap=cap)
        projected: mx.array = self.o_proj(out.swapaxes(1, 2).flatten(2))
        return projected

    setattr(call, _OWN, original)
    return call


def _gear_on_fetched_keys(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(original)
    def attend(
        queries: mx.array, keys: mx.array, values: mx.array, scale: float, softcap: float, mask: Any
    ) -> mx.array:
        if isinstance(keys, FetchedKeys):
            return keys.owner.attend(queries, keys, values, None, scale, mask, softcap=softcap)
        return original(queries, keys, values, scale, softcap, mask)

    setattr(attend, _OWN, original)
    return attend


# Other places in which modules attend, and what makes the replacement of the original.
_OTHER_PLACES: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {
    # It calls ``mx.fast.scaled_dot_product_attention``, so its ``mx`` is replaced by a copy of MLX
    # that differs in this function only.
    "mlx_lm.models.plamo2": [("mx", _mlx_on_fetched_keys)],
    # These cap their scores, which MLX's function can't.
    "mlx_lm.models.gemma2": [("Attention.__call__", _gemma2_on_fetched_keys)],
    "mlx_lm.models.gear": [("_softcap_attention", _gear_on_fetched_keys)],
}
