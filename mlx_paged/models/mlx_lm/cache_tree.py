"""The caches that a model of mlx-lm asks for: a list, some of whose entries are lists of caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList


def leaves_of(caches: Sequence[Any]) -> Iterator[Any]:
    """Every cache, in the order of the model."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves_of(cache.caches)
        else:
            yield cache


def with_leaves(caches: Sequence[Any], make: Callable[[Any], Any]) -> list[Any]:
    """The same lists with other caches: what ``make`` returns for each, called in their order."""
    return [
        CacheList(*with_leaves(cache.caches, make)) if isinstance(cache, CacheList) else make(cache)
        for cache in caches
    ]
