"""Attention of mlx-lm's models on this package's caches.

A model of mlx-lm passes its new K and V to a cache, receives those of the whole sequence, and calls
``scaled_dot_product_attention`` with them, a function that its module has imported. This package's
caches return the new rows, as arrays with a reference to the cache. :class:`OurAttention` replaces
mlx-lm's function with one that calls that cache's ``attend`` for such arrays, and the original for
all others. A few modules attend in another place, which is replaced in the same way.
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
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

_NAME = "scaled_dot_product_attention"
_MODULES = "mlx_lm.models."
_OWN = "_mlx_paged_replaces"  # an attribute of a replacement: the original


@runtime_checkable
class Owner(Protocol):
    """A cache whose ``update_and_fetch`` returns :class:`FetchedKeys`."""

    offset: mx.array

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[FetchedKeys, FetchedValues]: ...

    def attend(
        self,
        queries: mx.array,
        keys: FetchedKeys,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """As mlx-lm's ``scaled_dot_product_attention``.

        Args:
            softcap: the scores are ``softcap * tanh(score / softcap)``.
        """
        ...


class FetchedKeys(mx.array):
    """K as a cache returns it to a model. What a model computes from it is a plain array."""

    owner: Owner
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


class OurAttention:
    """While an object of this class lives, the modules of mlx-lm's models that were imported when
    it was made attend on :class:`FetchedKeys`. When the last one is gone, their functions are
    mlx-lm's own again.
    """

    def __init__(self) -> None:
        names = [name for name in list(sys.modules) if name.startswith(_MODULES)]
        with _lock:
            _num_users.update(names)
            _put_functions()
        weakref.finalize(self, _leave, names).atexit = False

    def __deepcopy__(self, memo: object) -> OurAttention:
        return self  # A copy of a model needs the replaced functions for as long as it lives.


# Reentrant, since the garbage collector may run a finalizer while the lock is held.
_lock = threading.RLock()
_num_users: Counter[str] = Counter()  # how many objects use a module, by its name


def _leave(names: list[str]) -> None:
    with _lock:
        _num_users.subtract(names)
        _put_functions()


def _put_functions() -> None:
    """Replace the functions of each module that is in use, and restore those of all others, which
    may have imported a replacement from a module in use.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith(_MODULES):
            continue
        places = [(_NAME, _on_fetched_keys), *_OTHER_PLACES.get(name, ())]
        for place, replace in places:
            holder, _, attribute = place.rpartition(".")
            owner: Any = getattr(module, holder) if holder else module
            found: Any = getattr(owner, attribute, None)
            own = getattr(found, _OWN, None)
            if found is None:
                continue
            if _num_users[name] > 0 and own is None:
                setattr(owner, attribute, replace(found))
            elif _num_users[name] == 0 and own is not None:
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
        if not isinstance(cache, Owner):
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
