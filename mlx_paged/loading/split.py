"""The share of a model's weights that a rank keeps."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.errors import ArgumentError, reason, shown
from mlx_paged.loading.folder import LoadError
from mlx_paged.models.language_model import check_divisible
from mlx_paged.options.argument_values import is_plain_integer

# The sizes of config.json by which layers are split.
_SPLIT_SIZES = (
    "num_key_value_heads",
    "num_attention_heads",
    "intermediate_size",
    "moe_intermediate_size",
)


def split(model: Module, config: dict[str, Any], group: mx.distributed.Group) -> None:
    """Reduce a model to the share of this rank, with its own ``shard`` method, for which this
    package has the same convention as mlx-lm.

    Args:
        model: with lazy weights, so that those of other ranks are never read.
        config: its ``config.json``.

    Raises:
        LoadError: it has no ``shard``, or can't be split over this number of ranks.
    """
    model_type = shown(config.get("model_type"))
    shard = getattr(model, "shard", None)
    if not callable(shard):
        raise LoadError(
            f"[load] model type {model_type} can't be split over {group.size()} ranks: mlx-lm has "
            "no way to split it (shard); run it in one process"
        )
    text = config.get("text_config")
    described = {**config, **text} if isinstance(text, dict) else config
    try:
        check_divisible(
            {
                name: described[name]
                for name in _SPLIT_SIZES
                if is_plain_integer(described.get(name), 1)
            },
            group.size(),
        )
        shard(group)
    except ArgumentError as error:
        raise LoadError(f"[load] model type {model_type} can't be split: {error}") from error
    except Exception as error:
        # Raised by code of mlx-lm, on untested sizes.
        raise LoadError(
            f"[load] model type {model_type} can't be split over {group.size()} ranks "
            f"({reason(error)})"
        ) from error
