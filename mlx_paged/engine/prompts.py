"""Prompts in all supported forms, converted to token ids of the model."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.argument_values import is_sequence, kind_of
from mlx_paged.errors import ArgumentError, reason, shown
from mlx_paged.token_ids import TokenIds, check_token_ids, is_array, read_array

# A dict has "prompt", a text, or "prompt_token_ids". Type checkers do not recognise TypedDicts in
# unions such as this one.
Prompt: TypeAlias = "str | TokenIds | Mapping[str, Any]"


class EncodedPrompt(NamedTuple):
    """A prompt as the engine processes it."""

    text: str | None  # as the user gave it; None if there were only token ids
    token_ids: list[int]  # at least one, each in the model's vocabulary


def read_prompt(
    prompt: object, tokenizer: TokenizerWrapper | None, vocab_size: int, name: str = "prompt"
) -> EncodedPrompt:
    """Check a prompt and return its text and token ids. Any thread may call it.

    Args:
        prompt: text; token ids as a sequence or a 1-d array of integers of any type; or vLLM's
            dicts ``{"prompt": text}`` and ``{"prompt_token_ids": ids}``. If both keys are given,
            the ids are the prompt, and the text is kept for the output.
        tokenizer: for text; with ``None``, only token ids are accepted.
        vocab_size: each id must be below it.
        name: of the argument, for error messages.

    Raises:
        ValueError: it has another type, is empty, can't be encoded, or has a token outside the
            vocabulary; the message is one line that names the argument.
    """
    text, token_ids = _split_dict(prompt, name) if isinstance(prompt, Mapping) else (None, prompt)
    if isinstance(token_ids, str):
        text, token_ids = token_ids, encode_prompt(tokenizer, token_ids, name)
    ids = check_token_ids(token_ids, vocab_size, name)
    if not ids:
        raise ArgumentError(f"[prompt] the prompt is empty; give at least one token as {name}")
    return EncodedPrompt(text, ids)


def as_tokenizer(tokenizer: object) -> TokenizerWrapper:
    """The tokenizer in mlx-lm's wrapper; raises ``ValueError`` for anything else."""
    if isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    if isinstance(tokenizer, type) or not all(
        hasattr(tokenizer, name) for name in ("encode", "decode", "eos_token_id")
    ):
        raise ArgumentError(
            "[tokenizer] tokenizer must be one that mlx_paged.load returns, got "
            f"{kind_of(tokenizer)}"
        )
    try:
        return TokenizerWrapper(tokenizer)
    except Exception as error:
        raise ArgumentError(f"[tokenizer] tokenizer can't be used: {reason(error)}") from error


def split_prompts(prompts: object) -> list[Any]:
    """Split the argument of a call that accepts one or several prompts, by vLLM's rules, without
    checking the prompts.

    A text, a dict, a sequence that begins with a number and a 1-d array are one prompt. A 2-d array
    has a prompt in each row.

    Raises:
        ValueError: it is neither a prompt nor a sequence of prompts.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if is_array(prompts):
        if prompts.ndim not in (1, 2):
            raise ArgumentError(
                f"[prompt] prompts is an array of shape {tuple(prompts.shape)}; give one dimension "
                "for one prompt, or two for a prompt in each row"
            )
        prompts = read_array(prompts, "prompts")
    if not is_sequence(prompts):
        raise ArgumentError(
            f"[prompt] prompts must be a prompt (text, token ids or a dict) or a list of prompts, "
            f"got {kind_of(prompts)}"
        )
    return [prompts] if len(prompts) and is_number(prompts[0]) else list(prompts)


def encode_prompt(tokenizer: TokenizerWrapper | None, text: str, name: str = "prompt") -> list[int]:
    """Encode a text like mlx-lm: with special tokens, unless it begins with them.

    Raises:
        ValueError: there is no tokenizer, or it can't encode the text.
    """
    if tokenizer is None:
        raise ArgumentError(f"[prompt] a text prompt needs a tokenizer; give token ids as {name}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"[prompt] {name} is not valid Unicode: {text[error.start]!r} at position "
            f"{error.start} is half a character; decode the text with errors='replace'"
        ) from error
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    try:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=not has_bos)
    except Exception as error:
        # A tokenizer may be third-party code and raise anything.
        raise ArgumentError(
            f"[prompt] the tokenizer can't encode {name}: {reason(error)}"
        ) from error
    return token_ids


def is_number(value: object) -> bool:
    """Whether a value is a single number of any type, including those of NumPy and MLX."""
    return isinstance(value, numbers.Number) or (is_array(value) and value.ndim == 0)


def _split_dict(prompt: Mapping[object, object], name: str) -> tuple[str | None, object]:
    """The text, and what is to be read: the token ids if there are some, else the text."""
    given = {key: value for key, value in prompt.items() if value is not None}
    text, token_ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
    if text is None and token_ids is None:
        keys = shown(list(prompt))
        raise ArgumentError(
            f"[prompt] a prompt is text or token ids, got {kind_of(prompt)} with keys {keys} as "
            f"{name}; a dict has 'prompt' (text) or 'prompt_token_ids'"
        )
    if given:
        key = next(iter(given))
        way_out = "; give it to add_request instead" if key in ("cache_salt", "no_store") else ""
        raise ArgumentError(
            f"[prompt] {name}[{key!r}] is not supported, only text and token ids are{way_out}"
        )
    if text is not None and not isinstance(text, str):
        raise ArgumentError(f"[prompt] {name}['prompt'] must be text, got {kind_of(text)}")
    if isinstance(token_ids, (str, Mapping)):
        raise ArgumentError(
            f"[prompt] {name}['prompt_token_ids'] must be token ids, got {kind_of(token_ids)}"
        )
    return text, text if token_ids is None else token_ids
