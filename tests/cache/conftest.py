"""An empty cache of each kind."""

from __future__ import annotations

import pytest
from helpers.cache_helpers import CONFIG, KINDS

from mlx_paged.cache import KVCache, PagedKVCache


@pytest.fixture(params=["basic", "paged"])
def cache(request: pytest.FixtureRequest) -> KVCache:
    return KINDS[request.param](CONFIG)


@pytest.fixture
def paged() -> PagedKVCache:
    return PagedKVCache(CONFIG)
