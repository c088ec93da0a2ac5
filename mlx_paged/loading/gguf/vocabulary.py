"""The tokens in a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from mlx_paged.errors import shown
from mlx_paged.loading.folder import LoadError
from mlx_paged.loading.gguf.metadata import Metadata

# Control tokens that end an answer: files often name only one end token of two.
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<|eom_id|>", "<EOT>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
END_NAMES = ("eos", "eot", "eom")
TOKENS = "tokenizer.ggml.tokens"


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GGUFVocabulary:
    """A file's tokens and their types.

    Attributes:
        types: a :class:`TokenType` per token.
        scores: one per token, for SentencePiece's merges; read on first use.
    """

    metadata: Metadata
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, metadata: Metadata) -> GGUFVocabulary:
        """Raises :class:`LoadError` if it is missing or damaged."""
        tokens = metadata.texts(TOKENS)
        types = [int(TokenType.NORMAL)] * len(tokens)
        if "tokenizer.ggml.token_type" in metadata:
            types = metadata.integers("tokenizer.ggml.token_type", len(tokens))
        # Converters pad the vocabulary to the number of embeddings; no text has these tokens.
        size = len(tokens)
        while size and types[size - 1] == TokenType.UNUSED:
            size -= 1
        vocabulary = cls(metadata, tokens[:size], types[:size])
        if len(vocabulary.ids) < size:
            twice = next(t for i, t in enumerate(tokens[:size]) if vocabulary.ids[t] != i)
            raise LoadError(f"[load] {metadata.file} has the token {shown(twice)} twice")
        return vocabulary

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    @cached_property
    def scores(self) -> list[float]:
        num_tokens = len(self.metadata.texts(TOKENS))
        return self.metadata.numbers("tokenizer.ggml.scores", num_tokens)

    def of_type(self, *types: TokenType) -> Iterator[tuple[int, str]]:
        """Token ids and texts, in order."""
        for index, kind in enumerate(self.types):
            if kind in types:
                yield index, self.tokens[index]

    def special(self, name: str) -> int | None:
        """The id of the file's token for ``bos``, ``eos`` and so on, if there is one."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.metadata:
            return None
        token_id = self.metadata.integer(key)
        if token_id >= len(self.tokens):
            raise LoadError(
                f"[load] {self.metadata.file}: {key} is {token_id:,}, but there are "
                f"{len(self.tokens):,} tokens"
            )
        return token_id

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end an answer: those that the file names, and well-known control tokens."""
        named = [self.special(name) for name in END_NAMES]
        known = (i for i, token in self.of_type(TokenType.CONTROL) if token in _END_TEXTS)
        return list(dict.fromkeys([*(i for i in named if i is not None), *known]))
