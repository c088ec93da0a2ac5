"""The script that made the demo model runs, resumes where it stopped, and writes a model that
loads; that of its head writes a head that loads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged import demo_model_path, generate, load
from mlx_paged.loading import load_draft_model
from mlx_paged.models.mlx_lm.draft_head import DraftHead

SCRIPTS = Path(__file__).parents[2] / "examples" / "demo_model"


def train(*arguments: object, script: str = "train.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_small_run_writes_a_model_that_loads_and_the_same_command_goes_on_from_it(tmp_path: Path):
    folders = ["--work-dir", tmp_path / "work", "--out", tmp_path / "model"]
    first = train("--smoke", *folders)
    assert first.returncode == 0, first.stderr
    steps_done = json.loads((tmp_path / "model" / "training.json").read_text())["lessons"][-1][
        "steps_done"
    ]
    assert steps_done == len((tmp_path / "work" / "log.jsonl").read_text().splitlines()) > 0
    model, tokenizer = load(tmp_path / "model")
    assert isinstance(generate(model, tokenizer, "hello", max_tokens=3), str)
    again = train("--smoke", *folders)
    assert again.returncode == 0 and f"step {steps_done} of {steps_done}" in again.stderr


@pytest.mark.slow
def test_a_small_run_writes_a_head_that_loads(tmp_path: Path):
    sizes = ["--steps", 2, "--batch-tokens", 256, "--longest", 128, "--depth", 2]
    file = tmp_path / "head" / "mtp.safetensors"
    done = train("--model", demo_model_path(), "--out", file, *sizes, script="train_head.py")
    assert done.returncode == 0, done.stderr
    model, tokenizer = load(demo_model_path())
    assert isinstance(load_draft_model(file.parent, tokenizer, model), DraftHead)


def test_mistakes_are_one_line(tmp_path: Path):
    done = train("--export", "--work-dir", tmp_path, "--out", tmp_path / "model")
    assert done.returncode == 2 and done.stderr.startswith("train.py: --export needs a checkpoint")
    assert "Traceback" not in done.stderr
    done = train("--model", tmp_path, script="train_head.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"train_head.py: --model {tmp_path} holds no config.json")
