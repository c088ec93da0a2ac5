"""Standard streams that are empty, full or closed, and how the program calls itself; each in a
process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.terminal import DEADLINE

from mlx_paged import __version__
from mlx_paged.cli.chat.program import setup_arg_parser
from mlx_paged.engine.descriptions import in_words

HELLO = "Hello! How can I help you?\n"
CHAT = f"{sys.executable} -m mlx_paged.chat"
SCRIPTS = Path(sys.executable).parent

needs_full_device = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="no /dev/full on this system"
)


def shell(command: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command line; its stdin is empty, unless it says
    otherwise.
    """
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        ("< /dev/null", 2, "standard input is empty"),
        ("< /dev/null --verbose", 2, "standard input is empty"),
        ("<&-", 2, "standard input is empty"),
        ("- <&-", 2, "the message is empty"),
        ("- < /dev/null", 2, "the message is empty"),
        ("0> /dev/null", 2, "standard input can't be read: "),
        ("- 0> /dev/null", 2, "standard input can't be read: "),
        ("hi --temp=--", 2, "argument --temp: the value can't be '--'"),
        ("hi --kv=--", 2, "argument --kv: the value can't be '--'"),
        ("hi -m=--", 2, "argument -m: the value can't be '--'"),
        ("hi --model ''", 2, "no folder ''"),
        ("hi --adapter-path ''", 2, "no folder ''"),
        (f"hi --kv-cache-bytes {'9' * 400}T", 2, "within 1..2**63, got '999"),
        pytest.param("hi > /dev/full", 1, "No space left on device", marks=needs_full_device),
        pytest.param("--help > /dev/full", 1, "No space left on device", marks=needs_full_device),
        pytest.param(
            "--version > /dev/full", 1, "No space left on device", marks=needs_full_device
        ),
    ],
)
def test_what_can_not_be_answered_or_written_is_one_clear_line(
    arguments: str, status: int, line: str
):
    found, out, err = shell(f"{CHAT} {arguments}")
    errors = [text for text in err.splitlines() if "error:" in text]
    assert (found, out) == (status, "")
    assert len(errors) == 1 and line in errors[0] and err.splitlines()[-1] == errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("messages", [r"\n \n", ""])
def test_a_pipe_without_a_message_is_one_clear_line(messages: str):
    status, out, err = shell(f"printf '{messages}' | {CHAT}")
    assert (status, out) == (2, "") and "standard input is empty" in err.splitlines()[-1]


@pytest.mark.slow
@needs_full_device
def test_a_dialogue_whose_answers_can_not_be_written_ends_and_says_so():
    status, _, err = shell(f"printf 'hello\\nhello\\n' | {CHAT} > /dev/full")
    assert status == 1 and err.count("No space left on device") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["2>&-", pytest.param("2>/dev/full", marks=needs_full_device), "2>&- <&-"]
)
def test_the_answer_comes_where_nothing_else_can_be_said(where: str):
    assert shell(f"{CHAT} hello {where}")[:2] == (0, HELLO)


def test_each_line_of_a_pipe_is_a_message_without_its_line_end(tmp_path: Path):
    file = tmp_path / "saved.json"
    status, out, _ = shell(f"printf 'hello\\r\\nhello\\n/save {file}\\nhello' | {CHAT}")
    assert status == 0 and out.count("\n") == 3
    assert file.read_text().count('"content": "hello"') == 2


