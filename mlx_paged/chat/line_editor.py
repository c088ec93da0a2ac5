"""A person at a terminal: several lines in one message, pasted or typed, history, Tab. What is
typed while an answer comes is not shown, and stays for the next message.

Imported only where there is one: prompt_toolkit takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, create_output
from prompt_toolkit.shortcuts import CompleteStyle, confirm

from mlx_paged.chat.terminal import Screen, clean

PROMPT = ">> "
# The words that may follow a text which was typed so far, or "path" where a file name does.
Completions = Callable[[str], Iterable[str]]


class LineEditor:
    """Reads messages that are typed; a :class:`Reader`.

    Args:
        completions: what Tab offers.
        screen: knows what the terminal can show.
        history_file: keeps what was sent, over sessions; ``None`` keeps it for this one.
    """

    is_interactive = True

    def __init__(self, completions: Completions, screen: Screen, history_file: Path | None):
        # The answer goes to stdout, so the prompt goes to stderr where both are terminals. For
        # terminals that can't move their cursor, prompt_toolkit has a prompt which writes keys one
        # after the other; it takes that where TERM says so, and only without an output given.
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
            completer=_CommandCompleter(completions),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
            color_depth=None if screen.has_colour else ColorDepth.DEPTH_1_BIT,
            output=self._output,
        )
        self._mode = termios.tcgetattr(sys.stdin)
        # prompt_toolkit puts the terminal into a mode of its own for as long as it reads. Between
        # its prompts keys are neither shown nor joined to lines, and Ctrl-C is still a signal, one
        # that does not throw them away.
        iflag, oflag, cflag, lflag, *rest = self._mode
        lflag = lflag & ~(termios.ECHO | termios.ICANON | termios.IEXTEN) | termios.NOFLSH
        quiet = [iflag & ~termios.ICRNL, oflag, cflag, lflag, *rest]
        termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGTSTP, self._suspend)

    def read(self, text: str = "") -> str | None:
        try:
            return clean(self._session.prompt(default=text))
        except EOFError:
            return None

    def confirm(self, question: str) -> bool:
        try:
            with create_app_session(output=self._output):
                return confirm(question)
        except EOFError:
            return False

    def close(self) -> None:
        with contextlib.suppress(termios.error):  # it has hung up
            termios.tcsetattr(sys.stdin, termios.TCSANOW, self._mode)

    def _end(self, number: int, frame: object) -> None:
        """Leave the terminal as it was found, and end as the signal does by itself."""
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
    """A history whose disk may be full: what can't be kept is not kept."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            super().store_string(string)

    def load_history_strings(self) -> Iterable[str]:
        with contextlib.suppress(OSError):
            yield from super().load_history_strings()


class _CommandCompleter(Completer):
    def __init__(self, completions: Completions):
        self._completions = completions
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        typed = document.text_before_cursor
        if not typed.startswith("/") or "\n" in typed:
            return
        word = typed.rpartition(" ")[2]
        for offered in self._completions(typed):
            if offered == "path":
                name = typed.partition(" ")[2]
                yield from self._paths.get_completions(Document(name, len(name)), complete_event)
            elif offered.startswith(word.lower()):
                yield Completion(offered, start_position=-len(word))


def history_path(environ: Mapping[str, str]) -> Path | None:
    """The file of the prompt's history, made if it is not there, which only its user may read.

    ``None`` where there is no place for it: no home, or one that can't be written to.
    """
    # The XDG specification says to ignore a path that is not absolute.
    state = environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
        folder = folder / "mlx_paged"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = folder / "chat_history"
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError):
        return None
    return file
