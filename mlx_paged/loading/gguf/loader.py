"""Load a GGUF file: a model with its weights, and its tokenizer."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.errors import one_line, shown
from mlx_paged.loading.configuration import model_classes
from mlx_paged.loading.folder import LoadError, load_errors
from mlx_paged.loading.gguf.configuration import read_configuration
from mlx_paged.loading.gguf.files import GGUFFile
from mlx_paged.loading.gguf.tokenizer import named_end_ids, write_tokenizer
from mlx_paged.loading.gguf.vocabulary import TOKENS, GGUFVocabulary, TokenType
from mlx_paged.loading.gguf.weights import DTYPES, Weights, default_dtype
from mlx_paged.loading.tokenizer import read_tokenizer


def load_gguf(
    path: Path,
    *,
    tokenizer_path: Path | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
) -> tuple[Module, TokenizerWrapper, dict[str, Any]]:
    """The model in a GGUF file, its tokenizer and its configuration.

    Weights are evaluated one tensor at a time. A warning says which of them lose precision.

    Args:
        path: the file, or any part of a split one.
        tokenizer_path: a folder with the model's tokenizer, instead of the file's own.
        tokenizer_config: passed to the tokenizer.
        model_config: replaces fields of the configuration. ``dtype`` (``float32``, ``float16`` or
            ``bfloat16``) is that of scales, norms and activations, and so of K/V; by default one in
            which the file's matrices are exact.

    Returns:
        A model of this package (qwen3) or an unmodified one of mlx-lm, the tokenizer, and the
        equivalent of ``config.json``.

    Raises:
        LoadError: the file is damaged, or something in it is not supported.
    """
    file = GGUFFile.open(path)
    config = _configuration(file, model_config or {})
    with load_errors(f"the model in {file.path} is broken"):
        # The tokenizer comes first, so that it is refused before the weights are read.
        tokenizer = _load_tokenizer(file, tokenizer_path, tokenizer_config, config)
        model = _build(config)
        weights = Weights(file, model, config)
        weights.load()
        model.eval()
        mx.eval(model.parameters())
    losses = weights.losses()
    if losses:
        warnings.warn(f"[load] {file.path.name}: {'; '.join(losses)}", stacklevel=2)
    return model, tokenizer, config


def build_unread(path: Path) -> tuple[Module, dict[str, Any]]:
    """The model and configuration of :func:`load_gguf`, with weights that are not read.

    Raises:
        LoadError: as :func:`load_gguf`, as far as the file's header shows.
    """
    file = GGUFFile.open(path)
    config = _configuration(file, {})
    with load_errors(f"the model in {file.path} is broken"):
        model = _build(config)
        Weights(file, model, config).shape_model()
    return model, config


def _configuration(file: GGUFFile, changes: dict[str, Any]) -> dict[str, Any]:
    config = {**read_configuration(file), "dtype": default_dtype(file), **changes}
    if config["dtype"] not in list(DTYPES):
        raise LoadError(
            f"[load] dtype must be one of {', '.join(DTYPES)}, got {shown(config['dtype'])}",
            "model_config",
        )
    for name in ("quantization", "quantization_config", "model_type"):
        if name in changes:
            raise LoadError(
                f"[load] model_config can't have {name}: a GGUF file has its own",
                "model_config",
            )
    return config


def _build(config: dict[str, Any]) -> Module:
    model_class, args_class = cast(Any, model_classes(config))
    model: Module = model_class(args_class.from_dict(config))
    if config["tie_word_embeddings"] and "lm_head" in model:
        # Gemma 3's class learns from its weights that there is no matrix of logits.
        cast(Any, model).sanitize({})
    return model


def _load_tokenizer(
    file: GGUFFile,
    folder: Path | None,
    tokenizer_config: dict[str, Any] | None,
    config: dict[str, Any],
) -> TokenizerWrapper:
    if folder is not None:
        ends = config.setdefault("eos_token_id", named_end_ids(file.metadata))
        tokenizer = read_tokenizer(folder, tokenizer_config, ends)
        _check_tokenizer(tokenizer, folder, file)
    else:
        with tempfile.TemporaryDirectory() as name, _advice(file.path):
            written = Path(name)
            ends = config.setdefault("eos_token_id", write_tokenizer(file.metadata, written))
            tokenizer = read_tokenizer(written, tokenizer_config, ends)
    num_rows = file.tensors["token_embd.weight"].num_rows
    if len(tokenizer) > num_rows:
        raise LoadError(
            f"[load] the tokenizer of {file.path} has {len(tokenizer):,} tokens, and the model "
            f"{num_rows:,}"
        )
    return tokenizer


@contextmanager
def _advice(path: Path) -> Iterator[None]:
    """Add to errors of a file's tokenizer that another one can be given."""
    try:
        yield
    except LoadError as error:
        reason = str(error).removeprefix("[load] ")
        if isinstance(error.__cause__, Exception):
            # The message names a temporary folder.
            reason = f"the tokenizer in {path} is broken: {one_line(error.__cause__)}"
        raise LoadError(
            f"[load] {reason}; give a folder with the model's tokenizer as tokenizer_path",
            "tokenizer_path",
        ) from error


def _check_tokenizer(tokenizer: TokenizerWrapper, folder: Path, file: GGUFFile) -> None:
    """Refuse a tokenizer whose token ids differ from the file's."""
    if TOKENS not in file.metadata:
        return
    vocabulary = GGUFVocabulary.read(file.metadata)
    ids = tokenizer.get_vocab()
    for index, token in vocabulary.of_type(TokenType.NORMAL):
        if ids.get(token) != index:
            raise LoadError(
                f"[load] the tokenizer in {folder} is not that of {file.path}: token {index} of "
                f"the file, {shown(token)}, is {shown(ids.get(token))} there",
                "tokenizer_path",
            )
