"""``mlx-paged pull`` and ``rm`` against a hub on this machine."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.fake_hub import hub

from mlx_paged.loading import demo_model_path

NUM_BYTES = 30 * 2**20


@pytest.fixture
def repositories(tmp_path: Path) -> Path:
    """A hub's folder with the demo model, and with a repository that has no weights of ours."""
    root = tmp_path / "hub"
    shutil.copytree(demo_model_path(), root / "owner" / "tiny")
    # The hub's client keeps what it has received in pieces of 10 MB.
    with (root / "owner" / "tiny" / "model.safetensors").open("r+b") as file:
        file.truncate(NUM_BYTES)
    (root / "owner" / "gguf").mkdir()
    (root / "owner" / "gguf" / "config.json").write_text("{}")
    return root


def run(
    *args: str, home: Path, endpoint: str = "http://127.0.0.1:9", stdin: int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlx_paged", *args],
        env={**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint},
        capture_output=True,
        stdin=stdin,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_model_is_pulled_the_download_is_resumed_and_the_model_removed(
    repositories: Path, tmp_path: Path
):
    home, requests = tmp_path / "home", list[str]()
    with hub(repositories, requests, broken=1) as endpoint:
        # The connection ends halfway through the weights: the hub's client asks for the rest.
        done = run("pull", "owner/tiny", home=home, endpoint=endpoint)
        assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.strip())
        weights = [each for each in requests if each.startswith("GET model.safetensors")]
        assert len(weights) == 2 and "bytes=" in weights[1]
        written = (folder / "model.safetensors").read_bytes()
        assert written == (repositories / "owner/tiny/model.safetensors").read_bytes()
        # A second pull by the hub's address downloads nothing.
        requests.clear()
        address = "https://huggingface.co/owner/tiny/tree/main"
        assert run("pull", address, home=home, endpoint=endpoint).stdout == done.stdout
        assert not [each for each in requests if each.startswith("GET")]
    # It is found by the last part of its name.
    removed = run("rm", "tiny", home=home)
    assert (removed.returncode, removed.stdout[:20]) == (0, "removed owner/tiny: ")
    assert not folder.exists()
    assert "can't be removed" in run("rm", "tiny", home=home).stderr


def test_what_can_not_be_pulled_is_one_line(repositories: Path, tmp_path: Path):
    with hub(repositories) as endpoint:
        for name, why in [
            ("owner/missing", "no such download"),
            ("owner/gguf", "has no model*.safetensors"),
            ("nonsense", "not a hub id of the form owner/name"),
            (str(tmp_path), "is on this machine already"),
        ]:
            done = run("pull", name, home=tmp_path / "home", endpoint=endpoint)
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            assert done.returncode == 2 and len(lines) == 1 and why in lines[0], done.stderr


def test_in_a_terminal_rm_asks_first(repositories: Path, tmp_path: Path):
    home = tmp_path / "home"
    with hub(repositories) as endpoint:
        folder = Path(run("pull", "owner/tiny", home=home, endpoint=endpoint).stdout.strip())
    writer, terminal = pty.openpty()
    try:
        os.write(writer, b"n\n")
        declined = run("rm", "owner/tiny", home=home, stdin=terminal)
        assert declined.returncode == 1 and "Remove owner/tiny, " in declined.stderr
        assert folder.exists()
        os.write(writer, b"y\n")
        assert run("rm", "owner/tiny", home=home, stdin=terminal).returncode == 0
        assert not folder.exists()
    finally:
        os.close(writer)
        os.close(terminal)


def test_a_folder_that_is_not_the_hubs_is_not_removed(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(demo_model_path(), folder)
    done = run("rm", str(folder), home=tmp_path / "home")
    assert done.returncode == 2 and "remove its files yourself" in done.stderr
    assert (folder / "config.json").exists()
