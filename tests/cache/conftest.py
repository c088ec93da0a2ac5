"""An empty cache of each kind."""

from __future__ import annotations

import pytest
from cache_helpers import CONFIG

from mlx_paged.cache import KVCache, create_kv_cache


@pytest.fixture(params=["basic", "paged"])
def cache(request: pytest.FixtureRequest) -> KVCache:
    return create_kv_cache(request.param, CONFIG)


@pytest.fixture
def paged() -> KVCache:
    return create_kv_cache("paged", CONFIG)
