"""Load a model and its tokenizer, from a local folder or a hub id, as mlx-lm does."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any, Literal, overload

import mlx.core as mx
from mlx.nn.layers.base import (
    Module,
)  # mlx.nn does not re-export it: to a user's mypy, nn.Module is Any
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_model, load_tokenizer

from mlx_paged.errors import shown
from mlx_paged.foreign_arguments import refuses_unknown_arguments

# model_type -> the module that has its Model and ModelArgs
MODELS = {"qwen3": "mlx_paged.models.qwen3"}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MODEL_FILES = [
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]


class LoadError(ValueError):
    """The model is not there, broken, or not one that can be run; the message is one line that says
    what to do.
    """


def demo_model_path() -> Path:
    """The folder of the bundled demo model."""
    return Path(__file__).parent / "demo_model"


@overload
def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    return_config: Literal[False] = False,
    revision: str | None = None,
) -> tuple[Module, TokenizerWrapper]: ...


@overload
def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    *,
    return_config: Literal[True],
    revision: str | None = None,
) -> tuple[Module, TokenizerWrapper, dict[str, Any]]: ...


@overload
def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None,
    model_config: dict[str, Any] | None,
    adapter_path: str | Path | None,
    lazy: bool,
    return_config: Literal[True],
    revision: str | None = None,
) -> tuple[Module, TokenizerWrapper, dict[str, Any]]: ...


@overload
def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
) -> tuple[Module, TokenizerWrapper] | tuple[Module, TokenizerWrapper, dict[str, Any]]: ...


@refuses_unknown_arguments("load")
def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
) -> tuple[Module, TokenizerWrapper] | tuple[Module, TokenizerWrapper, dict[str, Any]]:
    """A model and its tokenizer, ready for :func:`mlx_paged.generate`; the signature follows
    ``mlx_lm.load``.

    Reads what mlx-lm reads for Qwen3: float32, float16 and bfloat16, one or several safetensors
    files, weights quantised by MLX, tied and untied embeddings.

    Args:
        path_or_hf_repo: a local folder, or the id of a repository on the Hugging Face hub, which is
            downloaded once.
        tokenizer_config: passed on to the tokenizer.
        model_config: replaces fields of ``config.json``.
        adapter_path: a folder with LoRA or DoRA adapters, as mlx-lm trains them.
        lazy: leave the weights unevaluated until they are used.
        return_config: return the configuration as a third value.
        revision: branch, tag or commit of the repository.

    Raises:
        LoadError: nothing is there, it is broken, or the model type is not supported.
    """
    _check_arguments(path_or_hf_repo, tokenizer_config, model_config, adapter_path, revision)
    _check_flags(lazy=lazy, return_config=return_config)
    path = find_model(path_or_hf_repo, revision)
    config_file = path / "config.json"
    if not config_file.is_file():
        raise LoadError(
            f"[load] {path} has no config.json; a model folder holds config.json and model*.safetensors"
        )
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"[load] {config_file} can't be read: {_one_line(error)}") from error
    _check_config({**config, **(model_config or {})}, config_file)
    _check_generation_config(path / "generation_config.json")
    try:
        model, config = load_model(
            path, lazy, model_config=model_config, get_model_classes=_model_classes
        )
    except LoadError:
        raise
    except FileNotFoundError as error:
        raise LoadError(f"[load] {path} has no weights (model*.safetensors)") from error
    except Exception as error:
        # Whatever a broken file makes the readers below raise, for the user it is one thing.
        raise LoadError(f"[load] the model in {path} is broken: {_one_line(error)}") from error
    _check_dtypes(model, path)
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        # transformers would make up a tokenizer of one word.
        raise LoadError(
            f"[load] the tokenizer in {path} is missing or broken: none of {', '.join(_TOKENIZER_FILES)}"
        )
    try:
        tokenizer = load_tokenizer(path, tokenizer_config, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:
        raise LoadError(
            f"[load] the tokenizer in {path} is missing or broken: {_one_line(error)}"
        ) from error
    # transformers would warn of "indexing errors" when a text is long. The context limit says it
    # with the sum.
    warned = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(warned, dict):
        warned["sequence-length-is-longer-than-the-specified-maximum"] = True
    if adapter_path is not None:
        if not str(adapter_path):
            raise LoadError("[load] no folder ''; adapter_path must be one with adapters in it")
        try:
            model = load_adapters(model, str(adapter_path))
            model.eval()
        except Exception as error:
            raise LoadError(
                f"[load] the adapters in {adapter_path} can't be used: {_one_line(error)}"
            ) from error
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def _check_flags(**flags: object) -> None:
    """Raise ``LoadError`` for a flag that is no bool."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise LoadError(f"[load] {name} must be True or False, got {shown(flag)}")


