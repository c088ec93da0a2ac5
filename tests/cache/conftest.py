"""An empty cache of each kind."""

from __future__ import annotations

import pytest
from helpers.cache_helpers import CONFIG, KINDS

from mlx_paged.cache import PagedKVCache, Sequences


@pytest.fixture(params=["basic", "paged"])
def seqs(request: pytest.FixtureRequest) -> Sequences:
    return Sequences(KINDS[request.param](CONFIG))


@pytest.fixture
def paged() -> Sequences:
    return Sequences(PagedKVCache(CONFIG))
