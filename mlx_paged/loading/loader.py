"""Load a model and its tokenizer, as mlx-lm does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack, overload

import mlx.core as mx

# mlx.nn does not re-export Module: to a user's mypy, nn.Module is Any.
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_model

from mlx_paged.errors import FailedCheckError, UnsuitableModelError, one_line, shown
from mlx_paged.loading.configuration import check_config, check_generation_config, model_classes
from mlx_paged.loading.folder import (
    LoadError,
    find_model,
    find_tokenizer,
    load_errors,
    read_json_object,
    without_marks,
)
from mlx_paged.loading.gguf import is_gguf
from mlx_paged.loading.heads import is_of_head
from mlx_paged.loading.split import split
from mlx_paged.loading.tokenizer import read_tokenizer
from mlx_paged.models.identity import model_name
from mlx_paged.models.language_model import LanguageModel, WeightFiles
from mlx_paged.models.mlx_lm import adapt
from mlx_paged.options.foreign_arguments import NoOptions, refuse_unknown

# Is called with a model none of whose weights is read yet.
BeforeReading: TypeAlias = Callable[[Module], None]


@overload
def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    return_config: Literal[False] = False,
    revision: str | None = None,
    tokenizer_path: str | Path | None = None,
    skip_check: bool = False,
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
    tokenizer_path: str | Path | None = None,
    skip_check: bool = False,
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
    tokenizer_path: str | Path | None = None,
    skip_check: bool = False,
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
    tokenizer_path: str | Path | None = None,
    skip_check: bool = False,
) -> tuple[Module, TokenizerWrapper] | tuple[Module, TokenizerWrapper, dict[str, Any]]: ...


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    tokenizer_path: str | Path | None = None,
    skip_check: bool = False,
    **unknown: Unpack[NoOptions],
) -> tuple[Module, TokenizerWrapper] | tuple[Module, TokenizerWrapper, dict[str, Any]]:
    """Load a model and its tokenizer, for :func:`mlx_paged.generate` and everything else that takes
    a model. The signature follows ``mlx_lm.load``.

    Qwen3 is this package's own; all other architectures are mlx-lm's, whose modules run on the
    caches of this package. Weights may be anything that mlx-lm reads: float32, float16 and
    bfloat16, one or several safetensors files, quantised by MLX.

    Args:
        path_or_hf_repo: a local folder, a GGUF file, or the id of a repository on the Hugging Face
            hub, which is downloaded once.
        tokenizer_config: passed to the tokenizer.
        model_config: replaces fields of ``config.json``.
        adapter_path: a folder with LoRA or DoRA adapters, as mlx-lm trains them.
        lazy: leave the weights unevaluated until they are used. Those of mlx-lm's models are
            evaluated in any case, and those of a GGUF file are repacked.
        return_config: return the configuration as a third value.
        revision: branch, tag or commit of the repository.
        tokenizer_path: a folder or the id of a repository with the tokenizer, instead of the one
            in the model's folder or file.
        skip_check: run a model of mlx-lm whose architecture is unknown even if its logits differ
            from those on mlx-lm's own caches, for one that is refused without cause.

    Raises:
        LoadError: the model is not found or broken, mlx-lm does not have the model type, or it
            can't run here.
    """
    if unknown:
        refuse_unknown(load, unknown)
    if not isinstance(return_config, bool):
        raise LoadError(
            f"[load] return_config must be True or False, got {shown(return_config)}",
            "return_config",
        )
    model, tokenizer, config = load_whole(
        path_or_hf_repo,
        tokenizer_config=tokenizer_config,
        model_config=model_config,
        adapter_path=adapter_path,
        lazy=lazy,
        revision=revision,
        tokenizer_path=tokenizer_path,
        skip_check=skip_check,
    )
    model.loaded_from = None  # The caller may write into its weights.
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_whole(
    path_or_hf_repo: str | Path,
    *,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    revision: str | None = None,
    tokenizer_path: str | Path | None = None,
    skip_check: bool = False,
    before_reading: BeforeReading | None = None,
) -> tuple[LanguageModel, TokenizerWrapper, dict[str, Any]]:
    """As :func:`load`, with the configuration; for ``before_reading`` see :func:`load_from`."""
    for name, value, kinds, what in (
        ("path_or_hf_repo", path_or_hf_repo, str | Path, "a folder, a hub id or a file"),
        ("adapter_path", adapter_path, str | Path | None, "a text, or None"),
        ("revision", revision, str | Path | None, "a text, or None"),
        ("tokenizer_path", tokenizer_path, str | Path | None, "a folder, a hub id, or None"),
        ("lazy", lazy, bool, "True or False"),
        ("skip_check", skip_check, bool, "True or False"),
    ):
        if not isinstance(value, kinds):
            raise LoadError(f"[load] {name} must be {what}, got {shown(value)}", name)
    for name, config in (("tokenizer_config", tokenizer_config), ("model_config", model_config)):
        if not isinstance(config, dict | None) or not all(
            isinstance(key, str) for key in config or ()
        ):
            what = "a dict with texts as keys, or None"
            raise LoadError(f"[load] {name} must be {what}, got {shown(config)}", name)
    path = find_model(path_or_hf_repo, revision)
    if adapter_path is not None and not str(adapter_path):
        raise LoadError(
            "[load] no folder ''; adapter_path must be a folder with adapters", "adapter_path"
        )
    return load_from(
        path,
        tokenizer_path=None if tokenizer_path is None else find_tokenizer(tokenizer_path),
        tokenizer_config=tokenizer_config,
        model_config=model_config,
        adapter_path=adapter_path,
        lazy=lazy,
        skip_check=skip_check,
        before_reading=before_reading,
    )


def load_from(
    path: Path,
    *,
    tokenizer_path: Path | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    skip_check: bool = False,
    group: mx.distributed.Group | None = None,
    before_reading: BeforeReading | None = None,
) -> tuple[LanguageModel, TokenizerWrapper, dict[str, Any]]:
    """As :func:`load`, from a local path.

    Args:
        path: a folder or a GGUF file.
        tokenizer_path: a folder.
        group: the ranks that the model is split over, each of which calls this. A rank reads its
            own share of a folder's weights; a GGUF file is read as a whole, then cut.
        before_reading: is called with the model, without adapters, before its weights are read;
            not for a GGUF file or a model that is split.
    """
    files = None
    if is_gguf(path):
        from mlx_paged.loading.gguf.loader import load_gguf

        model, tokenizer, config = load_gguf(
            path,
            tokenizer_path=tokenizer_path,
            tokenizer_config=tokenizer_config,
            model_config=model_config,
        )
    else:
        model, config, files = build_model(path, model_config)
        if group is None:
            if before_reading is not None:
                before_reading(model)
            if not lazy:
                _read_weights(model, path)
        tokenizer = read_tokenizer(
            tokenizer_path or path, tokenizer_config, config.get("eos_token_id")
        )
    if group is not None:
        split(model, config, group)
    if adapter_path is not None:
        model = _with_adapters(model, adapter_path)
        files = None
    ours = on_our_caches(model, config, skip_check=skip_check)
    ours.group = group
    ours.name, ours.path = model_name(path), path
    ours.loaded_from = None if group is not None else files
    return ours, tokenizer, config


def build_model(
    path: Path, model_config: dict[str, Any] | None = None
) -> tuple[Module, dict[str, Any], WeightFiles | None]:
    """A model whose weights are lazy, its configuration, and its files as they were before: they
    are read when the weights are evaluated.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        ggufs = sorted(path.glob("*.gguf"))
        raise LoadError(
            f"[load] {path} has no config.json; a model folder holds config.json and "
            "model*.safetensors" + (f"; for its GGUF file, give {ggufs[0]}" if ggufs else "")
        )
    check_config({**read_json_object(config_file), **(model_config or {})}, config_file)
    check_generation_config(path / "generation_config.json")
    if not any(path.glob("model*.safetensors")):
        raise LoadError(f"[load] {path} has no weights (model*.safetensors)")
    with load_errors(f"the model in {path} is broken"), without_marks(path) as readable:
        # A copy of the folder has another order of files.
        files = WeightFiles.at(path) if readable == path else None
        model, config = load_model(
            readable, lazy=True, model_config=model_config, get_model_classes=_without_heads
        )
        vars(model).pop("sanitize", None)
    _check_weights(model, path)
    if files is not None:
        files = replace(files, config=json.dumps(config, sort_keys=True, default=str))
    return model, config, files


