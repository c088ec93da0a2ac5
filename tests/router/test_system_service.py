"""``mlx-paged service``: what is written for launchd and systemd, and what they are told."""

from __future__ import annotations

import configparser
import os
import plistlib
import shutil
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from mlx_paged.router import system_service
from mlx_paged.router.system_service import Manager, job_of, launchd, main, systemd


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / 'keys with $ % and " in the name'
    file.write_text("alice secret-of-alice\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands of both managers, which write their arguments to a file; ``bootout`` and
    ``disable`` fail.
    """
    said = tmp_path / "said"
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("launchctl", "systemctl", "journalctl", "tail"):
        program = folder / name
        program.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {said}\n'
            'case "$*" in *bootout*|*disable*) echo "not loaded" >&2; exit 3;; esac\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return said


def managers(home: Path) -> list[Manager]:
    return [launchd(home, 501), systemd(home)]


def test_the_plist_is_valid_and_holds_no_key(tmp_path: Path, key_file: Path):
    job = job_of(["--model", "demo", "--api-key-file", str(key_file), "--drain-seconds", "60"])
    manager = launchd(tmp_path, 501)
    text = manager.render(job)
    plist = plistlib.loads(text)
    assert b"secret-of-alice" not in text
    assert plist["Label"] == "mlx-paged" == manager.file.stem
    assert plist["ProgramArguments"][0] == sys.executable
    assert plist["ProgramArguments"][-1] == "60" and str(key_file) in plist["ProgramArguments"]
    # launchd kills what is not done by then.
    assert plist["ExitTimeOut"] == 75
    # A crash starts it again, an orderly end does not.
    assert plist["RunAtLoad"] and plist["KeepAlive"] == {"SuccessfulExit": False}
    assert plist["Umask"] == 0o077 and plist["WorkingDirectory"] == str(Path.cwd())
    assert Path(plist["StandardErrorPath"]).is_relative_to(tmp_path / "Library" / "Logs")


def test_the_unit_is_read_by_systemd_as_it_is_meant(tmp_path: Path, key_file: Path):
    job = job_of(["--model", "demo", "--api-key-file", str(key_file)])
    file = tmp_path / "mlx-paged.service"
    file.write_bytes(systemd(tmp_path).render(job))
    unit = configparser.RawConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(file)
    started = unit["Service"]["ExecStart"]
    assert "secret-of-alice" not in file.read_text()
    # systemd expands $ and %, and reads quotes.
    assert 'keys with $$ %% and \\" in the name' in started
    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Service"]["TimeoutStopSec"] == "45"
    if shutil.which("systemd-analyze"):
        checked = subprocess.run(
            ["systemd-analyze", "--user", "verify", str(file)],
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "mlx-paged.service" not in checked.stderr, checked.stderr


def test_variables_that_find_models_are_kept_and_tokens_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HOME", "/models of mine")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for manager in managers(tmp_path):
        text = manager.render(job_of([])).decode()
        assert "/models of mine" in text and "hf_secret" not in text


def test_a_key_in_the_arguments_is_refused_and_nothing_is_written(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["install", "--api-key", "alice hunter2"]) == 2
    said = capsys.readouterr().err
    assert "--api-key-file" in said and "hunter2" not in said and said.count("\n") == 1
    assert main(["install", "--no-such-flag"]) == 2
    assert main(["install", "--api-key-file", str(tmp_path / "missing")]) == 2
    assert not programs.exists() and not (tmp_path / "home").exists()


def test_a_key_file_that_others_can_read_is_refused(
    programs: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
):
    key_file.chmod(0o644)
    assert main(["install", "--api-key-file", str(key_file)]) == 2
    assert "chmod 600" in capsys.readouterr().err and not programs.exists()


@pytest.mark.parametrize(
    ("system", "installed", "stopped", "logs"),
    [
        (
            "darwin",
            ["bootout gui/{uid}/mlx-paged", "enable gui/{uid}/mlx-paged", "bootstrap gui/{uid} "],
            "launchctl bootout gui/{uid}/mlx-paged",
            "tail -n 100 -F ",
        ),
        (
            "linux",
            ["--user daemon-reload", "--user enable mlx-paged.service", "--user restart mlx-paged"],
            "systemctl --user stop mlx-paged.service",
            "journalctl --user --unit mlx-paged.service",
        ),
    ],
)
def test_each_verb_tells_the_manager(
    programs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    system: str,
    installed: list[str],
    stopped: str,
    logs: str,
):
    monkeypatch.setattr(system_service.sys, "platform", system)

    def said() -> list[str]:
        lines = programs.read_text().splitlines()
        programs.unlink()
        return lines

    uid = os.getuid()
    assert main(["start"]) == 2 and "no service is installed" in capsys.readouterr().err
    assert main(["install", "--port", "0"]) == 0
    lines = said()
    assert len(lines) == len(installed)
    for line, words in zip(lines, installed, strict=True):
        assert words.format(uid=uid) in line
    file = Path(capsys.readouterr().out.splitlines()[0].removeprefix("installed "))
    assert file.is_relative_to(tmp_path / "home") and b"--port" in file.read_bytes()
    # launchd refuses files that others can write.
    assert not stat.S_IMODE(file.stat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    assert main(["logs"]) == 0 and said()[0].startswith(logs)
    assert main(["status"]) == 0 and len(said()) == 1
    # What the manager says is the error.
    assert main(["stop"]) == (2 if system == "darwin" else 0)
    assert said() == [stopped.format(uid=uid)]
    assert ("failed: not loaded" in capsys.readouterr().err) == (system == "darwin")
    # A server that does not run is uninstalled all the same.
    assert main(["uninstall"]) == 0 and not file.exists()


def test_without_a_manager_the_way_out_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", "")
    assert main(["status"]) == 2
    assert "run mlx-paged serve yourself" in capsys.readouterr().err


def has_user_manager() -> bool:
    """Whether systemd runs for this user."""
    if not shutil.which("systemctl"):
        return False
    asked = ["systemctl", "--user", "is-system-running"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip() in ("running", "degraded")


@pytest.mark.skipif(not has_user_manager(), reason="systemd does not run for this user")
def test_systemd_starts_the_server_again_after_a_crash_and_stops_it():
    url = "http://127.0.0.1:18473/health"

    def answers() -> bool:
        try:
            return bool(urllib.request.urlopen(url, timeout=1).status == 200)
        except OSError:
            return False

    def wait_for(wanted: bool) -> None:
        deadline = time.monotonic() + 60
        while answers() is not wanted:
            assert time.monotonic() < deadline
            time.sleep(0.2)

    assert main(["install", "--port", "18473"]) == 0
    try:
        wait_for(True)
        subprocess.run(["systemctl", "--user", "kill", "-s", "KILL", "mlx-paged"], check=True)
        wait_for(False)
        wait_for(True)
        assert main(["stop"]) == 0
        wait_for(False)
    finally:
        assert main(["uninstall"]) == 0
