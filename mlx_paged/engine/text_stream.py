"""The text of one completion as its tokens come, up to the first stop text."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper


class TextStream:
    """Tokens in, text out: whole characters only, and nothing that may still turn out to be part of
    a stop text.

    Of several stop texts, the one that begins first in the whole text counts, however the text is
    cut into tokens; where several begin at the same place, the shortest, which is complete first.
    ``finish`` ends a text that no stop text ended.

    A token that the tokenizer does not have (a model's vocabulary is often padded) adds no text.

    Args:
        tokenizer: its streaming detokenizer turns tokens into text.
        stop: the stop texts, none of them empty.

    Attributes:
        text: what can be shown by now. It only ever grows at its end, and the stop text is left
            out.
    """

    def __init__(self, tokenizer: TokenizerWrapper, stop: Sequence[str] = ()):
        self.text = ""
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer
        self._num_read = 0  # characters of the detokenizer's text
        self._stops = tuple(stop)
        self._held_back = ""
        self._found: str | None = None

    def add(self, token_id: int) -> str | None:
        """Take the next token; returns the stop text that was found, or ``None``."""
        if self._found is not None:
            return self._found
        self._add_token(token_id)
        new_text = self._read()
        if not self._stops:
            self.text += new_text
            return None
        tail = self._held_back + new_text
        begin, stop = find_stop(tail, self._stops)
        unfinished = find_unfinished_stop(tail, self._stops)
        if stop is None or unfinished < begin:
            # An earlier stop text may still be completed: wait for it.
            self.text += tail[:unfinished]
            self._held_back = tail[unfinished:]
            return None
        return self._end(tail[:begin], stop)

    def finish(self) -> str | None:
        """No more tokens come: show what was held back; returns the stop text that was found, or
        ``None``.
        """
        if self._found is not None:
            return self._found
        tail = self._held_back + self._read_last()
        begin, stop = find_stop(tail, self._stops)
        return self._end(tail[:begin], stop)

    def _end(self, last_text: str, stop: str | None) -> str | None:
        self.text += last_text
        self._held_back = ""
        self._found = stop
        return stop

    def _add_token(self, token_id: int) -> None:
        # For a token that it does not have, mlx-lm's BPE detokenizer writes "!" and the SPM one
        # raises IndexError. Tokenizers written in Python raise, where the fast ones return None.
        try:
            if self._tokenizer.convert_ids_to_tokens(token_id) is not None:
                self._detokenizer.add_token(token_id)
        except (LookupError, OverflowError):
            pass

    def _read(self) -> str:
        # Not last_segment: the naive detokenizer's text may shrink for a while (byte tokens that
        # are no character yet take the one before with them), and last_segment would then give the
        # same text twice.
        text: str = self._detokenizer.text
        new_text = text[self._num_read :]
        self._num_read += len(new_text)
        return new_text

    def _read_last(self) -> str:
        try:
            self._detokenizer.finalize()
        except LookupError:
            # The BPE detokenizer raises it for a token outside its byte alphabet that ends like an
            # incomplete character.
            return "\ufffd"
        return self._read()


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str | None]:
    """Where the first stop text begins in ``text``, and which; the end of ``text`` and ``None`` if
    there is none.
    """
    found = [(begin, len(stop), stop) for stop in stops if (begin := text.find(stop)) >= 0]
    if not found:
        return len(text), None
    begin, _, stop = min(found)
    return begin, stop


def find_unfinished_stop(text: str, stops: Sequence[str]) -> int:
    """Where a stop text may begin that ``text`` breaks off in; the end of ``text`` if nowhere."""
    longest = max(map(len, stops))
    for begin in range(max(0, len(text) - longest + 1), len(text)):
        if any(stop.startswith(text[begin:]) for stop in stops):
            return begin
    return len(text)
