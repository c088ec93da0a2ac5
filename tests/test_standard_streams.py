"""What a program says to its user on stderr."""

from __future__ import annotations

import warnings

import pytest

from mlx_paged.cli.streams import say, warnings_as_lines


def test_what_is_said_moves_no_cursor_and_sets_no_title(capsys: pytest.CaptureFixture):
    say("a\tb\n\x1b]0;title\x07\x9b2Jc\u2028\rd \u4f60\U0001f469\u200d\U0001f52c")
    assert capsys.readouterr().err == (
        "a\tb\n\\x1b]0;title\\x07\\x9b2Jc\\u2028\\rd \u4f60\U0001f469\u200d\U0001f52c\n"
    )


def test_a_warning_is_a_line_without_a_place_in_the_code():
    said: list[str] = []
    before = warnings.showwarning
    with warnings_as_lines(said.append):
        warnings.warn("[load] 4 tensors are\n quantised once more", stacklevel=1)
    assert said == ["[load] 4 tensors are quantised once more"]
    assert warnings.showwarning is before
