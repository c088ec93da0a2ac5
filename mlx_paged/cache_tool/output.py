"""What the tool writes to stdout: lines for people, JSON for programs."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable
from typing import Any

from mlx_paged.cache_tool.listing import Look
from mlx_paged.cache_tool.text import TextOf
from mlx_paged.standard_streams import write

_LINES_AT_ONCE = 1000


def make_look(text_of: TextOf | None) -> Look:
    """How lists are drawn on this process's stdout."""
    stdout = sys.stdout
    width = shutil.get_terminal_size().columns if stdout is not None and stdout.isatty() else None
    try:
        "├─│└…".encode(getattr(stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return Look(time.time(), width, True, text_of)
    return Look(time.time(), width, False, text_of)


def print_lines(lines: Iterable[str]) -> None:
    """Write lines as they come; raises :class:`OutputLostError` or ``BrokenPipeError``."""
    waiting: list[str] = []
    for line in lines:
        waiting.append(line + "\n")
        if len(waiting) == _LINES_AT_ONCE:
            write("".join(waiting))
            waiting.clear()
    write("".join(waiting))


def print_json(value: Any) -> None:
    write(json.dumps(value, indent=2) + "\n")
