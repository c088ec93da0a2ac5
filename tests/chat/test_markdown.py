"""An answer as markdown on a terminal: whole screens, however it comes and whatever the size."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from itertools import count

import pytest
from helpers.terminal import ScreenThatReflows, screen_lines

from mlx_paged.cli.chat.markdown import MarkdownWriter

ANSWER = """\
# A *short* plan

Call `List<int>` with **care**, as \\( x_1 \\) says,
not before. See [the docs](https://example.org/x) or <https://b.org>.

- the first thing, which is longer than a line of a narrow terminal
- the second
  - and a part of it

3. three

4. four

```python
def area(r):
    return 3.14 * r**2  # of a circle
```

> quoted

Done."""

AT_40 = """\
A short plan

Call List<int> with care, as \\( x_1 \\)
says,
not before. See the docs
(https://example.org/x) or
<https://b.org>.

 • the first thing, which is longer
   than a line of a narrow terminal
 • the second
    • and a part of it

 3 three
 4 four

def area(r):
    return 3.14 * r**2  # of a circle

▌ quoted

Done."""

AT_80 = """\
A short plan

Call List<int> with care, as \\( x_1 \\) says,
not before. See the docs (https://example.org/x) or <https://b.org>.

 • the first thing, which is longer than a line of a narrow terminal
 • the second
    • and a part of it

 3 three
 4 four

def area(r):
    return 3.14 * r**2  # of a circle

▌ quoted

Done."""


class Written(list[str]):
    """What a writer has written."""

    def __init__(self, pieces: Iterable[tuple[str, bool]], columns: int, rows: int = 24):
        size = os.terminal_size((columns, rows))
        # Each piece comes a second after the one before, and nothing takes time to draw.
        clock = (float(reading // 2) for reading in count())
        writer = MarkdownWriter(self.append, lambda: size, clock=clock.__next__)
        for text, is_thinking in pieces:
            writer.add(text, is_thinking)
        writer.finish()


def answer(*pieces: str) -> list[tuple[str, bool]]:
    return [(piece, False) for piece in pieces]


@pytest.mark.parametrize(("columns", "screen"), [(40, AT_40), (80, AT_80), (120, AT_80)])
@pytest.mark.parametrize("pieces", ["whole", "lines", "letters", "letters after lines"])
def test_an_answer_is_drawn_the_same_however_it_comes(columns: int, screen: str, pieces: str):
    cut = {
        "whole": [ANSWER],
        "lines": ANSWER.splitlines(keepends=True),
        "letters": ANSWER,
        "letters after lines": re.findall(r"\n*.", ANSWER),
    }[pieces]
    written = Written(answer(*cut), columns)
    assert screen_lines("".join(written), columns) == screen.split("\n")


@pytest.mark.parametrize("rows", [3, 5, 24])
def test_a_block_that_is_taller_than_the_screen_loses_no_line(rows: int):
    code = "\n".join(f"line {number}" for number in range(30))
    written = Written(answer(*f"Look:\n\n```\n{code}\n```\n\nThat is all."), 40, rows)
    expected = ["Look:", "", *code.split("\n"), "", "That is all."]
    assert screen_lines("".join(written), 40, rows) == expected


@pytest.mark.parametrize("columns", [16, 20, 40, 80, 120])
def test_an_answer_that_is_wider_than_the_screen_loses_no_character(columns: int):
    code = "value = function(first_argument, second_argument)  # a remark of some length"
    row = ["internationalisation_of_names", "https://example.org/a/long/path", "1234567890" * 3]
    header = ["a", "configuration", "c"]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * 3, row))
    word = "supercalifragilisticexpialidocious" * 4
    written = Written(answer(f"```python\n{code}\n```\n\n{table}\n\n{word}\n"), columns, rows=99)
    drawn = "".join(screen_lines("".join(written), columns, rows=99))
    expected = "".join([code, *header, *row, word])
    assert Counter(re.findall(r"\w", drawn)) == Counter(re.findall(r"\w", expected))


def test_a_table_that_is_taller_than_the_screen_shows_each_row_once():
    """Its last row makes the first column wider when the other rows have left the screen."""
    rows = [f"| {number} | x |\n" for number in range(100, 130)]
    pieces = answer("| n | m |\n|---|---|\n", *rows, "| a wide cell | x |\n", "\nDone.")
    lines = screen_lines("".join(Written(pieces, 40, rows=5)), 40, rows=5)
    numbers = [line.split()[0] for line in lines if line.split() and line.split()[0].isdecimal()]
    assert numbers == [str(number) for number in range(100, 130)]
    assert [line.split() for line in lines if "wide" in line] == [["a", "wide", "cell", "x"]]


@pytest.mark.parametrize("columns", [20, 40, 120])
@pytest.mark.parametrize("rows", [6, 24])
@pytest.mark.parametrize(
    "block",
    [
        "And one more line of more than forty columns, whose end is not there y",
        "- one that is longer than the narrow terminal has columns\n- two\n- thre",
        "模型模型模型模型模型模型模型模型模型模型模型模型模型模型模型模型模型模",
    ],
)
def test_a_terminal_that_is_resized_during_an_answer_has_no_stray_lines(
    columns: int, rows: int, block: str
):
    screen, sizes = ScreenThatReflows(80, rows), [os.terminal_size((80, rows))]
    clock = (float(reading // 2) for reading in count())
    writer = MarkdownWriter(screen.feed, lambda: sizes[-1], clock.__next__)
    writer.add("One line of more than forty columns, and no less than that.\n\nTwo.\n\n")
    writer.add(block)
    sizes.append(os.terminal_size((columns, rows)))
    screen.resize(columns, rows)
    finished = screen.lines()[: screen.lines().index("Two.") + 1]
    writer.add("et.")
    writer.finish()
    unfinished = screen_lines("".join(Written(answer(f"{block}et."), columns)), columns)
    assert screen.lines() == [*finished, "", *unfinished]


def test_a_finished_block_is_not_written_again():
    written = Written(answer("First.\n\n", "Sec", "ond.\n\n", "Third."), 40)
    assert written == [
        "First.\n",
        "\nSec\n",
        "\x1b[1A\x1b[JSecond.\n",
        "\nThird.\n",
    ]


def test_only_the_lines_that_change_are_written_again():
    written = Written(answer("```\none\ntwo\n", "three", "!\n"), 40)
    assert written == ["one\ntwo\n", "three\n", "\x1b[1A\x1b[Jthree!\n"]


def test_reasoning_is_dim_text_in_its_own_lines_and_no_markdown():
    thought = "<think>\n**Hm**, this is a thought of more than forty columns.\n\n- so\n</think>"
    pieces = [*((letter, True) for letter in thought), *answer("\n\n", "**42**")]
    written = Written(pieces, 40)
    assert screen_lines("".join(written), 40) == [
        "<think>",
        "**Hm**, this is a thought of more than",
        "forty columns.",
        "",
        "- so",
        "</think>",
        "",
        "42",
    ]
    assert "\x1b[2m- so\x1b[0m" in "".join(written)
    assert screen_lines("".join(Written([(thought, True)], 40)), 40)[:4] == [
        "<think>",
        "**Hm**, this is a thought of more than",
        "forty columns.",
        "",
    ]


def test_a_table_has_columns_and_one_empty_line_around_it():
    written = Written(answer("Look:\n\n| n | square |\n|---|-----:|\n| 3 | `9` |\n\nDone."), 40)
    first, *table, last = screen_lines("".join(written), 40)
    # How its lines are drawn is up to the version of rich.
    assert (first, last) == ("Look:", "Done.")
    assert [row.strip(" ─━").split() for row in table] == [
        *([], ["n", "square"]),
        *([], ["3", "9"]),
        [],
    ]


def test_colours_can_be_read_on_black_and_on_white():
    """None but magenta, and no background."""
    codes = "".join(Written(answer(ANSWER), 80))
    styles = {style for part in codes.split("\x1b[")[1:] for style in part.split("m")[0].split(";")}
    assert styles <= {"0", "1", "2", "3", "4", "35"}


def test_words_longer_than_a_line_and_wide_characters_are_folded():
    word = "https://example.org/" + "x" * 40
    written = Written(answer(*f"See {word} 模型模型模型模型模型模型模型模型模型模型"), 40)
    lines = screen_lines("".join(written), 40)
    assert "".join(lines).replace(" ", "") == f"See{word}" + "模型" * 10


def test_an_answer_of_nothing_writes_nothing():
    assert Written(answer("", "\n", " \n\n"), 40) == []


def test_drawing_takes_a_tenth_of_the_time_at_most():
    size, written = os.terminal_size((40, 24)), list[str]()
    # A drawing takes 2 seconds; pieces come at 0, 10, 21 and 22.
    clock = iter((0.0, 2.0, 10.0, 21.0, 23.0, 23.5))
    writer = MarkdownWriter(written.append, lambda: size, clock.__next__)
    for word in ("one ", "two ", "three ", "four"):
        writer.add(word)
    assert written == ["one\n", "\x1b[1A\x1b[Jone two three\n"]
    writer.finish()
    assert written[2:] == ["\x1b[1A\x1b[Jone two three four\n"]
