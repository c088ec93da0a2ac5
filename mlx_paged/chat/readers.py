"""Where the user's messages come from: a terminal with editing, history and Tab, or a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlx_paged.chat.screen import Screen, is_terminal
from mlx_paged.standard_streams import read_line

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = ">> "

# The words that may follow a text which was typed so far, or "path" where a file name does.
Completions = Callable[[str], Iterable[str]]


class Reader(Protocol):
    """Reads one message after the other.

    Attributes:
        is_interactive: a person is there, who sees a prompt and can edit a text.
    """

    is_interactive: bool

    def read(self, text: str = "") -> str | None:
        """The next message, ``None`` at the end of the input; ``text`` is there to be edited."""


class PipeReader:
    """Each line of stdin is a message; its line end is not part of it."""

    is_interactive = False

    def read(self, text: str = "") -> str | None:
        line = read_line()
        return without_line_end(clean(line)) if line else None


class TerminalReader:
    """A person at a terminal: several lines in one message, pasted or typed, history, Tab.

    Args:
        completions: what Tab offers.
        screen: knows what the terminal can show.
        history_file: keeps what was sent, over sessions; ``None`` keeps it for this one.
    """

    is_interactive = True

    def __init__(self, completions: Completions, screen: Screen, history_file: Path | None):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import ColorDepth, create_output
        from prompt_toolkit.shortcuts import CompleteStyle

        # The answer goes to stdout, so the prompt goes to stderr where both are terminals. On a
        # terminal that can't move its cursor, prompt_toolkit has a prompt of its own, which it
        # takes only without an output given.
        stream = sys.stderr if screen.stderr_is_terminal else sys.stdout
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=_continuation,
            key_bindings=_key_bindings(),
            history=_history(history_file),
            completer=_completer(completions),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
            color_depth=None if screen.has_colour else ColorDepth.DEPTH_1_BIT,
            output=create_output(stream) if screen.can_move else None,
        )

    def read(self, text: str = "") -> str | None:
        try:
            return clean(self._session.prompt(default=text))
        except EOFError:
            return None


def make_reader(completions: Completions, screen: Screen) -> Reader:
    """The reader for this program's stdin."""
    if is_terminal(sys.stdin) and (screen.stderr_is_terminal or screen.stdout_is_terminal):
        return TerminalReader(completions, screen, history_path(os.environ))
    return PipeReader()


def history_path(environ: Mapping[str, str]) -> Path | None:
    """The file of the history, made if it is not there, which only its user may read.

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


def clean(text: str) -> str:
    """Text that a tokenizer can encode: bytes that were no UTF-8, which Python hands over as lone
    surrogates, are replaced.
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _continuation(width: int, line_number: int, is_soft_wrap: int) -> str:
    return " " * width if is_soft_wrap else ".. ".rjust(width)


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings


def _history(file: Path | None) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class SafeFileHistory(FileHistory):
        """A history whose disk may be full: what can't be kept is not kept."""

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError, UnicodeError):
                super().store_string(string)

        def load_history_strings(self) -> Iterable[str]:
            with contextlib.suppress(OSError):
                yield from super().load_history_strings()

    return InMemoryHistory() if file is None else SafeFileHistory(str(file))


def _completer(completions: Completions) -> Completer:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class CommandCompleter(Completer):
        def get_completions(self, document: Document, complete_event: Any) -> Iterator[Completion]:
            typed = document.text_before_cursor
            if not typed.startswith("/") or "\n" in typed:
                return
            word = typed.rpartition(" ")[2]
            for offered in completions(typed):
                if offered == "path":
                    name = typed.partition(" ")[2]
                    yield from paths.get_completions(Document(name, len(name)), complete_event)
                elif offered.startswith(word.lower()):
                    yield Completion(offered, start_position=-len(word))

    return CommandCompleter()