def _without_heads(config: dict[str, Any]) -> tuple[Any, Any]:
    """As :func:`model_classes`; the models leave out tensors of heads that draft, which not all
    classes of mlx-lm do, and take those of a model without its head.
    """
    classes: tuple[Any, Any] = model_classes(config)
    model_class, args_class = classes

    def make(args: Any) -> Any:
        model = model_class(args)
        own = getattr(model, "sanitize", lambda weights: weights)
        last = len(getattr(model, "layers", ()))
        model.sanitize = lambda weights: own(
            _with_head(
                {name: each for name, each in weights.items() if not is_of_head(name, last)},
                "lm_head" in model,
            )
        )
        return model

    return make, args_class


def _with_head(weights: dict[str, mx.array], takes_head: bool) -> dict[str, mx.array]:
    """The weights of an embedder that was saved without its head, whose names lack ``model.``, as
    those of a whole model. The head, which embeddings of texts don't need, is that of a model whose
    head is tied to its embeddings.
    """
    if "embed_tokens.weight" not in weights:
        return weights
    named = {f"model.{name}": each for name, each in weights.items()}
    if takes_head:
        for part in ("weight", "scales", "biases"):
            if f"embed_tokens.{part}" in weights:
                named[f"lm_head.{part}"] = weights[f"embed_tokens.{part}"]
    return named


