"""Access to stdin, stdout and stderr, any of which may be closed, full or redirected."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TextIO

from mlx_paged.errors import harmless, system_reason

NO_STDOUT = "standard output is closed: there is nowhere to write to"


class InputError(ValueError):
    """Stdin is closed or can't be read; the message says why."""


class OutputLostError(Exception):
    """Stdout can't be written; the message says why."""


def open_closed_streams() -> None:
    """Reserve the descriptors of closed standard streams, and let any bytes and characters pass.

    A stream that was closed when the program began stays ``None`` in ``sys``. Its descriptor is
    opened as /dev/null: otherwise the next file to be opened would get it, and with it the output
    of libraries.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "replace")):
        # A byte or a character that this locale can't represent must not end a chat.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def say(text: str) -> None:
    """Write lines to stderr, with control characters escaped: they may quote a file, a model or a
    request.
    """
    write_codes(f"{harmless(text)}\n")


def write_codes(text: str) -> None:
    """Write text unchanged to stderr; if that is closed or full, the error can't be reported."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def warnings_as_lines(say: Callable[[str], object]) -> Iterator[None]:
    """Print each warning as one line, without its place in the code."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        say(" ".join(str(message).split()))

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def read_all() -> str:
    """All of stdin; raises :class:`InputError`."""
    return _read(lambda stdin: stdin.read())


def read_line() -> str:
    """The next line of stdin with its end, "" after the last one; raises :class:`InputError`."""
    return _read(lambda stdin: stdin.readline())


def _read(read: Callable[[TextIO], str]) -> str:
    if sys.stdin is None:
        raise InputError("standard input is closed")
    try:
        return read(sys.stdin)
    except OSError as error:
        raise InputError(f"standard input can't be read: {system_reason(error)}") from error


def write(text: str) -> None:
    """Write to stdout, and flush it.

    Raises:
        OutputLostError: stdout is closed, or its disk is full.
        BrokenPipeError: the reader has closed the pipe.
    """
    if sys.stdout is None:
        raise OutputLostError(NO_STDOUT)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: closed while the program ran
        raise OutputLostError(f"the output can't be written: {system_reason(error)}") from error


def finish_output(status: int, prog: str) -> int:
    """Flush stdout; returns ``status``, or 1 if output was lost."""
    if sys.stdout is None:
        if status == 0:
            say(f"{prog}: error: {NO_STDOUT}")
        return status or 1
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        discard_output()
        if not isinstance(error, BrokenPipeError):
            say(f"{prog}: error: the output can't be written: {system_reason(error)}")
        return 1
    return status


def discard_output() -> None:
    """Drop the buffered output, so that Python does not report an error when it exits."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
