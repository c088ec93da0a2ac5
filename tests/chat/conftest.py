"""The chat program in this process, and model folders that it talks to."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mlx_paged import chat, demo_model_path

RunChat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> RunChat:
    """Exit status, stdout and stderr of the chat with these arguments and this stdin."""

    def run(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = chat.main(list(argv))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def refused(run_chat: RunChat) -> Callable[..., str]:
    """What the chat says to a user's mistake: one line, with status 2 and nothing on stdout."""

    def run(*argv: str, stdin: str = "") -> str:
        status, out, err = run_chat(*argv, stdin=stdin)
        assert (status, out) == (2, ""), err
        (line,) = err.splitlines()
        return line

    return run


@pytest.fixture
def talk(run_chat: RunChat) -> Callable[..., tuple[int, list[str], str]]:
    """Exit status, lines on stdout, and stderr of the chat with these lines typed."""

    def run(*lines: str, argv: Sequence[str] = ()) -> tuple[int, list[str], str]:
        status, out, err = run_chat(*argv, stdin="".join(f"{line}\n" for line in lines))
        return status, out.splitlines(), err

    return run


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the demo model in which fields of its JSON files, or whole files, are others."""

    def make(texts: dict[str, str] | None = None, **fields: dict[str, object]) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(demo_model_path(), folder, dirs_exist_ok=True)
        for name, changes in fields.items():
            file = folder / f"{name}.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        for name, text in (texts or {}).items():
            (folder / name).write_text(text)
        return folder

    return make


@pytest.fixture
def long_answer(model_folder: Callable[..., Path]) -> list[str]:
    """Arguments for answers that do not end by themselves: to this model an end of turn is a token
    like any other.
    """
    folder = model_folder(
        tokenizer_config={"eos_token": "<|endoftext|>"},
        config={"eos_token_id": 3, "max_position_embeddings": 10**9},
        generation_config={"eos_token_id": 3},
    )
    return ["--model", str(folder)]
