"""Rules for tokens from a request's parameters, checked against model and tokenizer when it is
added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.request import NO_RULES, TokenRules
from mlx_paged.errors import ArgumentError, reason, shown
from mlx_paged.sampling_params import SamplingParams


def read_token_rules(
    params: SamplingParams, tokenizer: TokenizerWrapper | None, vocab_size: int
) -> TokenRules:
    """Check a request's token ids, and encode its bad words.

    Raises:
        ArgumentError: a token id is outside the vocabulary, a text needs a tokenizer and there is
            none, or a bad word has no tokens; the message names the argument.
    """
    for name, token_ids in (
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", _flat(params.stop_token_ids)),
        ("xtc_special_tokens", params.xtc_special_tokens),
    ):
        _check_in_vocabulary(name, token_ids, vocab_size)
    if tokenizer is None:
        if params.stop:
            raise ArgumentError("[engine] stop texts need a tokenizer; use stop_token_ids", "stop")
        if params.bad_words:
            raise ArgumentError("[engine] bad_words need a tokenizer; use logit_bias", "bad_words")
    if not params.bad_words and not params.min_tokens:
        return NO_RULES
    eos_token_ids: Iterable[int] = () if tokenizer is None else tokenizer.eos_token_ids
    words = [] if tokenizer is None else _bad_words(params.bad_words, tokenizer)
    for word in words:
        _check_in_vocabulary("bad_words", word, vocab_size)
    return TokenRules(
        frozenset(token for token in eos_token_ids if token < vocab_size), tuple(words)
    )


def special_token_ids(tokenizer: TokenizerWrapper | None) -> frozenset[int]:
    """The tokens that ``decode(..., skip_special_tokens=True)`` omits."""
    if tokenizer is None:
        return frozenset()
    # A tokenizer may be third-party code, and lack these attributes.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, entry in added.items() if entry.special}
    return frozenset(special.union(getattr(tokenizer, "all_special_ids", ())))


def _bad_words(texts: Iterable[str], tokenizer: TokenizerWrapper) -> list[tuple[int, ...]]:
    """The tokens of each text, both without and with a space before it.

    vLLM omits the second form if it has a different number of tokens. Here both are banned, since a
    word may be one token after a space and several without it.
    """
    words: dict[tuple[int, ...], None] = {}
    for text in texts:
        forms = [_encode(tokenizer, space + text.lstrip()) for space in ("", " ")]
        if not forms[0]:
            raise ArgumentError(
                f"[engine] bad_words has {shown(text)}, for which the tokenizer has no tokens; "
                "leave it out",
                "bad_words",
            )
        words.update((form, None) for form in forms if form)
    return list(words)


def _encode(tokenizer: TokenizerWrapper, text: str) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:
        # A tokenizer may be third-party code and raise anything.
        raise ArgumentError(
            f"[engine] bad_words has {shown(text)}, which the tokenizer can't encode: "
            f"{reason(error)}",
            "bad_words",
        ) from error


def _flat(stops: Iterable[int | Sequence[int]]) -> list[int]:
    return [token for stop in stops for token in ([stop] if isinstance(stop, int) else stop)]


def _check_in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if token >= vocab_size:
            raise ArgumentError(
                f"[engine] {name} has token id {token}, the vocabulary ends at {vocab_size - 1}",
                name,
            )
