"""The recording of a chat that the docs show: it is made of the real programs, and the picture
is what was recorded.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pyte", reason="a recording needs pyte, which the extra test brings")

import record_chat

DOCS = Path(__file__).parents[1] / "docs"


def shown(cast: str) -> list[str]:
    """The lines that a terminal shows of a recording, first to last."""
    screen = record_chat.played(record_chat.read_cast(cast))
    return ["".join(cell.data for _, cell in sorted(row.items())).rstrip() for row in screen.rows()]


def check_session(cast: str) -> None:
    lines = shown(cast)
    text = " ".join(lines)
    assert [line for line in lines if line.startswith(record_chat.SHELL)] == [
        f"{record_chat.SHELL}mlx-paged {record_chat.CHAT}"
    ] * 2
    stone, apple, name = (
        "The code of stone is 905.",
        "The code of apple is 4821.",
        "Your name is Tom.",
    )
    answers = [line for line in lines if line in (stone, apple, name)]
    assert answers == [stone, apple, name, apple]
    first, second = text.split(f"{record_chat.SHELL}mlx-paged")[1:]
    assert "branch 1 of the conversation" in first and "loaded from" in second
    assert "0 of 48 prompt tokens" in first and "80 of 108 prompt tokens" in second
    assert "rror" not in text and "WARNING" not in text and "/home/" not in text


def test_the_recording_of_the_docs_is_whole_and_its_picture_the_same():
    # After a change of what the chat shows: python tools/record_chat.py
    cast = (DOCS / "recordings" / "chat.cast").read_text(encoding="utf-8")
    assert json.loads(cast.splitlines()[0])["version"] == 2
    check_session(cast)
    svg = (DOCS / "images" / "chat.svg").read_text(encoding="utf-8")
    assert svg == record_chat.as_svg(record_chat.read_cast(cast))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_recording_runs_the_chat_and_its_restart(tmp_path):
    check_session(record_chat.as_cast(record_chat.record(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_picture_shows_what_has_left_the_screen_and_escapes_it():
    texts = [f"line {number}\r\n" for number in range(40)] + ["a < b & \x1b[1;31mc\x1b[0m\r\n\r\n"]
    svg = record_chat.as_svg(texts)
    assert svg.count("<text ") == 42
    assert ">line 0</text>" in svg and ">line 39</text>" in svg
    assert ">a &lt; b &amp;</text>" in svg
    assert f'fill="{record_chat.COLOURS["red"]}" font-weight="bold">c</text>' in svg
