"""Models that ``mlx_lm.load`` has returned."""

from __future__ import annotations

import inspect
from typing import Any

from mlx.nn.layers.base import Module

from mlx_paged.argument_values import kind_of
from mlx_paged.errors import ArgumentError, FailedCheckError, UnsuitableModelError, one_line
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.trial import adapt

# An attribute of a model: the adapted model, made once.
_ADAPTED = "_mlx_paged_model"


def is_called_as_mlx_lm(model: object) -> bool:
    """Whether a model has the interface of mlx-lm's models."""
    if not isinstance(model, Module) or isinstance(model, LanguageModel):
        return False
    has_caches = hasattr(model, "make_cache") or hasattr(model, "layers")
    return has_caches and "cache" in inspect.signature(type(model).__call__).parameters


def config_of(model: Module) -> dict[str, Any]:
    """The configuration that a model of mlx-lm was made with."""
    args = getattr(model, "args", None)
    fields = {} if args is None else vars(args)
    return {"model_type": getattr(model, "model_type", kind_of(model)), **fields}


def adapted(model: Module) -> LanguageModel:
    """A model of mlx-lm as a :class:`LanguageModel` with the same weights, tested the first time.

    Raises:
        ArgumentError: it can't run here, with the reason.
    """
    found = vars(model).get(_ADAPTED)
    if not isinstance(found, LanguageModel):
        config = config_of(model)
        try:
            found = adapt(model, config)
        except UnsuitableModelError as error:
            is_check = isinstance(error, FailedCheckError)
            way_out = "; to run it all the same, mlx_paged.load(..., skip_check=True)"
            raise ArgumentError(
                f"[model] model type {config['model_type']} can't run on a paged cache: "
                f"{one_line(error)}{way_out if is_check else ''}",
                "model",
            ) from error
        # A plain attribute: as a submodule, it would contain the model that contains it.
        object.__setattr__(model, _ADAPTED, found)
    return found
