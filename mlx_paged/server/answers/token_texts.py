"""``TokenTexts``: the bytes that single tokens stand for, which may be parts of characters."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)

_SPACE = "▁"  # how SentencePiece writes one


def _byte_alphabet() -> dict[str, int]:
    """The bytes that the characters of a byte-level BPE vocabulary stand for (GPT-2's)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


class TokenTexts:
    """The bytes of tokens by their ids.

    Args:
        tokenizer: in mlx-lm's wrapper, whose detokenizer says how its vocabulary is written.

    Attributes:
        trims_first_space: whether the detokenizer leaves out a space that a text begins with.
    """

    def __init__(self, tokenizer: TokenizerWrapper):
        self._tokenizer = tokenizer
        detokenizer = tokenizer.detokenizer
        kind = type(detokenizer)
        self._is_sentence_piece = issubclass(kind, SPMStreamingDetokenizer)
        self.trims_first_space = issubclass(kind, BPEStreamingDetokenizer) or (
            self._is_sentence_piece and getattr(detokenizer, "trim_space", True)
        )
        self._alphabet = _byte_alphabet() if issubclass(kind, BPEStreamingDetokenizer) else {}
        # Written with their own characters, whatever the alphabet of the others.
        self._added = frozenset(getattr(tokenizer, "added_tokens_decoder", ()))

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text; none for one that the tokenizer does not
        have.
        """
        try:
            name: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        except (LookupError, OverflowError):
            name = None
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
        text: str = self._tokenizer.decode([token_id])
        return text.encode(errors="replace")

    def text_of(self, token_id: int) -> str:
        """The token as text, where ``"\\ufffd"`` stands for a part of a character."""
        return self.bytes_of(token_id).decode(errors="replace")
