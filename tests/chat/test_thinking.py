"""Reasoning is told apart from the answer, whatever the pieces, and is dimmed or hidden."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.terminal import screen_lines

from mlx_paged.answers.dialect import PLAIN, AnswerFormat, Dialect
from mlx_paged.answers.formats import REASONING
from mlx_paged.answers.tokens import Piece, ReasoningSplitter
from mlx_paged.cli.chat.dialogue import Dialogue
from mlx_paged.cli.chat.program import Settings, setup_arg_parser
from mlx_paged.cli.chat.terminal import Reader, Screen

THOUGHT = [
    Piece("<think>17 < 25</think>", True),
    Piece("\n\n42, < 43", False),
]


SPELLED_OUT = AnswerFormat(Dialect(reasoning=REASONING[0]))


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind put together."""
    whole: list[Piece] = []
    for piece in pieces:
        if whole and whole[-1].is_reasoning == piece.is_reasoning:
            whole[-1] = Piece(whole[-1].text + piece.text, piece.is_reasoning)
        else:
            whole.append(piece)
    return whole


def split(
    texts: list[str], is_thinking: bool = False, answer_format: AnswerFormat = SPELLED_OUT
) -> list[Piece]:
    splitter = ReasoningSplitter(replace(answer_format, is_thinking=is_thinking))
    pieces = [piece for text in texts for piece in splitter.add(text)]
    return joined([*pieces, *splitter.finish()])


def test_reasoning_is_found_however_the_answer_is_cut_into_pieces():
    text = "".join(piece.text for piece in THOUGHT)
    assert split([text]) == THOUGHT
    assert split(list(text)) == THOUGHT
    for cut in range(len(text)):
        assert split([text[:cut], text[cut:]]) == THOUGHT


def test_reasoning_may_begin_in_the_prompt_and_may_never_end():
    assert split(["17 <", "/thi", "nk>42"], is_thinking=True) == [
        Piece("17 </think>", True),
        Piece("42", False),
    ]
    assert split(["<think>17 </thin"]) == [Piece("<think>17 </thin", True)]
    assert split(["42 <thin"]) == [Piece("42 <thin", False)]


def test_nothing_is_held_back_that_can_not_become_a_mark():
    splitter = ReasoningSplitter(SPELLED_OUT)
    assert splitter.add("a < b") == [Piece("a < b", False)]
    assert splitter.add("a <thi") == [Piece("a ", False)]


def test_marks_that_are_tokens_are_found_by_them_and_spelled_out_ones_are_text():
    tokens = {"<think>": (7, True), "</think>": (8, True)}
    dialect = Dialect.of_tokens(None, REASONING[0], tokens)
    splitter = ReasoningSplitter(AnswerFormat(dialect))
    said = [("Well. ", 1), ("<think>", 7), ("a </thi", 1), ("nk>", 2), ("</think>", 8), ("b", 3)]
    pieces = [piece for text, token in said for piece in splitter.add(text, token)]
    assert joined([*pieces, *splitter.finish()]) == [
        Piece("Well. ", False),
        Piece("<think>a </think></think>", True),
        Piece("b", False),
    ]


def test_a_model_without_reasoning_has_no_marks():
    assert split(["<think>", "x</think>"], answer_format=PLAIN) == [
        Piece("<think>x</think>", False)
    ]


def shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    *argv: str,
    is_terminal: bool,
    answer: str = "<think>17 + 25</think>\n\n42",
    environ: dict[str, str] | None = None,
) -> tuple[str, str]:
    """What stdout and stderr show of an answer with reasoning."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    screen = Screen({"TERM": "xterm"} if environ is None else environ)
    settings = Settings(setup_arg_parser().parse_args(list(argv)), {})

    def ask(*_: Any, **__: Any) -> Iterator[Any]:
        for letter in answer:
            yield SimpleNamespace(text=letter, token=1, finish_reason=None)

    monkeypatch.setattr(f"{Dialogue.__module__}.describe_answer", lambda *_: "[figures]")
    conversation: Any = SimpleNamespace(answer_format=SPELLED_OUT, tokens=[], ask=ask)
    assert Dialogue([conversation], settings, screen, Reader()).ask("17 + 25?") is False
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_reasoning_is_dim_on_a_terminal_that_shows_colours(monkeypatch, capsys):
    out, _ = shown(monkeypatch, capsys, is_terminal=True)
    assert screen_lines(out, 80) == ["<think>17 + 25</think>", "", "42"]
    assert "\x1b[2m<think>17 + 25</think>\x1b[0m\n" in out and "2m4" not in out
    plain = "<think>17 + 25</think>\n\n42\n"
    assert shown(monkeypatch, capsys, is_terminal=True, environ={"TERM": "dumb"})[0] == plain
    assert (
        shown(monkeypatch, capsys, is_terminal=True, environ={"TERM": "xterm", "NO_COLOR": "1"})[0]
        == plain
    )


def test_reasoning_goes_through_a_pipe_as_it_is(monkeypatch, capsys):
    through = shown(monkeypatch, capsys, is_terminal=False)
    assert through == ("<think>17 + 25</think>\n\n42\n", "[figures]\n")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_hidden_reasoning_leaves_the_answer_alone(monkeypatch, capsys, is_terminal: bool):
    out, err = shown(monkeypatch, capsys, "--hide-thinking", is_terminal=is_terminal)
    assert screen_lines(out, 80) == ["42"]
    # That something happens is seen where somebody looks.
    assert ("[thinking ...]" in err) is is_terminal


def test_a_model_can_not_move_the_cursor_of_a_terminal(monkeypatch, capsys):
    answer = "a\x1b]0;title\x07\r\x9b2J\tb"
    out, _ = shown(monkeypatch, capsys, is_terminal=True, answer=answer)
    assert screen_lines(out, 80) == ["a\\x1b]0;title\\x07\\r\\x9b2J       b"]
    assert shown(monkeypatch, capsys, is_terminal=False, answer=answer)[0] == answer + "\n"


def test_an_answer_that_fails_leaves_the_next_one_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    screen = Screen({"TERM": "xterm"})
    settings = Settings(setup_arg_parser().parse_args([]), {})

    def fail(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(text="The first", token=1)
        raise RuntimeError("the GPU is gone")

    conversation: Any = SimpleNamespace(answer_format=PLAIN, tokens=[], ask=fail)
    with pytest.raises(RuntimeError, match="gone"):
        Dialogue([conversation], settings, screen, Reader()).ask("hello")
    screen.warn("a warning")
    screen.answer("The second")
    screen.finish_answer()
    assert capsys.readouterr() == ("The first\nThe second\n", "a warning\n")
