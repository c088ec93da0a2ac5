"""The models that are attached, as fixtures."""

from __future__ import annotations

import mlx_lm
import pytest
from helpers.attached_models import CONFIGS, cached_model

from mlx_paged.loading import demo_model_path


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in ("qwen3", "qwen3_moe") else ())
        for name in CONFIGS
    ]
)
def any_model(request):
    return cached_model(request.param)


@pytest.fixture(params=["llama", "gemma3"])
def with_and_without_windows(request):
    return cached_model(request.param)


@pytest.fixture
def llama():
    return cached_model("llama")


@pytest.fixture(scope="session")
def demo():
    """A real, small model and its tokenizer, as mlx-lm loads them."""
    return mlx_lm.load(str(demo_model_path()))


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """How many tokens each packed step of a model computes."""
    from mlx_paged.models.mlx_lm.packed import PackedModel

    counts = []
    run = PackedModel.__call__

    def counted(self, packed, *args, **kwargs):
        counts.append(packed.size)
        return run(self, packed, *args, **kwargs)

    monkeypatch.setattr(PackedModel, "__call__", counted)
    return counts
