"""``TokenTexts``: the bytes of single tokens, which may be parts of characters, and detokenizers
that join them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)

_SPACE = "▁"  # a space in SentencePiece
# The last tokens of a prompt, which affect how the next token is decoded, as in vLLM.
_NUM_CONTEXT = 5


def _byte_alphabet() -> dict[str, int]:
    """The bytes of the characters in a byte-level BPE vocabulary (GPT-2's)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


class Detokenizer(Protocol):
    """Converts tokens to text in complete characters."""

    def add(self, token_id: int) -> str:
        """The text that a token adds: empty while it ends within a character."""
        ...

    def finish(self) -> str:
        """The rest after the last token: a replacement for an incomplete character."""
        ...


class TokenTexts:
    """The bytes and texts of a tokenizer's tokens.

    Args:
        tokenizer: in mlx-lm's wrapper, whose detokenizer shows how its vocabulary is encoded.
    """

    def __init__(self, tokenizer: TokenizerWrapper):
        self.tokenizer = tokenizer
        detokenizer = tokenizer.detokenizer
        kind = type(detokenizer)
        self._is_sentence_piece = issubclass(kind, SPMStreamingDetokenizer)
        self._alphabet = _byte_alphabet() if issubclass(kind, BPEStreamingDetokenizer) else {}
        self._keeps_first_space = (
            isinstance(detokenizer, SPMStreamingDetokenizer) and not detokenizer.trim_space
        )
        # Added tokens are plain text, even if the others use the byte alphabet.
        self._added = frozenset(getattr(tokenizer, "added_tokens_decoder", ()))
        self._known_bytes: dict[int, bytes] = {}  # of tokens that were requested

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for the text after a prompt, which is ``decode(prompt + answer)`` without
        ``decode(prompt)``: a leading space is part of it.
        """
        if self._is_sentence_piece or self._alphabet:
            return _FromBytes(self)
        return _FromDecode(self, prompt_token_ids)

    def without_first_space(self, text: str, token_ids: Sequence[int]) -> str:
        """The text of these tokens in mlx-lm's form: its detokenizers omit a leading space unless
        the tokenizer itself would write it.
        """
        if not text.startswith(" ") or self._keeps_first_space:
            return text
        if self._alphabet:
            return text[1:]
        if self._is_sentence_piece:
            # mlx-lm omits it at each token while the text is empty.
            spaces = takewhile(lambda token_id: self.bytes_of(token_id) == b" ", token_ids)
            num_spaces = 1 + sum(1 for _ in spaces)
            return text[:num_spaces].lstrip(" ") + text[num_spaces:]
        alone, twice = (len(self.decode([token_ids[0]] * number)) for number in (1, 2))
        return text[1:] if twice > 2 * alone else text

    def has(self, token_id: int) -> bool:
        """Whether the tokenizer has a token: a model's vocabulary is often padded."""
        return self._name_of(token_id) is not None

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, as the tokenizer decodes it."""
        text: str = self.tokenizer.decode(list(token_ids))
        return text

    def _name_of(self, token_id: int) -> str | None:
        # Tokenizers written in Python raise, where the fast ones return None.
        try:
            name: str | None = self.tokenizer.convert_ids_to_tokens(token_id)
        except (LookupError, OverflowError):
            return None
        return name

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token within a text; empty for one that the tokenizer lacks."""
        known = self._known_bytes.get(token_id)
        if known is None:
            known = self._known_bytes[token_id] = self._read_bytes(token_id)
        return known

    def _read_bytes(self, token_id: int) -> bytes:
        name = self._name_of(token_id)
        if name is None:
            return b""
        if token_id in self._added:
            return name.encode()
        if self._is_sentence_piece:
            if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
                return bytes([int(name[3:5], 16)])
            return name.replace(_SPACE, " ").encode()
        if self._alphabet:
            if all(character in self._alphabet for character in name):
                return bytes(self._alphabet[character] for character in name)
            return name.encode()
        return self.decode([token_id]).encode(errors="replace")

    def text_of(self, token_id: int) -> str:
        """The token as text, with ``"\\ufffd"`` for an incomplete character."""
        return self.bytes_of(token_id).decode(errors="replace")


class _FromBytes:
    """For vocabularies that define the bytes of each token."""

    def __init__(self, texts: TokenTexts):
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        return self._decoder.decode(self._texts.bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _FromDecode:
    """For all others: the decoded text of the new tokens and some before them, without the text of
    those before. These determine whether there is a space between, as in vLLM.
    """

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int]):
        self._texts = texts
        self._before = list(filter(texts.has, prompt_token_ids[-_NUM_CONTEXT:]))
        self._num_before = len(texts.decode(self._before)) if self._before else 0
        self._new: list[int] = []

    def add(self, token_id: int) -> str:
        if not self._texts.has(token_id):
            return ""
        self._new.append(token_id)
        text = self._texts.decode([*self._before, *self._new])
        # The last token may end within a character, or remove a space of the one before.
        if text.endswith("\ufffd") or len(text) <= self._num_before:
            return ""
        added = text[self._num_before :]
        self._before, self._new = self._new, []
        self._num_before = len(self._texts.decode(self._before))
        return added

    def finish(self) -> str:
        text = self._texts.decode([*self._before, *self._new]) if self._new else ""
        self._new = []
        return text[self._num_before :]
