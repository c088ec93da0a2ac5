"""A session of each cache kind over a tiny random model."""

from __future__ import annotations

import pytest
from engine_helpers import tiny_models

from mlx_paged import ModelRunner, Session, make_kv_cache
from mlx_paged.models import qwen3


@pytest.fixture(scope="session")
def model() -> qwen3.Model:
    return tiny_models()[0]


@pytest.fixture(params=["basic", "paged"])
def session(request: pytest.FixtureRequest, model: qwen3.Model) -> Session:
    return Session(
        ModelRunner(model, make_kv_cache(model, request.param, kv_cache_bytes="40blocks"))
    )
