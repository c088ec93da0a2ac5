"""``--cache-dir``: what the chat finds after a restart, and what it says of the disk."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from mlx_paged.block_store.block_files import BlockFiles
from mlx_paged.cli.chat.terminal import Screen

QUESTION = (
    "The code of apple is 4821. The code of pear is 1234. The code of plum is 2222. "
    "What is the code of apple?"
)
BUDGET = ["--kv-cache-bytes", "200blocks"]


def test_a_chat_that_starts_again_reads_its_conversation_from_disk(run_chat, tmp_path: Path):
    flags = [*BUDGET, "--cache-dir", str(tmp_path / "kv"), "--cache-dir-ttl", "7d"]
    status, first, error = run_chat(*flags, QUESTION)
    assert status == 0 and "from disk" not in error
    assert error.startswith("[bundled demo model | CPU | context: ")
    assert " | disk cache]\n" in error
    status, second, error = run_chat(*flags, "--cache-dir-size", "1G", QUESTION)
    assert (status, second) == (0, first)
    assert "| 48 of 55 prompt tokens reused, 48 of them from disk |" in error
    status, third, error = run_chat(*flags, "--cache-dir-size", "1G", "--verbose", QUESTION)
    assert third == first and "Prompt: 55 tokens (48 reused, 48 of them from disk)" in error
    assert f" 1.1 GB, unused blocks for 7 days, in {tmp_path}/kv]\n" in error


def test_stats_say_what_came_from_disk_and_what_lies_there(run_chat, tmp_path: Path):
    flags = [*BUDGET, "--cache-dir", str(tmp_path)]
    run_chat(*flags, QUESTION)
    status, _, error = run_chat(*flags, stdin=f"{QUESTION}\n/stats\n")
    assert status == 0
    assert (
        "disk cache: 48 of 55 prompt tokens found that were not in memory; blocks: 0 written, "
        "0 dropped, 0 corrupt, 0 evicted; 0 MB written\n" in error
    )
    _, _, error = run_chat(*BUDGET, stdin="hello\n/stats\n")
    assert "disk" not in error


def test_a_disk_that_fails_is_a_line_of_the_chat(
    run_chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(BlockFiles, "write", full)
    lines = f"{QUESTION}\n{QUESTION}\n{QUESTION}\n/stats\n"
    status, out, error = run_chat(*BUDGET, "--cache-dir", str(tmp_path), stdin=lines)
    assert status == 0 and out.count("The code of apple is 4821.") == 3
    said = [line for line in error.splitlines() if "No space left on device" in line]
    assert len(said) == 2, error
    assert said[0].endswith("; from now on K/V are kept in memory only, until it works again")
    assert said[1].startswith("disk: off, ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--cache-dir-size", "1G"],
            "--cache-dir-size 1073741824 is of no use without",
        ),
        (["--cache-dir-ttl", "7d"], "--cache-dir-ttl 604800.0 is of no use without"),
        (["--cache-dir", ""], "--cache-dir must be a folder, got ''"),
        (
            ["--cache-dir", "kv", "--cache-dir-size", "0"],
            "argument --cache-dir-size: must be",
        ),
        (
            ["--cache-dir", "kv", "--cache-dir-size", "9"],
            "--cache-dir-size of 9 bytes is too",
        ),
        (
            ["--cache-dir", "kv", "--cache-dir-writes", "5G"],
            "argument --cache-dir-writes: must be b",
        ),
        (["--cache-dir", "kv", "--cache-dir-ttl", "1y"], "argument --cache-dir-ttl: must be sec"),
        (["--cache-dir", "kv", "--kv", "basic"], "--cache-dir needs blocks, which kv='basic'"),
    ],
)
def test_a_wrong_flag_is_named_and_nothing_is_made(
    refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*flags, "hello")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_used_is_one_line(refused, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in refused("--cache-dir", str(tmp_path / "file"), "hello")


def test_a_warning_in_the_middle_of_an_answer_waits_for_the_end_of_its_line(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    screen = Screen({"TERM": "dumb"})
    screen.answer("The code")
    screen.warn("the disk is full")
    assert capsys.readouterr() == ("The code", "")
    screen.answer(" is 4.\n")
    assert capsys.readouterr() == (" is 4.\n", "the disk is full\n")
    screen.warn("another")
    assert capsys.readouterr() == ("", "another\n")
    # What is drawn of an answer is drawn again.
    screen = Screen({"TERM": "xterm"})
    screen.answer("The code")
    screen.warn("the disk is full")
    assert capsys.readouterr() == ("The code\n", "")
    screen.finish_answer()
    assert capsys.readouterr() == ("", "the disk is full\n")


def test_a_warning_beside_an_answer_that_goes_into_a_file_waits_for_nothing(
    capsys: pytest.CaptureFixture,
):
    screen = Screen({})
    screen.answer("The code")
    screen.warn("the disk is full")
    assert capsys.readouterr() == ("The code", "the disk is full\n")
