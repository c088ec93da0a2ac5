"""What a person at a terminal can do: paste, write several lines, go back in the history, Tab,
edit, type ahead; and what it shows, whole screens of it.
"""

from __future__ import annotations

import re
import shlex
import signal
import stat
import sys
import termios
import time
from pathlib import Path

import pytest
from helpers.terminal import (
    CTRL_C,
    CTRL_D,
    ESCAPE_ENTER,
    READY,
    TAB,
    UP,
    Terminal,
    dialogue,
    plain,
    saved_messages,
    screen_lines,
)

from mlx_paged.cli.chat.line_editor import history_path


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


# What it shows

# The chat with an answer of markdown, in which the first one waits for six keys.
ANSWERS = """
import fcntl, struct, sys, termios, time
from dataclasses import replace
from mlx_paged.chat import main
from mlx_paged.cli.chat import conversation
real, num_answers = conversation.stream_request, 0
def stream(*arguments, **options):
    global num_answers
    num_answers += 1
    *_, last = real(*arguments, **options)
    yield replace(last, text="# A plan\\n\\nFirst **wait**, then read the next line of ")
    while num_answers == 1 and fcntl.ioctl(0, termios.FIONREAD, bytes(4)) < struct.pack("i", 6):
        time.sleep(0.01)
    yield replace(last, text="this *whole* answer.\\n")
conversation.stream_request = stream
sys.exit(main(sys.argv[1:]))
"""
AT_40 = """\
[start]
>> hello
A plan

First wait, then read the next line of
this whole answer.
[figures]
>> again
A plan

First wait, then read the next line of
this whole answer.
[figures]
>>"""
AT_80 = AT_40.replace("line of\nthis", "line of this")
AS_TEXT = """\
[start]
>> hello
# A plan

First **wait**, then read the next line of this *whole* answer.

[figures]
>> again
# A plan

First **wait**, then read the next line of this *whole* answer.

[figures]
>>"""


def typed_ahead(*argv: str, state: Path, columns: int) -> str:
    """What the terminal was sent: a message, and a second one that was typed during the answer to
    it.
    """
    terminal = Terminal(
        *argv, state=state, columns=columns, command=[sys.executable, "-c", ANSWERS]
    )
    terminal.wait_for(">> " if "--plain" in argv else READY)
    terminal.type("hello\r")
    terminal.wait_for("wait")
    terminal.type("again\r")
    # To the prompt after the second answer.
    terminal.wait_for(lambda text: re.search(r"use\].*use\].*>>", text, re.DOTALL) is not None)
    terminal.type(CTRL_D)
    assert terminal.process.wait() == 0
    assert termios.tcgetattr(terminal.master)[3] & termios.ECHO
    assert terminal.close() == 0
    return terminal.seen


def in_short(lines: list[str]) -> tuple[str, str]:
    """The line before the first message; and all lines without that and the figures."""
    text = "\n".join(lines)
    start = re.search(r"^\[.*/help\]$", text, re.MULTILINE)
    assert start is not None
    text = text.replace(start[0], "[start]").removeprefix("[loading the bundled demo model ...]\n")
    text = re.sub(r"\[\d+\.\d\d s to first token.*?\]", "[figures]", text, flags=re.DOTALL)
    return start[0], text


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "screen"), [(40, AT_40), (80, AT_80), (120, AT_80)])
def test_a_message_that_is_typed_during_an_answer_is_the_next_one(
    tmp_path: Path, columns: int, screen: str
):
    seen = typed_ahead(state=tmp_path, columns=columns)
    start, shown = in_short(screen_lines(seen, columns, rows=60))
    assert shown == screen
    # One line, of as many parts as there is room for.
    more = {40: "", 80: "context: 4,096 tokens | ", 120: "context: 4,096 tokens | greedy (the "}
    more[120] += "model's) | "
    assert start == f"[bundled demo model | CPU | {more[columns]}/help]"


