"""``TextStream``: the text of one completion as its tokens come, up to the first stop text;
``TokenTexts``: the bytes of single tokens, which may be parts of characters, and detokenizers that
join them.
"""

from __future__ import annotations

import codecs
import json
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NewlineTokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import Tokenizer, decoders

from mlx_paged.answers.dialect import AnswerFormat, Detokenizer
from mlx_paged.answers.reader import AnswerReader

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


# Those of a tokenizer are read once.
token_texts_of = lru_cache(maxsize=8)(TokenTexts)


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


class TextStream:
    """Converts tokens to text in complete characters, and holds back text that may still become
    part of a stop text or of a stop sequence.

    Of several stop texts, the one that begins first in the text counts, independent of token
    boundaries; of several with the same beginning, the shortest, which is completed first.
    ``finish`` ends a text without a stop text. Stop sequences are found by the caller, which passes
    their length to ``finish``.

    The text is that of the tokens after the prompt, and keeps a leading space. A token that the
    tokenizer lacks (a model's vocabulary is often padded) adds no text.

    Args:
        texts: of the tokenizer's tokens.
        stop: the stop texts, not empty.
        prompt_token_ids: the tokens before the text.
        stop_sequences: sequences of token ids; text that may belong to one is held back.
        min_tokens: stop texts that are completed within this many tokens are ignored.
        includes_stop: whether the text keeps the stop text that ends it.
        skipped_token_ids: special tokens, which add no text. One that is a stop text ends the text.
        answer_format: how the text is read: each control token among its marks is one character,
            and stop texts count neither in reasoning nor in calls of tools.

    Attributes:
        text: the text that can be shown so far. It is only ever appended to.
    """

    def __init__(
        self,
        texts: TokenTexts,
        stop: Sequence[str] = (),
        *,
        prompt_token_ids: Sequence[int] = (),
        stop_sequences: Sequence[Sequence[int]] = (),
        min_tokens: int = 0,
        includes_stop: bool = False,
        skipped_token_ids: Collection[int] = (),
        answer_format: AnswerFormat | None = None,
    ):
        self.text = ""
        self._marks = {} if answer_format is None else answer_format.marks.characters
        self._reader: AnswerReader | None = None
        if stop and answer_format is not None and answer_format.has_marks:
            self._reader = AnswerReader(answer_format)
        self._tokenizer = texts.tokenizer
        self._detokenizer = texts.detokenizer(prompt_token_ids)
        self._stops = tuple(stop)
        self._includes_stop = includes_stop
        self._skipped = skipped_token_ids
        self._num_tokens_left = min_tokens  # until stop texts count
        self._held_back = ""  # possible beginning of a stop text
        self._num_ignored = 0  # its first characters, within which no stop text may end
        self._found: str | None = None
        self._stop_sequences = tuple(map(tuple, stop_sequences))
        # The last tokens, up to the length of a stop sequence, each with the number of characters
        # before it.
        longest = max(map(len, self._stop_sequences), default=0)
        self._last_tokens: deque[tuple[int, int]] = deque(maxlen=longest)
        self._decided = ""  # text without a stop text; ``text`` is a prefix of it

    def add(self, token_id: int) -> str | None:
        """Add the next token; returns the stop text that was found, or ``None``."""
        if self._found is not None:
            return self._found
        if self._stop_sequences:
            self._last_tokens.append((token_id, len(self._decided) + len(self._held_back)))
        if token_id in self._marks or token_id in self._skipped:
            found = self._add_special(token_id)
        else:
            found = self._add_text(self._detokenizer.add(token_id))
        self.text = self._shown() if self._last_tokens else self._decided
        return found

    def finish(self, num_left_out: int = 0) -> str | None:
        """End the text and show what was held back; returns the stop text that was found, or
        ``None``.

        Args:
            num_left_out: number of the last tokens that are a stop sequence, whose text is not
                shown.
        """
        if self._found is not None:
            return self._found
        tail = self._held_back + self._detokenizer.finish()
        if num_left_out:
            _, end = self._last_tokens[-num_left_out]
            tail = tail[: max(0, end - len(self._decided))]
            self._decided = self._decided[:end]
        self._last_tokens.clear()
        return self._end(tail)

    def _add_text(self, new_text: str) -> str | None:
        if not self._stops:
            self._decided += new_text
            return None
        if self._reader is not None and not self._counts_in(new_text):
            self._decided += self._held_back + new_text
            self._held_back = ""
            return None
        tail = self._held_back + new_text
        if self._num_tokens_left > 0:
            self._num_tokens_left -= 1
            self._num_ignored = len(tail)
        begin, stop = find_stop(tail, self._stops, self._num_ignored)
        unfinished = find_unfinished_stop(tail, self._stops)
        if stop is not None and begin <= unfinished:
            return self._end(tail)
        # A stop text that begins before a found one may still be completed: wait.
        self._decided += tail[:unfinished]
        self._held_back = tail[unfinished:]
        self._num_ignored = max(0, self._num_ignored - unfinished)
        return None

    def _counts_in(self, new_text: str) -> bool:
        """Whether stop texts count in this text: it is no reasoning and no call of a tool."""
        assert self._reader is not None
        was_text = self._reader.is_text
        self._reader.add(new_text)
        if not self._reader.is_text:
            return False
        if not was_text:
            self._num_ignored = len(self._held_back) + len(new_text)
        return True

    def _add_special(self, token_id: int) -> str | None:
        """Add a special token, which has no text, or a mark of the answer, which has a character.
        It ends the text where it is a stop text itself.
        """
        mark = self._marks.get(token_id)
        counts = self._num_tokens_left <= 0
        if mark is not None:
            counts = counts and (self._reader is None or self._reader.is_text)
        found = self._add_text("" if mark is None else self._detokenizer.finish())
        if found is None and self._stops and counts:
            name = self._tokenizer.convert_ids_to_tokens(token_id)
            if name in self._stops:
                # The text that was held back precedes it.
                held_back = self._held_back + self._detokenizer.finish()
                self._found = self._end(held_back) or name
                return self._found
        return found if found is not None or mark is None else self._add_text(mark)

    def _end(self, tail: str) -> str | None:
        """Add the rest of the text, up to a stop text if it contains one."""
        begin, stop = find_stop(tail, self._stops, self._num_ignored)
        if stop is not None and self._includes_stop:
            begin += len(stop)
        self._decided += tail[:begin]
        self._held_back = ""
        self._found = stop
        self._last_tokens.clear()
        self.text = self._decided
        return stop

    def _shown(self) -> str:
        """The decided text without that of tokens which may begin a stop sequence."""
        tokens = [token for token, _ in self._last_tokens]
        num_held_back = num_unfinished_tokens(tokens, self._stop_sequences)
        if not num_held_back:
            return self._decided
        return self._decided[: self._last_tokens[-num_held_back][1]]


