"""How much there is to learn of a cache."""

from __future__ import annotations

import inspect

import pytest

from mlx_paged.cache import ContiguousKVCache, KVCache, PagedKVCache, Sequences

MOST = 24


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache, ContiguousKVCache, Sequences])
def test_a_cache_has_few_public_methods_and_properties(kind: type):
    members = inspect.getmembers_static(
        kind, lambda member: inspect.isfunction(member) or isinstance(member, property)
    )
    public = [name for name, _ in members if not name.startswith("_")]
    assert len(public) <= MOST, public
