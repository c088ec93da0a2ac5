"""What a person at a terminal can do: paste, write several lines, go back in the history, Tab,
edit.
"""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from helpers.terminal import ESCAPE_ENTER, TAB, UP, Terminal, dialogue, saved_messages

from mlx_paged.chat.line_editor import history_path


def user_texts(file: Path) -> list[str]:
    return [m["content"] for m in saved_messages(file) if m["role"] == "user"]


@pytest.mark.slow
def test_a_pasted_text_of_many_lines_is_one_message(tmp_path: Path):
    with dialogue(tmp_path) as terminal:
        terminal.paste("hello\nhow are\nyou")
        terminal.send("")
        terminal.send(f"/save {tmp_path}/saved.json")
    assert user_texts(tmp_path / "saved.json") == ["hello\nhow are\nyou"]


@pytest.mark.slow
def test_a_message_is_written_over_several_lines_with_a_backslash_or_alt_enter(tmp_path: Path):
    with dialogue(tmp_path) as terminal:
        terminal.send(f"hello\\\rhow are{ESCAPE_ENTER}you")
        terminal.send(f"/save {tmp_path}/saved.json")
    assert user_texts(tmp_path / "saved.json") == ["hello\nhow are\nyou"]


@pytest.mark.slow
def test_the_history_is_kept_over_sessions_and_is_the_users_alone(tmp_path: Path):
    for keys in ("hello", UP):
        with dialogue(tmp_path) as terminal:
            assert "Hello! How can I help you?" in terminal.send(keys)
    file = tmp_path / "mlx_paged" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@pytest.mark.slow
def test_tab_completes_commands_and_settings(tmp_path: Path):
    with dialogue(tmp_path) as terminal:
        assert "/regenerate" in terminal.send(f"/he{TAB}")
        assert "[thinking hide]" in terminal.send(f"/set thi{TAB} hi{TAB}")


@pytest.mark.slow
def test_edit_offers_the_last_message_and_asks_it_again(tmp_path: Path):
    with dialogue(tmp_path) as terminal:
        terminal.send("My name is Tom.")
        terminal.send("/edit")
        terminal.send("\x7f\x7f\x7f\x7fAnn.")  # over "Tom."
        assert "Your name is Ann." in terminal.send("What is my name?")
        terminal.send(f"/save {tmp_path}/saved.json")
    assert user_texts(tmp_path / "saved.json") == ["My name is Ann.", "What is my name?"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("term", "environ", "is_dim"),
    [("xterm", {}, True), ("dumb", {}, False), ("xterm", {"NO_COLOR": "1"}, False)],
)
def test_figures_are_dim_on_a_terminal_that_shows_colours(
    tmp_path: Path, term: str, environ: dict, is_dim: bool
):
    terminal = Terminal("hello", state=tmp_path, term=term, environ=environ)
    shown = terminal.wait_for("K/V in use]")
    assert terminal.close() == 0
    assert ("\x1b[2m[" in shown, "m[" in shown) == (is_dim, is_dim)


@pytest.mark.slow
def test_a_history_that_can_not_be_kept_hinders_nobody(tmp_path: Path):
    (tmp_path / "mlx_paged").write_text("in the way")
    assert history_path({"XDG_STATE_HOME": str(tmp_path)}) is None
    with dialogue(tmp_path) as terminal:
        assert "Hello!" in terminal.send("hello")


def test_a_history_file_that_others_could_read_is_closed_to_them(tmp_path: Path):
    file = tmp_path / "mlx_paged" / "chat_history"
    file.parent.mkdir()
    file.write_text("# old\n+hello\n")
    file.chmod(0o644)
    assert history_path({"XDG_STATE_HOME": str(tmp_path)}) == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and "hello" in file.read_text()


def test_a_state_home_that_is_no_absolute_path_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "here"):
        assert (
            history_path({"XDG_STATE_HOME": value})
            == tmp_path / ".local/state/mlx_paged/chat_history"
        )
