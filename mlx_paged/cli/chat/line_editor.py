"""Reads messages from a terminal with prompt_toolkit: several lines per message, history, Tab. Keys
typed during an answer are not echoed, and belong to the next message.

Imported only for a terminal: prompt_toolkit takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    PathCompleter,
    WordCompleter,
)
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, create_output
from prompt_toolkit.shortcuts import CompleteStyle, confirm

from mlx_paged.cli.chat.program import VARIABLES, canonical_name
from mlx_paged.cli.chat.terminal import Reader, Screen, clean

PROMPT = ">> "


class LineEditor(Reader):
    """Reads messages from a terminal, where they can be edited.

    Args:
        screen: tells what the terminal supports.
        history_file: keeps messages between sessions; ``None`` keeps them in memory.
    """

    is_interactive = True

    def __init__(self, screen: Screen, history_file: Path | None):
        # The answer goes to stdout, so the prompt goes to stderr where both are terminals. For
        # terminals that can't move their cursor, prompt_toolkit has a simple prompt, which it takes
        # if TERM is "dumb" and no output is given.
        stream = sys.stderr if screen.stderr_is_terminal else sys.stdout
        self._output = create_output(stream) if screen.can_move and not screen.is_plain else None
        if self._output is None:
            os.environ["TERM"] = "dumb"
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=_continuation,
            key_bindings=_keys,
            history=InMemoryHistory() if history_file is None else _History(str(history_file)),
            completer=_CommandCompleter(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
            color_depth=None if screen.has_colour else ColorDepth.DEPTH_1_BIT,
            output=self._output,
        )
        self._mode = termios.tcgetattr(sys.stdin)
        # prompt_toolkit sets the mode of the terminal while it reads. Between its prompts, keys are
        # neither echoed nor buffered by line, and Ctrl-C is a signal that does not discard them.
        iflag, oflag, cflag, lflag, *rest = self._mode
        lflag = lflag & ~(termios.ECHO | termios.ICANON | termios.IEXTEN) | termios.NOFLSH
        quiet = [iflag & ~termios.ICRNL, oflag, cflag, lflag, *rest]
        termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGTSTP, self._suspend)

    def read(self, text: str = "") -> str:
        return clean(self._session.prompt(default=text))

    def confirm(self, question: str) -> bool:
        with contextlib.suppress(EOFError), create_app_session(output=self._output):
            return confirm(question)
        return False

    def close(self) -> None:
        with contextlib.suppress(termios.error):  # the terminal is closed
            termios.tcsetattr(sys.stdin, termios.TCSANOW, self._mode)

    def _end(self, number: int, frame: object) -> None:
        """Restore the terminal, and exit with the signal."""
        self.close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _suspend(self, number: int, frame: object) -> None:
        """Restore the terminal for the shell while this process is stopped (Ctrl-Z)."""
        mode = termios.tcgetattr(sys.stdin)
        self.close()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # It returns when the process continues.
        signal.signal(number, self._suspend)
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)


def _continuation(width: int, line_number: int, is_soft_wrap: int) -> str:
    return " " * width if is_soft_wrap else ".. ".rjust(width)


_keys = KeyBindings()


@_keys.add("enter")
def _send(event: KeyPressEvent) -> None:
    buffer = event.current_buffer
    if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
        buffer.delete_before_cursor()
        buffer.newline(copy_margin=False)
    else:
        buffer.validate_and_handle()


@_keys.add("escape", "enter")
def _begin_line(event: KeyPressEvent) -> None:
    event.current_buffer.newline(copy_margin=False)


class _History(FileHistory):
    """A history file whose errors, such as a full disk, are ignored."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            super().store_string(string)

    def load_history_strings(self) -> Iterable[str]:
        with contextlib.suppress(OSError):
            yield from super().load_history_strings()


class _CommandCompleter(Completer):
    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        from mlx_paged.cli.chat.commands import COMMANDS  # MLX with it, once the model is loaded

        typed = document.text_before_cursor
        if not typed.startswith("/") or "\n" in typed:
            return ()
        command, *words = typed.lower().split(" ")
        options: Iterable[str] = ()
        if not words:
            options = sorted(COMMANDS)
        elif command in COMMANDS and COMMANDS[command].argument == "FILE":
            path = Document(typed.partition(" ")[2])
            return PathCompleter(expanduser=True).get_completions(path, complete_event)
        elif command == "/set" and len(words) == 1:
            options = VARIABLES
        elif command == "/set" and len(words) == 2 and canonical_name(words[0]) in VARIABLES:
            options = VARIABLES[canonical_name(words[0])].choices or ()
        completer = WordCompleter(list(options), ignore_case=True, WORD=True)
        return completer.get_completions(document, complete_event)


def history_path(environ: Mapping[str, str]) -> Path | None:
    """The history file, which only its user may read; it is created if necessary. ``None`` if there
    is no home folder, or it can't be written to.
    """
    # Relative paths are ignored, as the XDG specification demands.
    state = environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
        file = folder / "mlx_paged" / "chat_history"
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(file, "a+b", opener=partial(os.open, mode=0o600)) as stream:
            os.fchmod(stream.fileno(), 0o600)
    except (OSError, RuntimeError):
        return None
    return file
