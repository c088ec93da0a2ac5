"""How far a long prompt is: the words, and what a terminal shows of them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from helpers.terminal import CTRL_C, Terminal

from mlx_paged import Engine, demo_model_path, load
from mlx_paged.cli.chat.conversation import Conversation
from mlx_paged.cli.chat.dialogue import Dialogue
from mlx_paged.cli.chat.program import Settings, setup_arg_parser
from mlx_paged.cli.chat.terminal import PromptProgress, Reader, Screen


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def sized(columns: int) -> Callable[[object], os.terminal_size]:
    """The size of each stream's terminal."""
    return lambda stream: os.terminal_size((columns, 24))


def test_a_long_prompt_is_said_from_its_first_token_to_its_last():
    clock = Clock()
    progress = PromptProgress(num_known=0, clock=clock)
    assert progress.words(0, 8000)[0] == "[prompt 0/8,000 tokens, 0%]"
    said = []
    for done in (128, 256, 4000, 7999):
        clock.now += 1.0
        said.append(progress.words(done, 8000)[0])
    assert said == [
        "[prompt 128/8,000 tokens, 2%, 128 tokens/s, 62 s left]",
        "[prompt 256/8,000 tokens, 3%, 128 tokens/s, 60 s left]",
        "[prompt 4,000/8,000 tokens, 50%, 1,333 tokens/s, 3 s left]",
        "[prompt 7,999/8,000 tokens, 100%, 2,000 tokens/s, 0 s left]",
    ]
    assert progress.words(8000, 8000) == ()


def test_tokens_of_earlier_turns_are_not_in_the_rate():
    clock = Clock()
    progress = PromptProgress(num_known=5000, clock=clock)
    assert progress.words(0, 6000)[0] == "[prompt 0/6,000 tokens, 0%]"
    clock.now += 2.0
    assert (
        progress.words(5200, 6000)[0] == "[prompt 5,200/6,000 tokens, 87%, 100 tokens/s, 8 s left]"
    )


def test_the_rate_is_that_of_the_last_reports():
    clock = Clock()
    progress = PromptProgress(num_known=0, clock=clock)
    for number in range(40):
        clock.now += 1.0 if number < 20 else 2.0
        words = progress.words(100 * (number + 1), 10_000)
    assert words[0] == "[prompt 4,000/10,000 tokens, 40%, 50 tokens/s, 2 min left]"