@pytest.mark.slow
def test_plain_text_is_written_as_it_comes_without_any_code(tmp_path: Path):
    seen = typed_ahead("--plain", state=tmp_path, columns=40)
    lines = plain(seen).replace("\r", "").split("\n")
    assert in_short(lines)[1].strip() == AS_TEXT
    # Behind what prompt_toolkit writes before its first prompt.
    assert "\x1b" not in seen.partition("[loading")[2]


@pytest.mark.slow
def test_save_asks_before_it_writes_over_a_conversation(tmp_path: Path):
    file = tmp_path / "saved.json"
    with dialogue(tmp_path) as terminal:
        terminal.send(f"/save {file}")
        terminal.send("hello")
        for key, num_messages in (("n", 0), (CTRL_C, 0), (CTRL_D, 0), ("y", 2)):
            terminal.type(f"/save {file}\r")
            terminal.wait_for("overwrite it?")
            terminal.type(key)
            said = terminal.wait_for_prompt()
            assert ("[saved to" in said, "[not saved]" in said) == (
                key == "y",
                key in ("n", CTRL_D),
            )
            assert len(saved_messages(file)) == num_messages


HANGS = """
import sys, time
from mlx_paged.chat import main
from mlx_paged.engine.model_runner import ModelRunner
def launch(self, *arguments):
    print("begun", flush=True)
    time.sleep(600)
ModelRunner.launch = launch
sys.exit(main())
"""


@pytest.mark.slow
def test_the_terminal_is_left_as_it_was_by_sigterm(tmp_path: Path):
    for message in ("", "hello"):  # at the prompt, and in a step that does not end
        terminal = Terminal(state=tmp_path, command=[sys.executable, "-c", HANGS])
        before = termios.tcgetattr(terminal.master)
        terminal.wait_for_prompt()
        if message:
            terminal.type(f"{message}\r")
            terminal.wait_for("begun")
        assert termios.tcgetattr(terminal.master) != before
        terminal.process.terminate()
        assert terminal.process.wait() == -signal.SIGTERM
        assert termios.tcgetattr(terminal.master) == before
        terminal.close()


@pytest.mark.slow
def test_the_shell_has_its_terminal_while_the_chat_is_stopped(tmp_path: Path):
    program = tmp_path / "chat.py"
    program.write_text(ANSWERS)
    shell = Terminal(state=tmp_path, columns=80, environ={"PS1": "SHELL: "}, command=["sh", "-i"])
    shell.wait_for("SHELL: ")
    before = termios.tcgetattr(shell.master)
    shell.type(f"{shlex.join([sys.executable, str(program)])}\n")
    shell.wait_for(READY)
    shell.type("hello\r")
    shell.wait_for("wait")
    answering = termios.tcgetattr(shell.master)
    for _ in range(2):
        shell.type("\x1a")  # Ctrl-Z
        shell.wait_for("SHELL: ")
        assert termios.tcgetattr(shell.master) == before
        shell.type("fg; echo left\n")
        shell.wait_for("chat.py")
        while termios.tcgetattr(shell.master) != answering:
            time.sleep(0.01)
    shell.type("again\r")
    # To the prompt after the second answer.
    shell.wait_for(lambda text: re.search(r"use\].*use\].*>>", text, re.DOTALL) is not None)
    shell.type("\x1a")  # at a prompt
    shell.wait_for("SHELL: ")
    assert termios.tcgetattr(shell.master) == before
    shell.type("fg; echo left\n")
    shell.wait_for(READY)
    shell.type(CTRL_D)
    shell.wait_for("left")
    assert termios.tcgetattr(shell.master) == before
    shell.type("exit 0\n")
    assert shell.close() == 0


@pytest.mark.slow
def test_the_terminal_is_left_as_it_was_by_a_second_ctrl_c(tmp_path: Path):
    terminal = Terminal(state=tmp_path, command=[sys.executable, "-c", HANGS])
    before = termios.tcgetattr(terminal.master)
    terminal.wait_for_prompt()
    terminal.type("hello\r")
    terminal.wait_for("begun")
    terminal.type(CTRL_C)
    terminal.wait_for("Ctrl-C again leaves")
    terminal.type(CTRL_C)
    assert terminal.process.wait() == 130
    assert termios.tcgetattr(terminal.master) == before
    assert terminal.close() == 130
