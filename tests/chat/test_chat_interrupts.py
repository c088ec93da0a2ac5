"""Ctrl-C, a closed pipe and a real terminal, on the real program in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_paged import demo_model_path

COMMAND = [sys.executable, "-m", "mlx_paged.chat"]
DEADLINE = 120.0


@pytest.fixture
def long_answer(tmp_path: Path) -> list[str]:
    """Arguments for answers that do not end by themselves: to this model an end of turn is a token like any other."""
    folder = tmp_path / "endless"
    shutil.copytree(demo_model_path(), folder)
    for name, field, value in (
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
        ("config.json", "eos_token_id", 3),
        ("generation_config.json", "eos_token_id", 3),
    ):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {field: value}))
    return ["--model", str(folder), "--max-tokens", "-1"]


class Terminal:
    """The chat program on a pseudo-terminal: type lines, wait for text."""

    def __init__(self, *argv: str):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            close_fds=True,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, done: Callable[[str], bool], seconds: float = DEADLINE) -> str:
        """Read until ``done`` of what came since the last wait; return that."""
        end = time.monotonic() + seconds
        fresh = ""
        while not done(fresh):
            assert time.monotonic() < end, f"waited in vain; the terminal shows:\n{self.seen}"
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    data = os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError:  # the program has left
                    assert done(fresh), self.seen
                    return fresh
                fresh += data
                self.seen += data
        return fresh

    def type(self, line: str) -> None:
        os.write(self.master, line.encode() + b"\n")

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def interrupt_until(self, text: str) -> None:
        for _ in range(int(DEADLINE)):
            self.interrupt()
            try:
                self.wait_for(lambda fresh: text in fresh, seconds=1.0)
                return
            except AssertionError:
                continue
        raise AssertionError(f"{text!r} never came; the terminal shows:\n{self.seen}")

    def close(self) -> int:
        status = self.process.wait(timeout=DEADLINE)
        os.close(self.master)
        return status


def test_ctrl_c_stops_the_answer_and_not_the_program(long_answer: list[str]):
    terminal = Terminal(*long_answer)
    terminal.wait_for(lambda text: ">> " in text)
    terminal.type("hello")
    terminal.wait_for(lambda text: len(text) > 200)
    terminal.interrupt()
    stopped = terminal.wait_for(lambda text: "[stopped]" in text and ">> " in text.split("[stopped]")[1])
    assert "Generation: " in stopped and "Traceback" not in stopped
    terminal.type("/stats")
    assert "messages: 2" in terminal.wait_for(lambda text: ">> " in text.rpartition("K/V memory")[2])
    # At the prompt it only reminds of the way out. A signal that comes just before Python begins to wait for a line is
    # noticed with the next one, so a person, and this test, may have to press twice.
    terminal.interrupt_until("[Ctrl-D or /exit to leave]")
    # The conversation goes on, on the K/V of the answer that was cut.
    terminal.type("again")
    terminal.wait_for(lambda text: len(text) > 200)
    terminal.interrupt()
    again = terminal.wait_for(lambda text: "[stopped]" in text and ">> " in text.split("[stopped]")[1])
    assert "(0 reused)" not in again
    terminal.type("/exit")
    assert terminal.close() == 0


def test_ctrl_d_leaves():
    terminal = Terminal()
    terminal.wait_for(lambda text: ">> " in text)
    os.write(terminal.master, b"\x04")
    assert terminal.close() == 0
    assert "Traceback" not in terminal.seen


def test_a_long_prompt_shows_its_progress_on_a_terminal():
    terminal = Terminal("The code of apple is 4821. " * 60, "--prefill-step-size", "100", "--max-tokens", "3")
    shown = terminal.wait_for(lambda text: "Peak memory" in text)
    assert "[prompt 100/" in shown and "tokens, 1" in shown
    assert terminal.close() == 0


def test_ctrl_c_ends_a_single_answer_with_status_130(long_answer: list[str]):
    process = subprocess.Popen(
        [*COMMAND, "hello", *long_answer], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert "[stopped]" in err and "Traceback" not in err


def test_a_reader_that_leaves_ends_the_program_without_a_traceback(long_answer: list[str]):
    process = subprocess.Popen(
        [*COMMAND, "hello", *long_answer], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(20)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=DEADLINE) == 1
    assert "Traceback" not in err and "Exception" not in err