def test_a_short_prompt_is_not_said():
    assert PromptProgress(num_known=0).words(0, 100) == ()
    assert PromptProgress(num_known=9950).words(0, 10_000) == ()


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, "[prompt 64,000/128,000 tokens, 50%, 8,000 tokens/s, 8 s left]"),
        (62, "[prompt 64,000/128,000 tokens, 50%, 8,000 tokens/s, 8 s left]"),
        (61, "[64,000/128,000, 8,000 tokens/s, 8 s left]"),
        (40, "[64,000/128,000, 8 s left]"),
        (20, "[50%, 8 s left]"),
        (10, "[50%, 8 s"),
        (0, "[prompt 64,000/128,000 tokens, 50%, 8,000 tokens/s, 8 s left]"),
    ],
)
def test_a_line_is_never_wider_than_the_terminal(
    columns: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    clock = Clock()
    progress = PromptProgress(num_known=0, clock=clock)
    clock.now += 8.0
    screen = Screen({})
    screen.stderr_is_terminal = True
    monkeypatch.setattr("mlx_paged.cli.chat.terminal.size_of", sized(columns or 80))
    screen.show_progress(*progress.words(64_000, 128_000))
    assert capsys.readouterr().err == f"\r{shown}\x1b[J\r"


def test_progress_does_not_clear_a_line_of_the_answer(capsys: pytest.CaptureFixture):
    for environ in ({"TERM": "dumb"}, {"TERM": "xterm"}):
        screen = Screen(environ)
        screen.stderr_is_terminal = screen.stdout_is_terminal = True
        screen.answer("How can I")
        screen.show_progress("[stopping]")
        screen.clear_progress()
        assert capsys.readouterr().err == ""


def test_a_plain_terminal_gets_a_line_of_progress_every_five_seconds_that_stays(
    capsys: pytest.CaptureFixture,
):
    clock = Clock()
    screen = Screen({"TERM": "xterm"}, clock)
    screen.stderr_is_terminal = screen.is_plain = True
    for _ in range(2):  # the second wait is like the first
        for number in range(13):
            screen.show_progress(f"[prompt {number}]", "[short]")
            clock.now += 1.0
        screen.clear_progress()
    assert capsys.readouterr().err == "[prompt 5]\n[prompt 10]\n" * 2


def test_a_plain_terminal_gets_no_progress_within_a_line_of_the_answer(
    capsys: pytest.CaptureFixture,
):
    clock = Clock()
    screen = Screen({"TERM": "xterm"}, clock)
    screen.stdout_is_terminal = screen.stderr_is_terminal = screen.is_plain = True
    screen.answer("How can I")
    for _ in range(9):
        screen.show_progress("[thinking ...]")
        screen.announce("[stopping]")
        clock.now += 1.0
    assert capsys.readouterr() == ("How can I", "")


def test_a_plain_terminal_is_told_at_once_what_begins(capsys: pytest.CaptureFixture):
    screen = Screen({"TERM": "xterm"}, Clock())
    screen.stderr_is_terminal = screen.is_plain = True
    screen.announce("[loading a model ...]", "[loading ...]")
    assert capsys.readouterr().err == "[loading a model ...]\n"
    screen.is_plain = False
    screen.announce("[loading a model ...]", "[loading ...]")
    assert capsys.readouterr().err == "\r[loading a model ...]\x1b[J\r"


def test_a_long_prompt_of_a_plain_chat_is_reported_on_stderr(capsys: pytest.CaptureFixture):
    """A step takes two seconds, by a clock that each report reads."""
    clock = (2.0 * reading for reading in count())
    screen = Screen({"TERM": "xterm"}, lambda: next(clock))
    screen.stderr_is_terminal = screen.is_plain = True
    settings = Settings(setup_arg_parser().parse_args(["--max-tokens", "3"]), {})
    model, tokenizer = load(demo_model_path())
    with closing(Engine(model, tokenizer, max_num_seqs=1, max_num_batched_tokens=64)) as engine:
        dialogue = Dialogue([Conversation(engine, tokenizer)], settings, screen, Reader())
        dialogue.ask("The code of apple is 4821. " * 60)
    out, err = capsys.readouterr()
    # Reports come before each step of 64 tokens: every third one is six seconds after the last.
    form = r"^\[prompt (\d+)/675 tokens, .* left\]$"
    assert re.findall(form, err, re.MULTILINE) == ["192", "384", "576"]
    assert "\x1b" not in err and "\r" not in err
    assert len(out.splitlines()) == 1


SLOW = """
import sys, time
from mlx_paged.cli.chat.program import main
from mlx_paged.engine.model_runner import ModelRunner
launch = ModelRunner.launch
def slow_launch(self, batch, awaited):
    time.sleep(batch.num_tokens * 0.002)
    return launch(self, batch, awaited)
ModelRunner.launch = slow_launch
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80])
def test_a_slow_model_shows_its_progress_and_ctrl_c_stops_it_after_a_step(
    tmp_path: Path, columns: int
):
    """64 tokens take 0.13 s, and the prompt of 675 tokens some 11 steps."""
    terminal = Terminal(
        *("--prefill-step-size", "64", "--max-tokens", "3"),
        state=tmp_path,
        columns=columns,
        command=[sys.executable, "-c", SLOW],
    )
    terminal.wait_for_prompt()
    terminal.paste("The code of apple is 4821. " * 60)
    terminal.type("\r")
    seen = terminal.wait_for(lambda text: len(re.findall(r"(?:s|min) left]", text)) >= 3)
    lines = re.findall(r"\r(\[[^\r]*?])\x1b\[J\r", seen)
    form = (
        r"\[(\d+)/675, \d+ tokens/s, \d+ s left]"
        if columns == 40
        else r"\[prompt (\d+)/675 tokens, \d+%, \d+ tokens/s, \d+ s left]"
    )
    assert lines[0] == "[prompt 0/675 tokens, 0%]"
    reports = [re.fullmatch(form, line) for line in lines[1:4]]
    assert [report and report[1] for report in reports] == ["64", "128", "192"]
    assert all(len(line) < columns for line in lines)
    terminal.type(CTRL_C)
    stopped = terminal.wait_for_prompt()
    short, long = "[stopping; Ctrl-C again leaves]", "[stopping when this step is done; "
    assert (short if columns == 40 else long) in stopped
    assert "[stopped]" in stopped and "Traceback" not in stopped
    # The message was taken back, and the conversation goes on.
    assert "messages: 0" in terminal.send("/stats")
    assert "cut at --max-tokens 3" in terminal.send("hello")
    terminal.type("/exit\r")
    assert terminal.close() == 0


def test_a_line_of_wide_characters_is_measured_in_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    screen = Screen({})
    screen.stderr_is_terminal = True
    monkeypatch.setattr("mlx_paged.cli.chat.terminal.size_of", sized(20))
    # 10 characters, of which 9 take two columns each.
    screen.show_progress("[模型模型模型模型模", "[loading]")
    screen.show_progress("[模型模型模型模型模]", "[loading]")
    err = capsys.readouterr().err
    assert err == "\r[模型模型模型模型模\x1b[J\r\r[loading]\x1b[J\r"


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (
            40,
            "/save FILE   write the conversation to a\n             file\n/help        this text\n",
        ),
        (80, "/save FILE   write the conversation to a file\n/help        this text\n"),
        # No terminal: a line is a line.
        (None, "/save FILE   write the conversation to a file\n/help        this text\n"),
    ],
)
def test_rows_are_folded_into_what_is_left_of_the_width(
    columns: int | None,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    screen = Screen({})
    screen.stderr_is_terminal = columns is not None
    monkeypatch.setattr("mlx_paged.cli.chat.terminal.size_of", sized(columns or 80))
    screen.say_rows([("/save FILE", "write the conversation to a file"), ("/help", "this text")])
    assert capsys.readouterr().err == shown
