"""Record a chat that branches, and its restart: as an asciinema file, and as a picture of its text.

    python tools/record_chat.py            # docs/recordings/chat.cast and docs/images/chat.svg
    python tools/record_chat.py --folder OTHER

The programs are the real ones, on the bundled model, in a terminal of 90 columns that pyte keeps.
What they print is recorded as it came; keys are typed, and pauses made, at a pace of this script's.
The picture is what the terminal has shown from the first line to the last.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import pyte

ROOT = Path(__file__).parents[1]
COLUMNS, ROWS = 90, 28
PROMPT = ">>"
SHELL = "$ "
SECONDS_PER_KEY, SECONDS_BEFORE_KEYS, SECONDS_PER_OUTPUT = 0.04, 1.0, 0.05
SECONDS_TO_ANSWER = 120.0

FACTS = "The code of apple is 4821. The code of stone is 905. My name is Tom."
CHAT = "chat --cache-dir kv --kv-cache-bytes 256M"
# What is typed in each session: the arguments of mlx-paged, and then messages and commands.
SESSIONS = (
    (
        CHAT,
        f"{FACTS} What is the code of stone?",
        "/fork",
        "What is the code of apple?",
        "/back",
        "What is my name?",
        "/save talk.json",
        "/exit",
    ),
    (CHAT, "/load talk.json", "What is the code of apple?", "/exit"),
)


class Event(NamedTuple):
    """Text that the terminal gets, and seconds after the one before."""

    delay: float
    text: str


class Screen(pyte.HistoryScreen):
    """A terminal that answers what programs ask it, and keeps what has left it at the top."""

    def __init__(self, answer: Callable[[bytes], object] = lambda _: None):
        super().__init__(COLUMNS, ROWS, history=10_000, ratio=0.5)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        self._answer(data.encode())

    @property
    def line(self) -> str:
        """That of the cursor, up to it."""
        return self.display[self.cursor.y][: self.cursor.x].strip()

    def rows(self) -> list[dict[int, Any]]:
        """All that was shown, without empty lines at the end; cells by column."""
        kept = [*self.history.top, *(self.buffer[row] for row in range(self.lines))]
        while kept and not any(cell.data.strip() for cell in kept[-1].values()):
            kept.pop()
        return kept


def run_session(folder: Path, arguments: str, typed: Sequence[str]) -> Iterator[Event]:
    """What a terminal shows of ``mlx-paged`` and what is typed into it."""
    yield from _keys(f"mlx-paged {arguments}", shell=True)
    ours, theirs = pty.openpty()
    environment = {
        **os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS),
        "XDG_STATE_HOME": str(folder), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    environment.pop("NO_COLOR", None)
    subprocess.run(["stty", "rows", str(ROWS), "cols", str(COLUMNS)], stdin=theirs, check=True)
    program = subprocess.Popen(
        [sys.executable, "-m", "mlx_paged", *arguments.split()],
        cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    screen = Screen(lambda data: os.write(ours, data))
    stream = pyte.Stream(screen)
    try:
        for line in typed:
            yield from _read(ours, stream, until=lambda: screen.line == PROMPT)
            yield Event(SECONDS_BEFORE_KEYS, "")
            for key in line:
                os.write(ours, key.encode())
                shown = "".join(each.text for each in _read(ours, stream, until=None))
                yield Event(SECONDS_PER_KEY, shown)
            os.write(ours, b"\r")
        yield from _read(ours, stream, until=lambda: program.poll() is not None)
    finally:
        program.kill()
        program.wait()
        os.close(ours)


def _read(file: int, stream: pyte.Stream, until: Callable[[], bool] | None) -> Iterator[Event]:
    """What a program prints until this holds and it prints nothing more; ``None`` is one key."""
    end = time.monotonic() + SECONDS_TO_ANSWER
    while True:
        if not select.select([file], [], [], 0.02 if until is None else 0.2)[0]:
            if until is None or until():
                return
            if time.monotonic() > end:
                raise SystemExit(f"record_chat.py: nothing more came in {SECONDS_TO_ANSWER:g} s")
            continue
        try:
            text = os.read(file, 65536).decode(errors="replace")
        except OSError:  # The program has ended.
            return
        stream.feed(text)
        yield Event(SECONDS_PER_OUTPUT, text)


def _keys(text: str, shell: bool = False) -> Iterator[Event]:
    yield Event(SECONDS_BEFORE_KEYS, SHELL if shell else "")
    for key in text:
        yield Event(SECONDS_PER_KEY, key)
    yield Event(SECONDS_PER_OUTPUT, "\r\n")


def record(folder: Path) -> list[Event]:
    """Run the sessions in a folder, whose name they show."""
    folder.mkdir()
    try:
        sessions = (run_session(folder, arguments, typed) for arguments, *typed in SESSIONS)
        return [event for events in sessions for event in events]
    finally:
        shutil.rmtree(folder)


def as_cast(events: Sequence[Event]) -> str:
    """The text of an asciicast, version 2."""
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "mlx-paged chat"}
    lines, now = [json.dumps(header)], 0.0
    for event in events:
        now += event.delay
        if event.text:
            lines.append(json.dumps([round(now, 2), "o", event.text]))
    return "\n".join(lines) + "\n"


def read_cast(text: str) -> list[str]:
    """The texts of an asciicast."""
    return [json.loads(line)[2] for line in text.splitlines()[1:]]


def played(texts: Sequence[str]) -> Screen:
    """A terminal that has got these texts."""
    screen = Screen()
    stream = pyte.Stream(screen)
    for text in texts:
        stream.feed(text)
    return screen


# The picture

COLOURS = {
    "default": "#1f2328", "black": "#1f2328", "red": "#b34700", "green": "#007a5a",
    "brown": "#7a5a00", "blue": "#0072b2", "magenta": "#8250a0", "cyan": "#0b6e8a",
    "white": "#6e7781",
}  # fmt: skip
FAINT = "#6e7781"
CHARACTER, LINE, MARGIN = 8.0, 18, 14


def as_svg(texts: Sequence[str]) -> str:
    """All that these texts showed, as a picture whose text can be selected."""
    rows = played(texts).rows()
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, len(rows) * LINE + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" '
        'font-size="13">',
        f'<rect width="100%" height="100%" rx="8" fill="#ffffff" stroke="{FAINT}"/>',
    ]
    for number, row in enumerate(rows):
        y = MARGIN + (number + 0.75) * LINE
        lines += [
            f'<text x="{MARGIN + start * CHARACTER:g}" y="{y:g}" xml:space="preserve" '
            f'textLength="{len(text) * CHARACTER:g}"{style}>{escape(text, quote=False)}</text>'
            for start, text, style in _pieces(row)
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _pieces(row: dict[int, Any]) -> Iterator[tuple[int, str, str]]:
    """Texts of one style with the column that they begin in."""
    start, text, style = 0, "", ""
    for column in range(COLUMNS + 1):
        cell = row[column] if column < COLUMNS else None
        own = "" if cell is None else _style(cell)
        if text and (cell is None or own != style):
            if text.strip():
                yield start, text.rstrip(), style
            text = ""
        if cell is not None:
            if not text:
                start, style = column, own
            text += cell.data


def _style(cell: Any) -> str:
    colour = COLOURS.get(cell.fg.removeprefix("bright"), f"#{cell.fg}")
    return f' fill="{colour}"' + (' font-weight="bold"' if cell.bold else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    parser.add_argument("--run-in", type=Path, default=Path("/tmp/mlx-paged"), help="a new folder")
    args = parser.parse_args()
    cast = as_cast(record(args.run_in))
    for name, text in (
        ("recordings/chat.cast", cast),
        ("images/chat.svg", as_svg(read_cast(cast))),
    ):
        path = args.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
