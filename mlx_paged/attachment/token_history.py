"""The tokens of a sequence. Reading the most recently sampled ones would wait for the device, so
they are read only when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import cast

import mlx.core as mx


class CallTokens:
    """The tokens of one call, ``[batch, length]``, read from the device at most once."""

    def __init__(self, array: mx.array):
        self.array = array

    @cached_property
    def ids(self) -> list[list[int]]:
        return cast(list[list[int]], self.array.tolist())


class TokenHistory:
    """The tokens of a sequence, in order. ``len`` reads none of them."""

    def __init__(self, ids: Iterable[int] = ()):
        self._ids = list(ids)
        # Per call: its tokens, the row and the columns
        self._unread: list[tuple[CallTokens, int, slice]] = []
        self._num_unread = 0

    def __len__(self) -> int:
        return len(self._ids) + self._num_unread

    def append(self, tokens: CallTokens, row: int, begin: int, end: int) -> None:
        """Append the columns ``begin : end`` of a row."""
        self._unread.append((tokens, row, slice(begin, end)))
        self._num_unread += end - begin

    def read(self) -> list[int]:
        """All token ids: the list itself, which must not be changed."""
        for tokens, row, columns in self._unread:
            self._ids += tokens.ids[row][columns]
        self._unread.clear()
        self._num_unread = 0
        return self._ids

    def trim(self, length: int) -> None:
        """Drop the tokens from ``length`` on."""
        if length < len(self):
            del self.read()[length:]

    def copy(self) -> TokenHistory:
        return TokenHistory(self.read())
