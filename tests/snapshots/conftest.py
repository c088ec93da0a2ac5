"""A tiny model, whose identity is read once."""

from __future__ import annotations

import pytest
from helpers.engine_helpers import CONFIG, livelier_model, tiny_models

from mlx_paged.models import qwen3


@pytest.fixture(scope="session")
def model() -> qwen3.Model:
    return tiny_models()[0]


@pytest.fixture(scope="session")
def wide_model() -> qwen3.Model:
    """One whose rows of K/V can be quantised."""
    return livelier_model(CONFIG | {"head_dim": 64})
