"""A tiny random model, and both kinds of cache."""

from __future__ import annotations

import pytest
from engine_helpers import tiny_models

from mlx_paged.models import qwen3


@pytest.fixture(scope="session")
def model() -> qwen3.Model:
    return tiny_models()[0]


@pytest.fixture(params=["basic", "paged"])
def cache_options(request: pytest.FixtureRequest) -> dict:
    """Arguments of `generate_step` for each kind of cache."""
    return {"kv": request.param, "kv_cache_bytes": "40blocks"}
