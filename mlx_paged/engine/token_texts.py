"""``TokenTexts``: the bytes of single tokens, which may be parts of characters, and detokenizers
that join them.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, Protocol

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NewlineTokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import Tokenizer, decoders

_SPACE = "▁"  # a space in SentencePiece
# The last tokens of a prompt, which affect how the next token is decoded, as in vLLM.
_NUM_CONTEXT = 5
# Text in which vocabularies differ: runs of spaces, code, several bytes per character.
_PROBE = (
    "a  b   c    d\n\n\n    return\tx[0] != 'it' ;\r\n\t\t\tif (a && b) { } // \u00a0e\u0301 ñ Ω ж "
    "— “東京” 한국어 עברית 🙂👩‍👩‍👧‍👦🇯🇵 <b>&amp;</b> ▁x▁ Ġy <0x41> 1,234.50 … ,  ."
)


def _byte_alphabet() -> dict[str, int]:
    """The bytes of the characters in a byte-level BPE vocabulary (GPT-2's)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


_ALPHABET = _byte_alphabet()


def _byte_level(name: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary. One with another character is plain text."""
    try:
        return bytes(map(_ALPHABET.__getitem__, name))
    except KeyError:
        return name.encode()


def _sentence_piece(name: str) -> bytes:
    """The bytes of a token of a SentencePiece vocabulary with a token for each byte."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            pass
    return name.replace(_SPACE, " ").encode()


def _kinds(component: object) -> list[str]:
    """The types of a component of a tokenizer, of its parts if it is a sequence."""
    if component is None:
        return []
    state: dict[str, Any] = json.loads(component.__getstate__())  # type: ignore[arg-type]
    parts = state.get("decoders", state.get("pretokenizers", [state]))
    return [str(part["type"]) for part in parts]


def decoder_of(backend: Tokenizer) -> Any:
    """The decoder that fits the vocabulary of a fast tokenizer; ``None`` if it has none.

    It is the tokenizer's own, except for a vocabulary of GPT-2's letters under a decoder of
    SentencePiece, as Mistral's conversions of Tekken have it (Devstral Small 2): their own decoder
    leaves ``Ġ`` in the place of spaces. The pre-tokenizer shows which letters the vocabulary has.
    """
    is_byte_level = "ByteLevel" in _kinds(backend.pre_tokenizer)
    if is_byte_level and "ByteFallback" in _kinds(backend.decoder):
        return decoders.ByteLevel()
    return backend.decoder


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

    Where the decoder of a tokenizer maps each token to bytes on its own (byte-level and
    SentencePiece vocabularies), these are looked up. A text and all added tokens are decoded both
    ways when the tokenizer is read; if they differ, and for all other decoders, a token's text is
    what decoding it after other tokens adds.

    Args:
        tokenizer: in mlx-lm's wrapper.
    """

    def __init__(self, tokenizer: TokenizerWrapper):
        self.tokenizer = tokenizer
        inner = tokenizer._tokenizer
        self._backend: Tokenizer | None = getattr(inner, "backend_tokenizer", None)
        if isinstance(inner, NewlineTokenizer):  # replaces text after it has decoded
            self._backend = None
        self._decoder = None if self._backend is None else decoder_of(self._backend)
        self._known_bytes: dict[int, bytes] = {}  # of tokens that were requested
        self._anchor = self._encode("a")[-1:]
        self._read: Callable[[str], bytes] | None = self._reader()
        if self._read is not None and not self._agree():
            self._read = None
            self._known_bytes.clear()

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> TokenTexts:
        """The texts of a tokenizer that was asked for before, or new ones."""
        return _texts_of(tokenizer)

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for the text after a prompt, which is ``decode(prompt + answer)`` without
        ``decode(prompt)``: a leading space is part of it.
        """
        return _FromDecode(self, prompt_token_ids) if self._read is None else _FromBytes(self)

    def without_first_space(self, text: str, token_ids: Sequence[int]) -> str:
        """The text of these tokens in mlx-lm's form: its detokenizers omit a leading space unless
        the tokenizer itself would write it.
        """
        detokenizer = self.tokenizer.detokenizer
        is_sentence_piece = isinstance(detokenizer, SPMStreamingDetokenizer)
        if not text.startswith(" ") or (is_sentence_piece and not detokenizer.trim_space):
            return text
        if isinstance(detokenizer, BPEStreamingDetokenizer):
            return text[1:]
        if is_sentence_piece:
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
        """The text of tokens, special ones included, as the tokenizer's decoder joins them."""
        if self._decoder is None:  # transformers joins words with spaces, and takes some out
            return str(self.tokenizer.decode(list(token_ids)))
        names = map(self._name_of, token_ids)
        return str(self._decoder.decode([name for name in names if name is not None]))

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token within a text; empty for one that the tokenizer lacks."""
        known = self._known_bytes.get(token_id)
        if known is None:
            known = self._known_bytes[token_id] = self._read_bytes(token_id)
        return known

    def text_of(self, token_id: int) -> str:
        """The token as text, with ``"\\ufffd"`` for an incomplete character."""
        return self.bytes_of(token_id).decode(errors="replace")

    def _name_of(self, token_id: int) -> str | None:
        # Tokenizers written in Python raise, where the fast ones return None.
        try:
            name: str | None = (
                self.tokenizer.convert_ids_to_tokens(token_id)
                if self._backend is None
                else self._backend.id_to_token(token_id)
            )
        except (LookupError, OverflowError):
            return None
        return name

    def _read_bytes(self, token_id: int) -> bytes:
        name = self._name_of(token_id)
        if name is None:
            return b""
        if self._read is not None:
            return self._read(name)
        # The first token of a text may lose its space.
        before = self.decode(self._anchor)
        return self.decode([*self._anchor, token_id])[len(before) :].encode(errors="replace")

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        except Exception:  # A tokenizer may raise anything; the prompt's error says so by name.
            return []

    def _reader(self) -> Callable[[str], bytes] | None:
        """What gives the bytes of a token by its name, if the kind of the decoder allows that."""
        kinds = _kinds(self._decoder)
        if kinds == ["ByteLevel"]:
            return _byte_level
        if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and set(kinds[3:]) <= {"Strip"}:
            return _sentence_piece
        return None

    def _agree(self) -> bool:
        """Whether joined bytes are what the decoder makes of the probe and of all added tokens."""
        assert self._backend is not None
        added = sorted(self._backend.get_added_tokens_decoder())
        probe = self._encode(_PROBE)
        token_ids = [*self._anchor, *probe, *self._anchor, *added, *self._anchor, *probe]
        decoded = self.decode(token_ids)[len(self.decode(self._anchor)) :]
        joined = b"".join(map(self.bytes_of, token_ids[len(self._anchor) :]))
        return joined.decode(errors="replace") == decoded


_texts_of = lru_cache(maxsize=8)(TokenTexts)


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
