"""A file that is written atomically, beside what killed processes have left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged.block_store.directory import replaced_file

SAVE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from mlx_paged.block_store.directory import replaced_file

with replaced_file(Path(sys.argv[1])) as stream:
    stream.write(b"half")
    stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def save(file: Path, content: bytes = b"whole") -> None:
    with replaced_file(file) as stream:
        stream.write(content)


def test_what_a_killed_save_left_is_removed_by_the_next_one(tmp_path: Path):
    file = tmp_path / "talk.safetensors"
    save(file, b"earlier")
    for _ in range(2):
        subprocess.run([sys.executable, "-c", SAVE_AND_DIE, str(file)])
        assert len(list(tmp_path.iterdir())) == 2, "one is left, and it is the last"
    assert file.read_bytes() == b"earlier"
    save(file)
    assert list(tmp_path.iterdir()) == [file] and file.read_bytes() == b"whole"


@pytest.mark.parametrize("left", [".talk.{pid}.tmp", ".talk.{pid}-00000000-0.tmp"])
def test_a_file_of_an_earlier_process_with_the_same_id_stops_no_save(tmp_path: Path, left: str):
    (tmp_path / left.format(pid=os.getpid())).write_bytes(b"half")
    save(tmp_path / "talk")
    assert [path.name for path in tmp_path.iterdir()] == ["talk"]


def test_files_that_a_save_did_not_leave_stay(tmp_path: Path):
    others = {
        ".talk.tmp",
        ".talk.1x.tmp",
        "talk.999999999.tmp",
        ".other.999999999.tmp",
        f".talk.{os.getppid()}-00000000-1.tmp",  # a process that is still writing
    }
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / ".talk.999999999-0-1.tmp").mkdir()
    save(tmp_path / "talk")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, "talk", ".talk.999999999-0-1.tmp"}


def test_two_saves_of_one_file_at_once_both_succeed(tmp_path: Path):
    file = tmp_path / "talk"
    with replaced_file(file) as first:
        first.write(b"first")
        save(file, b"second")
    assert file.read_bytes() == b"first" and list(tmp_path.iterdir()) == [file]
