"""mlx-lm's server answers with an attached model what it answers without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_answers_of_mlx_lms_server_are_the_same():
    program = Path(__file__).with_name("serve_with_mlx_lm.py")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert len(answers["stock"]) == 10 and all(answers["stock"])
    assert answers["attached"] == answers["stock"]
