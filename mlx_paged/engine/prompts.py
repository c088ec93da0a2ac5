"""Prompts: text to token ids, and the check that a model has them."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper


def encode_prompt(tokenizer: TokenizerWrapper, prompt: str) -> list[int]:
    """Token ids of a text as mlx-lm makes them: with special tokens, unless the text begins with them."""
    has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
    return tokenizer.encode(prompt, add_special_tokens=not has_bos)


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ``ValueError`` for a token that the model does not have: an embedding looks up any number in silence."""
    for token in token_ids:
        if not isinstance(token, int):
            raise ValueError(f"[generate] token ids are integers, got {token!r}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"[generate] token id {token} is outside the model's vocabulary of {vocab_size}")