def _read_weights(model: Module, path: Path) -> None:
    with load_errors(f"the model in {path} is broken"):
        mx.eval(model.parameters())


def _with_adapters(model: Module, adapter_path: str | Path) -> Module:
    from mlx_lm.tuner.dora import DoRAEmbedding  # slow: imports everything that trains

    what = f"the adapters in {one_line(adapter_path)} can't be used"
    with load_errors(what), without_marks(Path(adapter_path)) as readable:
        adapted: Module = load_adapters(model, str(readable))
    adapted.eval()
    for name, module in adapted.named_modules():
        # mlx-lm mistakes the packed integers for the weights, and fails when the model runs.
        if isinstance(module, DoRAEmbedding) and isinstance(module.embedding, QuantizedEmbedding):
            raise LoadError(
                f"[load] {what}: mlx-lm's DoRA can't adapt a quantised embedding ({name}); use a "
                "model whose embedding is not quantised, or LoRA"
            )
    return adapted


def _check_weights(model: Module, path: Path) -> None:
    """Refuse integer weights, with which a model would silently compute nonsense."""
    weights = dict(tree_flatten(model.parameters()))
    for name, weight in weights.items():
        module = name.rpartition(".")[0]
        # Quantised weights are packed in unsigned integers, and so are the scales of some formats.
        has_scales = any(f"{module}.{scale}" in weights for scale in ("scales", "weight_scale"))
        is_packed = has_scales and weight.dtype in (mx.uint8, mx.uint32)
        if not is_packed and not mx.issubdtype(weight.dtype, mx.floating):
            raise LoadError(
                f"[load] the model in {path} is broken: the weights {name} are of type "
                f"{weight.dtype}"
            )


def on_our_caches(
    model: Module,
    config: dict[str, Any],
    *,
    evaluates_weights: bool = True,
    skip_check: bool = False,
) -> LanguageModel:
    """A model of this package as it is, one of mlx-lm adapted (:func:`adapt`).

    Raises:
        LoadError: it can't run here, with the reason.
    """
    if isinstance(model, LanguageModel):
        return model
    model_type = shown(config.get("model_type"))
    try:
        return adapt(model, config, evaluates_weights=evaluates_weights, skip_check=skip_check)
    except FailedCheckError as error:
        raise LoadError(
            f"[load] model type {model_type} fails the check at load: {one_line(error)}; to run "
            "it all the same, load it with skip_check",
            "skip_check",
        ) from error
    except UnsuitableModelError as error:
        raise LoadError(
            f"[load] model type {model_type} can't run on a paged cache: {one_line(error)}"
        ) from error
