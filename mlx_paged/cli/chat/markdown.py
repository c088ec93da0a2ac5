"""Draws an answer as markdown on a terminal: finished blocks are printed once, and the last one is
redrawn as it grows.

Imported only for such a terminal: rich's markdown takes 50 ms.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from itertools import chain, takewhile
from os import terminal_size

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.cells import chop_cells
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, TableElement
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

# Attributes, and the only one of the eight colours that is legible on black and on white.
_STYLES = {
    "bold": "h2 h3 h4 h5 h6 item.bullet item.number table.header",
    "bold underline": "h1",
    "magenta": "code",
    "italic": "block_quote",
    "underline": "link",
    "dim": "hr table.border",
    "none": "code_block link_url",
}
_THEME = Theme(
    {f"markdown.{name}": style for style, names in _STYLES.items() for name in names.split()}
)
_CODE = ANSISyntaxTheme(
    {
        ("Comment",): Style(dim=True),
        **dict.fromkeys((("Keyword",), ("Name", "Function")), Style(bold=True)),
        **dict.fromkeys((("Literal", "Number"), ("Literal", "String")), Style(color="magenta")),
    }
)
# Text that markdown would drop is shown as it is: tags, as in List<int>, the backslashes of
# formulas, and the addresses of images and of links in angle brackets.
_PARSER = MarkdownIt("commonmark").enable(["strikethrough", "table"])
_PARSER.disable(["autolink", "escape", "html_block", "html_inline", "image"])
_MIN_PAUSE = 0.03  # seconds between two drawings, which take at most a tenth of the time
_STYLED_NOTHING = re.compile(r"\x1b\[[\d;]+m\x1b\[0m")
_TRAILING_BLANKS = re.compile(r" +((?:\x1b\[0m)?)$", re.MULTILINE)


class MarkdownWriter:
    """Writes one answer. The cursor is always at the start of the line below it.

    rich's ``Live`` is not used: it loses the lines of a block that is taller than the screen, hides
    the cursor and draws in a thread.

    Args:
        write: to the terminal.
        size: of the terminal.
        clock: in seconds.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        size: Callable[[], terminal_size],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._write, self._size, self._clock = write, size, clock
        self._text, self._is_thinking = "", False  # of what is not finished
        self._lines: list[str] = []  # of that, as they are drawn
        self._is_first, self._follows_thinking = True, False
        self._next_drawing = 0.0
        self._console = Console(
            color_system="standard", force_terminal=True, theme=_THEME, highlight=False
        )

    @property
    def is_in_block(self) -> bool:
        """Whether the screen shows lines that may be redrawn."""
        return bool(self._lines)

    def add(self, text: str, is_thinking: bool = False) -> None:
        """The next piece of the answer, or of the reasoning before it."""
        if is_thinking != self._is_thinking:
            self.finish()
            self._is_thinking = is_thinking
        self._text += text
        if "\n" in text:
            self._finish_blocks()
        # A long block takes long to draw, which must not delay the engine.
        begin = self._clock()
        if begin >= self._next_drawing:
            self._draw(self._lines_of(self._text))
            end = self._clock()
            self._next_drawing = end + max(_MIN_PAUSE, 9 * (end - begin))

    def finish(self) -> None:
        """End the answer, or its reasoning."""
        self._finish(len(self._text))

    def _finish_blocks(self) -> None:
        # Only complete lines are parsed, so that the result does not depend on the pieces.
        whole = self._text[: self._text.rindex("\n") + 1]
        if self._is_thinking:
            self._finish(len(whole))
            return
        blocks = [each for each in _PARSER.parse(whole) if not each.level and each.nesting >= 0]
        if len(blocks) > 1 and blocks[-1].map:
            lines = whole.splitlines(keepends=True)
            self._finish(len("".join(lines[: blocks[-1].map[0]])))

    def _finish(self, length: int) -> None:
        """Draw the first characters for the last time."""
        done = self._lines_of(self._text[:length])
        if self._lines[: len(done)] != done:
            self._draw(done)
        self._lines = self._lines[len(done) :]
        self._text = self._text[length:]
        if done:
            self._is_first, self._follows_thinking = False, self._is_thinking

    def _draw(self, lines: list[str]) -> None:
        """Replace the lines of the unfinished block on the screen by these."""
        pairs = zip(self._lines, lines, strict=False)
        num_same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        columns, rows = self._size()
        up, first = 0, len(self._lines)
        while first > num_same:
            # A terminal that was made narrower has wrapped the lines that are longer. xterm cuts
            # them instead, which can't be told apart.
            text = Text.from_ansi(self._lines[first - 1]).plain
            num_rows = max(1, len(chop_cells(text, columns)))
            if up + num_rows > rows - 1:
                break  # The line has left the screen, and stays as it was.
            up, first = up + num_rows, first - 1
        if up or lines[first:]:
            begin = f"\x1b[{up}A\x1b[J" if up else ""
            self._write(begin + "".join(f"{line}\n" for line in lines[first:]))
        self._lines = lines

    def _lines_of(self, text: str) -> list[str]:
        """A part of the answer as lines of the terminal, with an empty line before each block but
        the answer's first.
        """
        self._console.width = max(self._size().columns - 1, 1)
        if self._is_thinking:
            each_line = text.removesuffix("\n").split("\n") if text else []
            rendered = [self._rendered(Text(line, "dim")) or [""] for line in each_line]
            blocks = [list(chain.from_iterable(rendered))]
        else:
            blocks = [self._rendered(block) for block in _blocks_of(text)]
        lines = list(chain.from_iterable(["", *block] for block in blocks if block))
        follows = not self._is_first and not (self._is_thinking and self._follows_thinking)
        return lines if follows else lines[1:]

    def _rendered(self, what: RenderableType) -> list[str]:
        with self._console.capture() as capture:
            self._console.print(what)
        text = _STYLED_NOTHING.sub("", _TRAILING_BLANKS.sub(r"\1", capture.get()))
        return text.strip("\n").split("\n") if text.strip() else []


def _blocks_of(text: str) -> Iterator[Markdown]:
    """The blocks of a text. Each is drawn separately, so that the result does not depend on how
    many are drawn together.
    """
    block: list[Token] = []
    for token in _PARSER.parse(text):
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"  # keep line breaks, as of addresses and poems
        block.append(token)
        if not token.level and token.nesting <= 0:
            markdown = _Markdown("", hyperlinks=False)
            markdown.parsed = block
            yield markdown
            block = []


class _Heading(Heading):
    """Left-aligned, without a frame."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _CodeBlock(CodeBlock):
    """Without a background and padding, so that it can be copied."""

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> _CodeBlock:
        return cls(token.info.partition(" ")[0] or "text", "")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = Syntax("", self.lexer_name, theme=_CODE).highlight(str(self.text))
        code.rstrip()
        code.no_wrap = False  # rich would cut off what is longer than a line.
        yield code


class _Table(TableElement):
    """Long words are folded, where rich would cut them off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            assert isinstance(table, Table)
            for column in table.columns:
                column.overflow = "fold"
            yield table


class _Markdown(Markdown):
    elements = Markdown.elements | {
        "heading_open": _Heading,
        "fence": _CodeBlock,
        "code_block": _CodeBlock,
        "table_open": _Table,
    }
