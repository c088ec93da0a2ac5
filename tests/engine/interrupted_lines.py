"""An interrupt at any line of the package: what Ctrl-C, or an exception that another thread sends, may do at worst."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import mlx_paged

PACKAGE = str(Path(mlx_paged.__file__).parent)


class LineInterrupt:
    """Counts the lines of the package that begin to run, and raises ``KeyboardInterrupt`` before one of them.

    Args:
        at: the number of that line, from 0; ``None`` only counts.

    Attributes:
        num_lines: lines so far.
        where: the function and line that was interrupted.
    """

    def __init__(self, at: int | None = None):
        self.at = at
        self.num_lines = 0
        self.where: str | None = None

    @contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            number, self.num_lines = self.num_lines, self.num_lines + 1
            if number == self.at:
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace
