"""Ctrl-C and a closed pipe, on the real program in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.terminal import COMMAND, CTRL_C, DEADLINE, Terminal, dialogue, plain


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_program(long_answer: list[str], tmp_path: Path):
    terminal = Terminal(*long_answer, "--verbose", state=tmp_path)
    terminal.wait_for_prompt()
    terminal.type("hello\r")
    # With the first line of the answer on the screen, the program is in the middle of it.
    terminal.wait_for("How can I help")
    terminal.type(CTRL_C)
    stopped = terminal.wait_for_prompt()
    assert "Generation: " in stopped and "[stopped]" in stopped and "Traceback" not in stopped
    assert "messages: 2" in terminal.send("/stats")
    # At the prompt it only reminds of the way out.
    terminal.type(CTRL_C)
    assert "[Ctrl-D or /exit to leave]" in terminal.wait_for_prompt()
    # The conversation goes on, on the K/V of the answer that was cut.
    terminal.type("again\r")
    terminal.wait_for(lambda text: len(plain(text).partition("again")[2]) > 200)
    terminal.type(CTRL_C)
    again = terminal.wait_for_prompt()
    assert "[stopped]" in again and "Generation: " in again and "(0 reused)" not in again
    terminal.type("/exit\r")
    assert terminal.close() == 0


@pytest.mark.slow
def test_a_message_that_was_being_typed_is_thrown_away_by_ctrl_c(tmp_path: Path):
    with dialogue(tmp_path) as terminal:
        terminal.type("never sent")
        terminal.wait_for("sent")
        terminal.type(CTRL_C)
        terminal.wait_for_prompt()
        assert "messages: 0" in terminal.send("/stats")


@pytest.mark.slow
def test_ctrl_d_leaves(tmp_path: Path):
    with dialogue(tmp_path) as terminal:
        pass
    assert "Traceback" not in terminal.seen


@pytest.mark.slow
def test_a_long_prompt_shows_its_progress_on_a_terminal(tmp_path: Path):
    message = "The code of apple is 4821. " * 60
    terminal = Terminal(
        message, "--prefill-step-size", "100", "--max-tokens", "3", state=tmp_path, term="dumb"
    )
    shown = terminal.wait_for("cut at --max-tokens 3")
    assert "[prompt 100/" in shown and "tokens, 1" in shown
    assert terminal.close() == 0


@pytest.fixture
def answering(long_answer: list[str]) -> subprocess.Popen[str]:
    """The chat program, in the middle of a single answer."""
    process = subprocess.Popen(
        [*COMMAND, "hello", *long_answer], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.read(20)
    return process


def test_ctrl_c_ends_a_single_answer_with_status_130(answering: subprocess.Popen[str]):
    answering.send_signal(signal.SIGINT)
    _, err = answering.communicate(timeout=DEADLINE)
    assert answering.returncode == 130
    assert "[stopped]" in err and "Traceback" not in err


HANGS = """
import sys, time
from mlx_paged.cli.chat.program import main
from mlx_paged.engine.model_runner import ModelRunner
def launch(self, *arguments):
    print("begun", flush=True)
    time.sleep(600)
ModelRunner.launch = launch
sys.exit(main(["hello"]))
"""


def test_a_second_ctrl_c_ends_the_program_in_a_step_that_does_not_end():
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    # It waits for the end of the step, which the second one does not.
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130 and "Traceback" not in err


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_program_without_a_traceback(
    answering: subprocess.Popen[str],
):
    assert answering.stdout is not None and answering.stderr is not None
    answering.stdout.close()
    err = answering.stderr.read()
    assert answering.wait(timeout=DEADLINE) == 1
    assert "Traceback" not in err and "Exception" not in err
