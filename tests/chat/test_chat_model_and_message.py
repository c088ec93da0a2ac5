"""The words of a command line: a message, a model, or a model and a message."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.terminal import Terminal

from mlx_paged import demo_model_path
from mlx_paged.__main__ import main as run_command
from mlx_paged.cli.chat.terminal import Screen

RunChat = Callable[..., tuple[int, str, str]]
HELLO = "Hello! How can I help you?\n"
ON_THE_HUB = "owner/tiny"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with one model, and a working folder with what has a name."""
    cache, commit = tmp_path / "hub", "0" * 40
    repository = cache / "models--owner--tiny"
    shutil.copytree(demo_model_path(), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = tmp_path / "here"
    shutil.copytree(demo_model_path(), folder / "model")
    (folder / "data").mkdir()
    (folder / "notes.txt").write_text("17 + 25")
    monkeypatch.chdir(folder)
    return cache


@pytest.mark.parametrize("word", [ON_THE_HUB, "tiny", "model", "./model", "demo"])
def test_a_single_word_is_the_model_that_is_on_this_machine(run_chat: RunChat, word: str):
    name = ON_THE_HUB if word == "tiny" else word
    for arguments in ([word], [word, "--temp", "0"], ["--temp", "0", word]):
        status, out, err = run_chat(*arguments, stdin="hello\n")
        assert (status, out) == (0, HELLO) and err.startswith(f"[{name} | CPU | ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["model", "hello"],
        ["model", "--temp", "0", "hello"],
        ["--temp", "0", "model", "hello"],
        [ON_THE_HUB, "--", "hello"],
        ["--model", "model", "hello"],
    ],
)
def test_two_words_are_the_model_and_the_message(run_chat: RunChat, arguments: list[str]):
    status, out, err = run_chat(*arguments)
    assert ((status, out) == (0, HELLO) and "model | CPU | " in err) or "tiny | CPU | " in err


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        (["hello"], ""),
        (["Are true and/or false the same?"], ""),
        (["--", "true/false"], ""),
        (["--", "model"], ""),
        (["--model", "model", "true/false"], ""),
        (["model", "true/false"], ""),
        (["model", "--", "true/false"], ""),
        (["-"], "true/false\n"),
        ([], "true/false\n"),
        (["/help"], ""),
    ],
)
def test_everything_else_is_a_message(run_chat: RunChat, arguments: list[str], stdin: str):
    status, out, _ = run_chat(*arguments, stdin=stdin)
    assert status == 0 and out.strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["true/false"],
            "there is no model 'true/false' on this machine; --model true/false downloads it from "
            "the hub. To send this as a message, put -- before it (-- 'true/false'), or send it "
            "through a pipe",
        ),
        (["owner/other"], "--model owner/other downloads it"),
        (["https://huggingface.co/owner/other/tree/main"], "--model owner/other downloads it"),
        (["./missing"], "give a path that exists"),
        (["missing.gguf"], "give a path that exists"),
        (["data"], "a model is a folder with config.json and weights, or a .gguf file"),
        (["notes.txt"], "(-- 'notes.txt')"),
        (["hello", "there"], "no model 'hello'; a message of several words needs quotes"),
        (["model", "say", "this"], "3 words are given; a message of several words needs quotes"),
        (["--model", "model", "say", "this"], "2 words are given beside --model; a message of"),
    ],
)
def test_what_is_unclear_is_an_error_with_the_way_out(
    run_chat: RunChat, refused: Callable[..., str], arguments: list[str], words: str
):
    assert words in refused(*arguments)
    status, out, _ = run_chat("--json", *arguments)
    assert status == 2 and out.startswith('{"error": "') and words[:20] in out


def test_a_name_of_several_models_is_an_error(refused: Callable[..., str], hub: Path):
    shutil.copytree(hub / "models--owner--tiny", hub / "models--other--tiny")
    error = refused("tiny", stdin="hello\n")
    assert "is the name of several models: other/tiny, owner/tiny" in error


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        (["run", "owner/name"], "type {prog} chat owner/name"),
        (["run", "owner/name", "Hello there"], "type {prog} chat owner/name 'Hello there'"),
        (["run"], "type {prog} chat MODEL"),
        (["download", "owner/name"], "type {prog} pull owner/name"),
        (["ls"], "type {prog} list"),
        (["remove", "x"], "type {prog} rm x"),
    ],
)
def test_commands_of_other_projects_say_what_to_type(
    capsys: pytest.CaptureFixture[str], typed: list[str], instead: str
):
    assert run_command(typed) == 2
    out, err = capsys.readouterr()
    assert instead.format(prog="python -m mlx_paged") in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize("typed", ["x" * 300_000, "a\nb\x1b[2J"])
def test_an_unknown_command_is_shown_in_a_short_line(
    capsys: pytest.CaptureFixture[str], typed: str
):
    assert run_command([typed]) == 2
    err = capsys.readouterr().err
    assert "unknown command" in err and len(err) < 300 and "\x1b" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["model", "CPU"], "[model | CPU | /help]"),
        (["model", "CPU", "x" * 40], "[model | CPU | /help]"),
        (["owner/" + "m" * 60, "CPU"], f"[...{'m' * 27} | /help]"),
    ],
)
def test_the_line_at_the_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    parts: list[str],
    expected: str,
):
    monkeypatch.setattr(Screen, "_width", 40)
    Screen().say_in_a_line(parts, "/help")
    line = capsys.readouterr().err.removesuffix("\n")
    assert line == expected and len(line) <= 40


@pytest.mark.slow
def test_a_chat_in_a_terminal_begins_with_one_line_of_the_model(tmp_path: Path):
    terminal = Terminal("model", state=tmp_path, columns=70)
    terminal.wait_for("/help]")
    terminal.type("\x04")
    assert terminal.close() == 0
    line = "[model | CPU | context: 4,096 tokens | greedy (the model's) | /help]"
    assert line in terminal.seen
