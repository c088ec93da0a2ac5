"""Which part of an answer is the model's reasoning (``<think> ... </think>``), piece by piece."""

from __future__ import annotations

from typing import NamedTuple

from mlx_paged.engine.text_stream import find_unfinished_stop


class Piece(NamedTuple):
    text: str
    is_thinking: bool


class ThinkingSplitter:
    """Cuts a streamed answer into reasoning and what is said; the marks belong to the reasoning.

    Args:
        start: the mark that opens reasoning; ``None``, for a model that has none, cuts nothing.
        end: the mark that closes it.
        is_thinking: the prompt has opened it already.
    """

    def __init__(self, start: str | None, end: str | None, is_thinking: bool = False):
        self._start, self._end = start, end
        self._is_thinking = is_thinking
        self._held_back = ""  # may turn out to be the beginning of a mark

    def add(self, text: str) -> list[Piece]:
        """The pieces that can be told apart by now."""
        if not self._start or not self._end:
            return [Piece(text, False)] if text else []
        pieces: list[Piece] = []
        text = self._held_back + text
        while True:
            mark = self._end if self._is_thinking else self._start
            begin = text.find(mark)
            if begin < 0:
                break
            if self._is_thinking:
                pieces.append(Piece(text[: begin + len(mark)], True))
                text = text[begin + len(mark) :]
            else:
                pieces.append(Piece(text[:begin], False))
                pieces.append(Piece(mark, True))
                text = text[begin + len(mark) :]
            self._is_thinking = not self._is_thinking
        place = find_unfinished_stop(text, (mark,))
        pieces.append(Piece(text[:place], self._is_thinking))
        self._held_back = text[place:]
        return [piece for piece in pieces if piece.text]

    def finish(self) -> list[Piece]:
        """The answer is over: what was held back was not a mark."""
        text, self._held_back = self._held_back, ""
        return [Piece(text, self._is_thinking)] if text else []
