"""The examples run as they stand, on the bundled model."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, capsys) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_many_requests_share_their_beginning_fork_and_stop(capsys):
    out = run("many_requests.py", capsys)
    assert "-> The code of stone is 905." in out and "-> Your name is Tom." in out
    assert out.count("(32 tokens were there already)") == 3
    assert "0 blocks in use after it" in out
    assert out.count("\ncompletion ") == 3
    assert "stopped: '20 21 22 23 24 25 26 27 28 29 30" in out and out.endswith("(abort)\n")


def test_many_sequences_share_a_cache_and_fork(capsys):
    out = run("many_sequences.py", capsys)
    assert "-> The code of stone is 905." in out
    assert "after a fork: " in out
