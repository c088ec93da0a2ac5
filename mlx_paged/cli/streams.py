"""Writing to stdout and stderr, which may be a broken pipe, a full disk, or of any locale."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator

from mlx_paged.errors import harmless, system_reason


class OutputLostError(Exception):
    """Stdout can't be written; the message says why. ``__cause__`` is the error of the system,
    ``BrokenPipeError`` if the reader has left.
    """


def prepare_streams() -> None:
    """Let any bytes and characters pass; a standard stream that is closed is the null device."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdin, sys.stdout):
        # A byte or a character that this locale can't represent must not end a chat.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def say(text: str) -> None:
    """Write lines to stderr, with control characters escaped: they may quote a file, a model or a
    request.
    """
    write_codes(f"{harmless(text)}\n")


def write_codes(text: str) -> None:
    """Write text unchanged to stderr; if that is full or closed, the error can't be reported."""
    with contextlib.suppress(OSError, ValueError):
        print(text, end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def warnings_as_lines(say: Callable[[str], object]) -> Iterator[None]:
    """Print each warning as one line, without its place in the code."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        say(" ".join(str(message).split()))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def write(text: str) -> None:
    """Write to stdout, and flush it.

    Raises:
        OutputLostError: stdout is closed, its disk is full, or its reader has left.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: closed while the program ran
        raise OutputLostError(f"the output can't be written: {system_reason(error)}") from error


def give_up_output(name: str, error: OutputLostError) -> None:
    """Say that a program's output is lost. That its reader has left (| head) is no error.

    The buffered output is dropped, so that Python does not report an error when it exits.
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error.__cause__, BrokenPipeError):
        say(f"{name}: error: {error}")
