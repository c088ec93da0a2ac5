"""``CompiledGrammar``: the grammar of a request, compiled for the vocabulary of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper

from mlx_paged.argument_values import kind_of
from mlx_paged.engine.grammar_trial import light_vocabulary
from mlx_paged.errors import ArgumentError, reason

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The vocabulary of a model for grammars.

    Attributes:
        ll_tokenizer: llguidance's tokenizer.
        vocab_size: of the model: logits in a row.
        num_words: 32-bit words in a mask, with at least ``vocab_size`` bits.
        unstructured: ``[num_words] uint32``, the mask of all tokens but those that end an answer.
        light: the vocabulary for trials.
        line_breaks: the tokens that consist of one or two line breaks.
    """

    ll_tokenizer: LLTokenizer
    vocab_size: int
    num_words: int
    unstructured: np.ndarray
    light: dict[str, Any]
    line_breaks: frozenset[int]

    @classmethod
    def read(cls, tokenizer: TokenizerWrapper, vocab_size: int) -> Vocabulary:
        """Read the vocabulary of a tokenizer; takes about a second with 150,000 tokens.

        Args:
            vocab_size: of the model, which may have more or fewer tokens than the tokenizer. Tokens
                that the tokenizer lacks are never sampled.

        Raises:
            ArgumentError: llguidance is not installed, it can't read the tokenizer, or the model
                has no end of sequence.
        """
        try:
            from llguidance import hf
        except ImportError as error:
            raise refusal(
                "structured outputs need llguidance; pip install 'mlx-paged[server]'"
            ) from error
        inner = tokenizer._tokenizer
        if isinstance(inner, NewlineTokenizer) or not hasattr(inner, "backend_tokenizer"):
            raise refusal(
                f"structured outputs need a fast tokenizer of Hugging Face, got {kind_of(inner)}"
            )
        eos_token_ids = [each for each in sorted(tokenizer.eos_token_ids) if each < vocab_size]
        if not eos_token_ids:
            raise refusal("structured outputs need a tokenizer with an end of sequence")
        token_ids = np.array(sorted(inner.get_vocab().values()))
        num_tokens = max(vocab_size, int(token_ids.max()) + 1)
        try:
            ll_tokenizer = hf.from_tokenizer(inner, n_vocab=num_tokens, eos_token=eos_token_ids)
        except Exception as error:
            raise refusal(f"llguidance can't use the tokenizer: {reason(error)}") from error
        num_words = (ll_tokenizer.vocab_size + 31) // 32
        bits = np.zeros(num_words * 32, np.bool_)
        bits[token_ids] = True
        bits[eos_token_ids] = False
        unstructured = np.packbits(bits, bitorder="little").view(np.uint32)
        special = {str(added): token for token, added in inner.added_tokens_decoder.items()}
        light = light_vocabulary(num_tokens, special, eos_token_ids)
        encoded = (tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n"))
        line_breaks = frozenset(
            tokens[0] for tokens in encoded if len(tokens) == 1 and tokens[0] < vocab_size
        )
        return cls(ll_tokenizer, vocab_size, num_words, unstructured, light, line_breaks)


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """The grammar of a request's answers.

    Attributes:
        matcher: in the state at the beginning of an answer; copied for each, and never modified.
        begin_after: token ids that end the reasoning, after which the structure begins.
        reasoning_start: token ids that begin the reasoning. Without them, the structure begins at
            the first token.
    """

    vocabulary: Vocabulary
    matcher: LLMatcher
    begin_after: tuple[int, ...] = ()
    reasoning_start: tuple[int, ...] = ()


def refusal(message: str) -> ArgumentError:
    """The error of a request whose ``structured_outputs`` are not supported."""
    return ArgumentError(f"[structured_outputs] {message}", "structured_outputs")
