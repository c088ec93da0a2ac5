"""A tiny model, whose identity is read once."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.engine_runs import CONFIG, livelier_model, tiny_models
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3 as mlx_lm_qwen3

from mlx_paged.models import qwen3


@pytest.fixture(scope="session")
def models() -> tuple[qwen3.Model, Any]:
    """Ours and mlx-lm's, of the same weights."""
    return tiny_models()


@pytest.fixture(scope="session")
def model(models: tuple[qwen3.Model, Any]) -> qwen3.Model:
    return models[0]


@pytest.fixture(scope="session")
def wide_models(wide_model: qwen3.Model) -> tuple[qwen3.Model, Any]:
    stock = mlx_lm_qwen3.Model(mlx_lm_qwen3.ModelArgs.from_dict(CONFIG | {"head_dim": 64}))
    stock.load_weights(tree_flatten(wide_model.parameters()))
    return wide_model, stock


@pytest.fixture(scope="session")
def wide_model() -> qwen3.Model:
    """One whose rows of K/V can be quantised."""
    return livelier_model(CONFIG | {"head_dim": 64})
