"""The caches that a model of mlx-lm gets where it runs one sequence at a time.

They subclass mlx-lm's own, so that a model finds every attribute that it uses. Their contents are
in blocks, from which each run of tokens gathers what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)

from mlx_paged.errors import UnsuitableModelError
from mlx_paged.models.mlx_lm.cache_tree import leaves_of, with_leaves

Rows: TypeAlias = tuple[mx.array, mx.array]
# Writes new rows of K and V, [1, num_kv_heads, num_tokens, width] each, and returns them together
# with the earlier ones.
Exchange: TypeAlias = Callable[[mx.array, mx.array], Rows]


class _GatheredCache:
    """What the K/V caches of this module have in common.

    Args:
        position: of the first new token.
        size: what the class of mlx-lm takes: a window, a chunk, or nothing.
    """

    keys: Any
    values: Any

    def __init__(self, exchange: Exchange, position: int, *size: int):
        super().__init__(*size)
        self._exchange = exchange
        self.offset = position

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Rows:
        self.offset += keys.shape[2]
        self.keys, self.values = self._exchange(keys, values)
        return self.keys, self.values

    def empty(self) -> bool:
        return self.offset == 0


class GatheredKVCache(_GatheredCache, KVCache):
    """For a layer that attends to all earlier tokens."""


class GatheredRotatingKVCache(_GatheredCache, RotatingKVCache):
    """For a layer that attends to the last ``max_size`` tokens, in the order of their positions."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Rows:
        rows = super().update_and_fetch(keys, values)
        self._idx = self.keys.shape[2]
        return rows

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if N > 1:
            mask: mx.array | str | None = super().make_mask(N, window_size, return_array)
            return mask
        # mlx-lm's own cache is a ring, and rolls the mask with it.
        if window_size is None or window_size >= min(self.max_size, self.offset + 1):
            return None
        num_rows = min(self.offset + 1, self.max_size)
        return mx.arange(num_rows) >= num_rows - window_size


class GatheredChunkedKVCache(_GatheredCache, ChunkedKVCache):
    """For a layer that attends to the tokens of its own chunk of ``chunk_size``."""

    def __init__(self, exchange: Exchange, position: int, chunk_size: int):
        super().__init__(exchange, position, chunk_size)
        self.start_position = max(0, position - (chunk_size - 1))

    def maybe_trim_front(self) -> None:
        """Does nothing: only rows that may be attended to are gathered."""


@dataclass(frozen=True)
class KVEntry:
    """A cache with K/V among those that a model asks for.

    Attributes:
        window: the most tokens that a query attends to, itself included; ``None`` for all.
        is_chunked: whether it attends to those of its own chunk of ``window`` tokens only.
    """

    window: int | None = None
    is_chunked: bool = False

    @property
    def num_before(self) -> int | None:
        """The most rows before the new ones that a run of tokens needs; ``None`` for all."""
        return None if self.window is None else self.window - 1

    def open(
        self, exchange: Exchange, position: int
    ) -> GatheredKVCache | GatheredRotatingKVCache | GatheredChunkedKVCache:
        """The cache for a run of tokens that begins at ``position``."""
        if self.window is None:
            return GatheredKVCache(exchange, position)
        kind = GatheredChunkedKVCache if self.is_chunked else GatheredRotatingKVCache
        return kind(exchange, position, self.window)


class CacheLayout:
    """The caches that a model's ``make_cache`` returns, as K/V entries in the same order.

    Args:
        caches: as ``mlx_lm.models.cache.make_prompt_cache`` makes them.

    Raises:
        UnsuitableModelError: a cache of an unknown kind.
    """

    def __init__(self, caches: Sequence[Any]):
        self._caches = list(caches)
        self.entries = [_kv_entry(cache) for cache in leaves_of(caches)]

    def open(self, exchanges: Sequence[Exchange], position: int) -> list[Any]:
        """The caches for one call of the model.

        Args:
            exchanges: one per entry.
            position: of the first new token of the sequence.
        """
        opened = [
            entry.open(exchange, position)
            for entry, exchange in zip(self.entries, exchanges, strict=True)
        ]
        following = iter(opened)
        return with_leaves(self._caches, lambda leaf: next(following))


def _kv_entry(cache: Any) -> KVEntry:
    if type(cache) in (KVCache, ConcatenateKVCache):
        return KVEntry()
    if type(cache) is RotatingKVCache and not cache.keep:
        return KVEntry(cache.max_size)
    if type(cache) is ChunkedKVCache:
        return KVEntry(cache.chunk_size, is_chunked=True)
    kind = type(cache).__name__
    what = "recurrent state" if kind == "ArraysCache" else f"a {kind}"
    raise UnsuitableModelError(f"it keeps {what} in its caches")
