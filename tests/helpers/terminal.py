"""The chat program on a pseudo-terminal of its own, typed at like a person types."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte
import pyte.modes

# Against a test that hangs for ever; none of them expects anything to come within some time.
DEADLINE = 300.0
CTRL_C, CTRL_D, TAB, UP, ESCAPE_ENTER = "\x03", "\x04", "\t", "\x1b[A", "\x1b\r"
COMMAND = [sys.executable, "-m", "mlx_paged.chat"]

# prompt_toolkit asks for pastes in brackets when its prompt is there, and keys come to it from then
# on.
READY = "\x1b[?2004h"
_CODE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """Type keys, wait for text. The terminal is the program's own, so that Ctrl-C is what it is for
    a person.

    Args:
        argv: arguments of the chat.
        state: the folder of its history.
        environ: more variables for it.
        columns: of the terminal.
        command: the program, if it is another one.
    """

    def __init__(
        self,
        *argv: str,
        state: Path,
        term: str = "xterm",
        environ: dict[str, str] | None = None,
        columns: int = 0,
        command: Sequence[str] = COMMAND,
    ):
        self.master, slave = pty.openpty()
        if columns:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        variables = {"TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(state)}
        self.process = subprocess.Popen(
            [*command, *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            close_fds=True,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={name: value for name, value in os.environ.items() if name != "NO_COLOR"}
            | variables
            | (environ or {}),
        )
        os.close(slave)
        self.seen = ""
        self._unread = ""

    def wait_for(self, done: Callable[[str], bool] | str) -> str:
        """Read until ``done`` of what came since the last wait (or until that text is in it);
        return that.
        """
        is_done = done if callable(done) else lambda text: done in text
        end = time.monotonic() + DEADLINE
        fresh = self._unread
        while not is_done(fresh):
            assert time.monotonic() < end, f"waited in vain; the terminal shows:\n{self.seen}"
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    data = os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError:  # the program has left
                    assert is_done(fresh), f"it has left; the terminal shows:\n{self.seen}"
                    break
                fresh += data
                self.seen += data
        self._unread = ""
        return fresh

    def wait_for_prompt(self) -> str:
        """Until the program reads keys; returns what it wrote before, without codes."""
        text = self.wait_for(lambda text: ">>" in text.rpartition(READY)[2] and READY in text)
        return plain(text.rpartition(READY)[0])

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def send(self, message: str) -> str:
        """A message, or a command, to its end; what the program wrote."""
        self.type(f"{message}\r")
        return self.wait_for_prompt()

    def paste(self, text: str) -> None:
        self.type(f"\x1b[200~{text}\x1b[201~")

    def close(self) -> int:
        status = self.process.wait(timeout=DEADLINE)
        os.close(self.master)
        return status


@contextmanager
def dialogue(state: Path, *argv: str) -> Iterator[Terminal]:
    """A terminal at its first prompt; Ctrl-D must end the program in the end."""
    terminal = Terminal(*argv, state=state)
    terminal.wait_for_prompt()
    yield terminal
    terminal.type(CTRL_D)
    assert terminal.close() == 0


def saved_messages(file: Path) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = json.loads(file.read_text())["messages"]
    return messages


def reused(err: str) -> list[int]:
    """Prompt tokens reused, of each answer, out of what the chat said on stderr."""
    return [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) of [\d,]+ prompt tokens", err)]


def plain(text: str) -> str:
    """Text without the codes for a terminal."""
    return _CODE.sub("", text)


def screen_lines(text: str, columns: int, rows: int = 24) -> list[str]:
    """What a terminal of this size shows when it has been sent a text, as its tty hands it on; the
    lines that have left its screen stand first.
    """
    screen = ScreenThatReflows(columns, rows)
    screen.feed(text)
    return screen.lines()


class ScreenThatReflows:
    """A terminal that wraps its lines again when it is resized, as most do. pyte cuts them."""

    def __init__(self, columns: int, rows: int = 24):
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int = 24) -> None:
        before = self.lines() if hasattr(self, "_screen") else []
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._screen.set_mode(pyte.modes.LNM)
        self.feed("".join(f"{line}\n" for line in before))

    def feed(self, text: str) -> None:
        pyte.Stream(self._screen).feed(text)

    def lines(self) -> list[str]:
        columns, above = range(self._screen.columns), self._screen.history.top
        cells = ["".join(line[column].data for column in columns) for line in above]
        text = "\n".join(line.rstrip() for line in [*cells, *self._screen.display])
        return text.rstrip().split("\n")
