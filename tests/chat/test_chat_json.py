"""``--json``: one object, whatever becomes of the question."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest
from helpers.terminal import COMMAND, DEADLINE

QUESTION = "The code of apple is 4821. What is the code of apple?"
FIGURES = {
    "prompt_tokens": int,
    "cached_tokens": int,
    "read_tokens": int,
    "generation_tokens": int,
    "time_to_first_token": float,
    "prompt_tps": float,
    "generation_tps": float,
    "peak_memory": float,
}


def test_an_answer_is_one_object_with_its_figures(run_chat):
    plain = run_chat(QUESTION)[1]
    status, out, err = run_chat("--json", QUESTION)
    assert (status, err) == (0, "") and out.count("\n") == 1
    answer: dict[str, Any] = json.loads(out)
    figures = {name: answer.pop(name) for name in FIGURES}
    assert answer == {
        "model": "demo",
        "text": plain.removesuffix("\n"),
        "reasoning": "",
        "finish_reason": "stop",
    }
    assert {name: type(value) for name, value in figures.items()} == FIGURES
    assert figures["prompt_tokens"] == 32 and figures["generation_tokens"] > 5
    answer = json.loads(run_chat("-", "--json", "-m", "2", stdin=QUESTION)[1])
    assert (answer["finish_reason"], answer["generation_tokens"]) == ("length", 2)


@pytest.mark.parametrize(
    ("flags", "text", "reasoning"),
    [([], "42", "17 + 25"), (["--hide-thinking"], "42", "")],
)
def test_reasoning_stands_apart(
    run_chat, monkeypatch: pytest.MonkeyPatch, flags: list[str], text: str, reasoning: str
):
    from mlx_paged.answers.dialect import AnswerFormat, Dialect
    from mlx_paged.answers.formats import REASONING
    from mlx_paged.answers.tokens import Piece, ReasoningSplitter

    pieces = [Piece("<think>17 + ", True), Piece("25\n</think>", True), Piece("\n\n42", False)]
    monkeypatch.setattr(ReasoningSplitter, "add", lambda *_: [])
    monkeypatch.setattr(ReasoningSplitter, "finish", lambda *_: pieces)
    with_marks = AnswerFormat(Dialect(reasoning=REASONING[0]))
    monkeypatch.setattr(AnswerFormat, "of", lambda *_: with_marks)
    answer = json.loads(run_chat("--json", QUESTION, *flags)[1])
    assert (answer["text"], answer["reasoning"]) == (text, reasoning)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["hi", "--temp", "x"], "argument --temp: must be a number, at least 0, got 'x'"),
        (["hi", "--wat"], "unrecognized arguments: --wat"),
        ([], "--json answers one message; give it as argument, or - to read it"),
        ([""], "the message is empty"),
        (["hi", "--model", "/no/folder"], "[load] no folder '/no/folder'"),
        (["hi " * 50, "--max-model-len", "20"], "[context] a prompt of 114 tokens leaves no room"),
    ],
)
def test_an_error_is_an_object_too_and_a_line_with_its_status(
    run_chat, argv: list[str], error: str
):
    status, out, err = run_chat("--json", *argv)
    found = json.loads(out)
    assert status == 2 and list(found) == ["error"] and found["error"].startswith(error)
    assert found["error"] in err.splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_said_so_far(long_answer: list[str]):
    process = subprocess.Popen(
        [*COMMAND, "--json", "--verbose", "hello", *long_answer],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[model: "):  # what is said before the answer
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    answer = json.loads(out)
    assert answer == {"error": "interrupted"} or answer["finish_reason"] == "interrupted"
