"""The way in which a model of mlx-lm runs on the caches of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.dense import DenseModel
from mlx_paged.models.mlx_lm.errors import UnsuitableModelError
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.mlx_lm.trial import check_against_stock


def checked_model(
    kind: Callable[[Module, dict[str, Any]], LanguageModel], model: Module, config: dict[str, Any]
) -> LanguageModel:
    """A model of mlx-lm that runs in one way, held against itself on mlx-lm's caches.

    Raises:
        UnsuitableModelError: it can't run so.
    """
    # Arrays that are no parameters, as frequencies of RoPE, are made lazily, and no other thread
    # can run what this one leaves lazy.
    mx.eval([value for module in model.modules() for value in module.values()])
    adapted = kind(model, config)
    check_against_stock(adapted, model)
    return adapted


def adapt(model: Module, config: dict[str, Any]) -> LanguageModel:
    """A model of mlx-lm, as one that runs here: packed, or else one sequence at a time.

    Args:
        model: with its weights, adapters among them.
        config: its ``config.json``.

    Raises:
        UnsuitableModelError: it runs in neither way, with both reasons.
    """
    reasons: dict[str, str] = {}
    for kind, way in ((PackedModel, "packed"), (DenseModel, "dense")):
        try:
            return checked_model(kind, model, config)
        except UnsuitableModelError as error:
            reasons[way] = str(error)
    if len(set(reasons.values())) == 1:
        raise UnsuitableModelError(reasons["packed"])
    raise UnsuitableModelError("; ".join(f"{way}, {text}" for way, text in reasons.items()))
