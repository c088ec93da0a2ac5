"""The list of caches that a model of mlx-lm asks for, some of whose entries are lists of caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList


def leaves_of(caches: Sequence[Any]) -> Iterator[Any]:
    """Every single cache, in the model's order."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves_of(cache.caches)
        else:
            yield cache


def with_leaves(caches: Sequence[Any], make: Callable[[Any], Any]) -> list[Any]:
    """The same lists with each cache replaced by what ``make`` returns for it, called in order."""
    return [
        CacheList(*with_leaves(cache.caches, make)) if isinstance(cache, CacheList) else make(cache)
        for cache in caches
    ]
