"""The ``config.json`` of a model: the classes that it names, and checks of what loading reads."""

from __future__ import annotations

import importlib
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import mlx_lm
from mlx.nn.layers.base import Module
from mlx_lm.utils import _get_classes as mlx_lm_model_classes

from mlx_paged.errors import shown
from mlx_paged.loading.folder import UTF_8, LoadError
from mlx_paged.options.argument_values import is_plain_integer

# model_type -> the module with its Model and ModelArgs. All others are mlx-lm's.
NATIVE_MODELS = {"qwen3": "mlx_paged.models.qwen3"}
# The name of a module of mlx-lm: not a path, and not in another package.
_MODULE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def model_classes(config: dict[str, Any]) -> tuple[type[Module], type]:
    """The classes of a model and of its arguments, by the configuration's ``model_type``.

    Raises:
        LoadError: neither this package nor mlx-lm has the model type.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not _MODULE_NAME.fullmatch(model_type):
        raise LoadError(
            f"[load] model_type in config.json must be the name of an architecture, got "
            f"{shown(model_type)}"
        )
    if model_type in NATIVE_MODELS:
        module = importlib.import_module(NATIVE_MODELS[model_type])
        return module.Model, module.ModelArgs
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            classes: tuple[type[Module], type] = mlx_lm_model_classes(config)
    except SystemExit as error:
        # A module of mlx-lm may print which package it lacks on import, and exit.
        raise LoadError(
            f"[load] mlx-lm can't load model type {model_type!r}: {printed.getvalue().strip()}"
        ) from error
    except Exception as error:
        way_out = ""
        if "bert" in model_type:
            way_out = "; it is an encoder, and models here are decoders, such as Qwen3-Embedding"
        raise LoadError(
            f"[load] model type {model_type!r} is not supported: mlx-lm {mlx_lm.__version__} does "
            f"not have it{way_out}"
        ) from error
    return classes


def check_config(config: dict[str, Any], file: Path) -> None:
    """Check what would otherwise fail later, with a less clear error.

    Raises:
        LoadError: the model type is not supported, or an entry has the wrong form.
    """
    model_classes(config)
    _check_end_tokens(config, file)
    quantization, legacy = config.get("quantization"), config.get("quantization_config")
    if quantization is None:
        if legacy and not (
            isinstance(legacy, dict) and isinstance(legacy.get("quant_method"), str)
        ):
            raise LoadError(
                f"[load] quantization_config in {file} must be an object with a quant_method"
            )
        return
    if not isinstance(quantization, dict):
        raise LoadError(
            f"[load] quantization in {file} must be an object, got {shown(quantization)}"
        )
    for name in ("group_size", "bits"):
        if name not in quantization:
            raise LoadError(
                f"[load] quantization in {file} lacks {name}; MLX's has group_size and bits"
            )
        if not is_plain_integer(quantization[name], 1):
            raise LoadError(
                f"[load] {name} of quantization in {file} must be a positive integer, got "
                f"{shown(quantization[name])}"
            )


def check_generation_config(file: Path) -> None:
    """Check the end tokens in a ``generation_config.json``, which override those of
    ``config.json``.
    """
    try:
        config = json.loads(file.read_text(encoding=UTF_8))
    except (OSError, ValueError, RecursionError):
        return  # mlx-lm ignores it, too
    if not isinstance(config, dict):
        raise LoadError(f"[load] {file} can't be read: it is not a JSON object")
    _check_end_tokens(config, file)


def _check_end_tokens(config: dict[str, Any], file: Path) -> None:
    value = config.get("eos_token_id")
    token_ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(is_plain_integer, token_ids)):
        raise LoadError(
            f"[load] eos_token_id in {file} must be a token id or a list of them, got "
            f"{shown(value)}"
        )
