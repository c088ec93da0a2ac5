"""The text of one completion as its tokens come, up to the first stop text."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from mlx_paged.answers.dialect import AnswerFormat
from mlx_paged.answers.reader import AnswerReader
from mlx_paged.engine.token_texts import TokenTexts


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
        if token_id in self._marks:
            found = self._add_mark(token_id)
        elif token_id in self._skipped:
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

    def _add_mark(self, token_id: int) -> str | None:
        """Add a mark of the answer, which ends the text where it is a stop text itself."""
        counts = self._num_tokens_left <= 0 and (self._reader is None or self._reader.is_text)
        found = self._add_text(self._detokenizer.finish())
        if found is None and self._stops and counts:
            name = self._tokenizer.convert_ids_to_tokens(token_id)
            if name in self._stops:
                self._found = self._end(self._held_back) or name
                return self._found
        return found if found is not None else self._add_text(self._marks[token_id])

    def _add_special(self, token_id: int) -> str | None:
        """Add a special token, which has no text, but may be a stop text."""
        counts = self._num_tokens_left <= 0
        found = self._add_text("")
        if not self._stops or not counts or found is not None:
            return found
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if name not in self._stops:
            return None
        # The text that was held back precedes it.
        found = self._end(self._held_back + self._detokenizer.finish())
        self._found = found or name
        return self._found

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
