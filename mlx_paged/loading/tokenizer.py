"""The tokenizer in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from mlx_paged.loading.folder import load_errors

# What a tokenizer that does not cut texts into words remembers, instead of 10,000 texts.
NUM_REMEMBERED_TEXTS = 256
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_tokenizer(
    folder: Path, tokenizer_config: dict[str, Any] | None, eos_token_ids: Any
) -> TokenizerWrapper:
    """The tokenizer, as mlx-lm loads it.

    Args:
        tokenizer_config: replaces fields of ``tokenizer_config.json``.
        eos_token_ids: of the model, which end an answer beside the tokenizer's own.

    Raises:
        LoadError: it is missing or broken.
    """
    with load_errors(f"the tokenizer in {folder} is missing or broken"):
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            # transformers would make up a tokenizer of one word.
            raise ValueError(f"none of {', '.join(TOKENIZER_FILES)}")
        tokenizer: TokenizerWrapper = load_tokenizer(
            folder, tokenizer_config, eos_token_ids=eos_token_ids
        )
    # transformers would warn of "indexing errors" when a text is long. The context limit says it
    # with the numbers.
    warned = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(warned, dict):
        warned["sequence-length-is-longer-than-the-specified-maximum"] = True
    _bound_text_cache(tokenizer)
    return tokenizer


def _bound_text_cache(tokenizer: TokenizerWrapper) -> None:
    """Have a tokenizer of whole texts, as those of SentencePiece are, remember fewer of them.

    tokenizers keeps what it made of the first 10,000 different words of fewer than 255 characters,
    for each thread that encodes, and does not free them with the tokenizer. Words come back. Whole
    texts seldom do, and take some 3 KB each: 34 MB per thread.
    """
    backend = getattr(tokenizer._tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    cut = backend.pre_tokenizer
    cuts_words = cut is not None and len(cut.pre_tokenize_str("some words")) > 1
    resize = getattr(backend.model, "_resize_cache", None)
    if resize is not None and not cuts_words:
        resize(NUM_REMEMBERED_TEXTS)
