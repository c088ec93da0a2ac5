"""Reading the tokenizer in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer

from mlx_paged.engine.text_stream import decoder_of
from mlx_paged.loading.folder import load_errors, without_marks

# The cache size of a tokenizer that does not split texts into words, instead of 10,000 texts.
NUM_REMEMBERED_TEXTS = 256
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_tokenizer(
    folder: Path, tokenizer_config: dict[str, Any] | None, eos_token_ids: Any
) -> TokenizerWrapper:
    """The tokenizer, as mlx-lm loads it.

    Args:
        tokenizer_config: replaces fields of ``tokenizer_config.json``.
        eos_token_ids: end tokens of the model, in addition to the tokenizer's own.

    Raises:
        LoadError: it is missing or broken.
    """
    what = f"the tokenizer in {folder} is missing or broken"
    with load_errors(what), without_marks(folder) as readable:
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            # transformers would create a tokenizer of one word.
            raise ValueError(f"none of {', '.join(TOKENIZER_FILES)}")
        tokenizer: TokenizerWrapper = load_tokenizer(
            readable, tokenizer_config, eos_token_ids=eos_token_ids
        )
    # transformers would warn of "indexing errors" for a long text; the error of the context limit
    # gives the numbers.
    warned = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(warned, dict):
        warned["sequence-length-is-longer-than-the-specified-maximum"] = True
    backend = getattr(tokenizer._tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.decoder = decoder_of(backend)
        _bound_text_cache(backend)
    return tokenizer


def _bound_text_cache(backend: Tokenizer) -> None:
    """Shrink the cache of a tokenizer that encodes whole texts, as SentencePiece's do.

    tokenizers caches the tokens of the first 10,000 different words of fewer than 255 characters,
    per thread, and does not free them with the tokenizer. Words recur. Whole texts seldom do, and
    take some 3 KB each: 34 MB per thread.
    """
    cut = backend.pre_tokenizer
    cuts_words = cut is not None and len(cut.pre_tokenize_str("some words")) > 1
    resize = getattr(backend.model, "_resize_cache", None)
    if resize is not None and not cuts_words:
        resize(NUM_REMEMBERED_TEXTS)
