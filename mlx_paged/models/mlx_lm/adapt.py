"""The way in which a model of mlx-lm runs on the caches of this package."""

from __future__ import annotations

from typing import Any

from mlx.nn.layers.base import Module

from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.dense import DenseModel
from mlx_paged.models.mlx_lm.errors import UnsuitableModelError
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.mlx_lm.trial import Trial


def adapt(model: Module, config: dict[str, Any]) -> LanguageModel:
    """A model of mlx-lm, as one that runs here: packed, or else one sequence at a time.

    Args:
        model: with its weights, adapters among them.
        config: its ``config.json``.

    Raises:
        UnsuitableModelError: it runs in neither way, with both reasons.
    """
    trial = Trial(model, config)
    reasons: dict[str, str] = {}
    for kind, way in ((PackedModel, "packed"), (DenseModel, "dense")):
        try:
            return trial.run(kind)
        except UnsuitableModelError as error:
            reasons[way] = str(error)
    if len(set(reasons.values())) == 1:
        raise UnsuitableModelError(reasons["packed"])
    raise UnsuitableModelError("; ".join(f"{way}, {text}" for way, text in reasons.items()))