def _check_arguments(
    path: object, tokenizer_config: object, model_config: object, *texts: object
) -> None:
    """Raise ``LoadError`` for an argument of the wrong type."""
    if not isinstance(path, (str, Path)):
        raise LoadError(f"[load] path_or_hf_repo must be a folder or a hub id, got {shown(path)}")
    for name, config in (("tokenizer_config", tokenizer_config), ("model_config", model_config)):
        if config is not None and not (
            isinstance(config, dict) and all(isinstance(key, str) for key in config)
        ):
            raise LoadError(
                f"[load] {name} must be a dict with texts as keys, or None, got {shown(config)}"
            )
    for name, text in zip(("adapter_path", "revision"), texts, strict=True):
        if text is not None and not isinstance(text, (str, Path)):
            raise LoadError(f"[load] {name} must be a text, or None, got {shown(text)}")


def find_model(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """The folder of a model: a local one, or that of a repository on the hub, downloaded once.

    Raises:
        LoadError: there is neither.
    """
    repo = str(path_or_hf_repo)
    path = Path(repo)
    try:
        path = path.expanduser()
        is_folder, is_file = repo != "" and path.is_dir(), path.is_file()
    except (OSError, RuntimeError):
        # A name longer than the file system takes, or the home of nobody.
        is_folder = is_file = False
    if is_folder:
        return path
    if is_file:
        raise LoadError(
            f"[load] {path} is a file; give the folder that holds config.json and model*.safetensors"
        )
    if not _HUB_ID.fullmatch(repo):
        raise LoadError(f"[load] no folder {repo!r}, and it is not a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_MODEL_FILES))
    except Exception as error:
        # Network, credentials, a wrong name: each is the user's to mend, none is ours to tell
        # apart.
        raise LoadError(
            f"[load] no folder {repo!r}, and no such download: {_one_line(error)}"
        ) from error


def _check_config(config: dict[str, Any], file: Path) -> None:
    """Refuse what the readers of the weights would stumble over later, and say less clearly."""
    _model_classes(config)
    _check_eos(config.get("eos_token_id"), file)
    quantization = config.get("quantization")
    if quantization is None:
        legacy = config.get("quantization_config")
        if legacy and (
            not isinstance(legacy, dict) or not isinstance(legacy.get("quant_method"), str)
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
        value = quantization[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LoadError(
                f"[load] {name} of quantization in {file} must be a positive integer, got {shown(value)}"
            )


def _check_generation_config(file: Path) -> None:
    """Its end tokens go before those of ``config.json``; a file that is no JSON is left out, as by
    mlx-lm.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(config, dict):
        raise LoadError(f"[load] {file} can't be read: it is not a JSON object")
    _check_eos(config.get("eos_token_id"), file)


def _check_eos(value: object, file: Path) -> None:
    token_ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in token_ids):
        raise LoadError(
            f"[load] eos_token_id in {file} must be a token id or a list of them, got {shown(value)}"
        )


def _model_classes(config: dict[str, Any]) -> tuple[type[Module], type]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODELS:
        raise LoadError(
            f"[load] model type {model_type!r} is not supported; supported: {', '.join(MODELS)}"
        )
    module = importlib.import_module(MODELS[model_type])
    return module.Model, module.ModelArgs


def _check_dtypes(model: Module, path: Path) -> None:
    """Refuse weights of integers, which would be computed with in silence; MLX packs quantised ones
    into uint32.
    """
    weights = dict(tree_flatten(model.parameters()))
    for name, weight in weights.items():
        is_packed = (
            weight.dtype == mx.uint32 and f"{name.removesuffix('.weight')}.scales" in weights
        )
        if not is_packed and not mx.issubdtype(weight.dtype, mx.floating):
            raise LoadError(
                f"[load] the model in {path} is broken: the weights {name} are of type {weight.dtype}"
            )


def _one_line(error: Exception, limit: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    return text if len(text) <= limit else text[: limit - 3] + "..."