@pytest.mark.slow
def test_bytes_that_are_no_text_and_characters_that_can_not_be_written_end_nothing():
    assert shell(rf"printf 'hello \377\376' | {CHAT} -")[0] == 0
    assert shell(f"echo hello | PYTHONIOENCODING=ascii {CHAT}")[:2] == (0, HELLO)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"),
    [
        (f"{sys.executable} -m mlx_paged.chat", "python -m mlx_paged.chat"),
        (f"{sys.executable} -m mlx_paged chat", "python -m mlx_paged chat"),
        (f"{SCRIPTS}/mlx-paged chat", "mlx-paged chat"),
        (f"{SCRIPTS}/mlx_paged.chat", "mlx_paged.chat"),
    ],
)
def test_help_and_errors_name_the_program_as_it_was_called(command: str, name: str):
    assert shell(f"{command} --help")[1].startswith(f"usage: {name} [")
    assert shell(f"{command} --temp x")[2].startswith(f"{name}: error: ")
    assert shell(f"{command} < /dev/null")[2].startswith(f"{name}: error: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"),
    [
        (f"{sys.executable} -m mlx_paged", "python -m mlx_paged"),
        (f"{SCRIPTS}/mlx-paged", "mlx-paged"),
    ],
)
def test_the_package_says_what_there_is(command: str, name: str):
    status, out, err = shell(command)
    assert (status, err) == (0, "") and out.startswith(f"usage: {name} COMMAND")
    assert f"{name} chat --help" in out
    assert shell(f"{command} --help") == (0, out, "")
    assert shell(f"{command} --version")[1].startswith("mlx_paged ")
    for wrong, kind in (("serve-me", "command"), ("--wat", "option")):
        status, out, err = shell(f"{command} {wrong}")
        assert (status, out) == (2, "")
        commands = "chat, serve, fit, list, pull, rm, ps, stop, cache, service, completion"
        what = f"unknown {kind} {wrong!r}; commands: {commands} (see --help)"
        assert err == f"{name}: error: {what}\n"


def test_help_imports_nothing_heavy():
    probe = (
        "import sys, importlib\n"
        "for name in ('mlx_paged.chat', 'mlx_paged.__main__'):\n"
        "    main = importlib.import_module(name).main\n"
        "    for flag in ('--help', '--version'): assert main([flag]) == 0\n"
        "assert importlib.import_module('mlx_paged.__main__').main(['chat', '--help']) == 0\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'numpy', 'prompt_toolkit', 'rich', 'jinja2'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    assert f"mlx_paged {__version__}\n" in done.stdout and "--kv-cache-bytes" in done.stdout


def test_the_help_is_in_groups_and_breaks_no_word(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = setup_arg_parser("chat").format_help()
    groups = re.findall(r"^(\S.*):\n((?:  .*\n)+)", text, re.MULTILINE)
    flags = {title: re.findall(r"^  (--?[a-z-]+)", rows, re.MULTILINE) for title, rows in groups}
    assert flags == {
        "positional arguments": [],
        "options": ["-h", "--version"],
        "model": [
            *("--model", "--tokenizer", "--dtype", "--adapter-path", "--no-generation-config"),
            *("--force", "--skip-check", "--backend"),
        ],
        "answers": [
            *("--no-thinking", "--seed", "--system-prompt", "--deterministic", "--temp"),
            *(
                "--top-p",
                "--top-k",
                "--min-p",
                "--xtc-probability",
                "--xtc-threshold",
                "--max-tokens",
            ),
        ],
        "memory and context": [
            *("--block-size", "--kv-cache-bytes", "--preallocate", "--kv-bits", "--window"),
            *("--num-sink-tokens", "--kv", "--max-model-len", "--wired-limit"),
        ],
        "what is kept": [
            "--prompt-cache-file",
            "--allow-other-model",
            "--cache-dir",
            "--cache-dir-size",
            "--cache-dir-ttl",
            "--cache-dir-writes",
        ],
        "speed": [
            *("--draft-model", "--prefill-step-size", "--num-draft-tokens", "--matmul"),
            "--prefill-step-seconds",
        ],
        "the chat": ["--hide-thinking", "--plain", "--json", "--verbose"],
    }
    assert text.startswith("usage: chat [options] [model] [message]\n")
    assert "mlx-community/Qwen3-0.6B-4bit\n" in text


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0"),
        (4_096, "4,096"),
        (999_999, "999,999"),
        (6_000_000, "6 million"),
        (6_168_816, "6.2 million"),
        (1_234_000_000, "1.2 billion"),
        (2_000_000_000_000, "2,000 billion"),
    ],
)
def test_large_numbers_of_tokens_are_said_in_words(number: int, words: str):
    assert in_words(number) == words