def find_stop(text: str, stops: Sequence[str], num_ignored: int = 0) -> tuple[int, str | None]:
    """The beginning of the first stop text in ``text``, and the stop text; the end of ``text`` and
    ``None`` if there is none. Those that end in the first ``num_ignored`` characters are ignored.
    """
    found = [
        (begin, len(stop), stop)
        for stop in stops
        if (begin := text.find(stop, num_ignored and max(0, num_ignored - len(stop) + 1))) >= 0
    ]
    if not found:
        return len(text), None
    begin, _, stop = min(found)
    return begin, stop


def find_unfinished_stop(text: str, stops: Sequence[str]) -> int:
    """Where an incomplete stop text begins at the end of ``text``; its length if there is none."""
    longest = max(map(len, stops))
    for begin in range(max(0, len(text) - longest + 1), len(text)):
        end = text[begin:]
        if any(stop.startswith(end) and stop != end for stop in stops):
            return begin
    return len(text)


def num_unfinished_tokens(token_ids: Sequence[int], sequences: Sequence[tuple[int, ...]]) -> int:
    """How many of the last tokens may be the beginning of a stop sequence."""
    return max(
        (
            length
            for sequence in sequences
            for length in range(1, len(sequence))
            if tuple(token_ids[-length:]) == sequence[:length]
        ),
        default=0,
    )
