"""Processes that play roles in one folder, are killed at random moments, and what they wrote down
before that.

Each role is a function ``role(log, stop, *arguments)``: it says what it has done in its log, and
ends when ``stop`` exists, if it is not killed before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# A process made by the server of forks has everything imported, and costs milliseconds. Apple's
# frameworks don't survive a fork.
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
# A test run has one such server, so all roles are here.
_PRELOADED = ("paged_testing.killed_engines", "paged_testing.killed_writers")
_SECONDS_TO_START = 60.0
_SECONDS_TO_STOP = 60.0
_SECONDS_TO_END = 120.0


class Log:
    """Lines that are in their file as soon as they are said, and stay there when the process that
    said them is killed.
    """

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, what: str, *facts: Any) -> None:
        os.write(self._file, (json.dumps([what, *facts]) + "\n").encode())


def read_log(path: Path) -> list[list[Any]]:
    """What was said, as lists; an unfinished last line is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


class Actor:
    """A process that plays a role.

    Args:
        role: a function of a module.
        folder: for its log; its name is made unique.
    """

    def __init__(self, context: Any, role: Callable[..., None], folder: Path, *arguments: Any):
        self.role = role
        self._log = folder / f"{role.__name__}-{os.urandom(6).hex()}.log"
        self._stop = self._log.with_suffix(".stop")
        self.process: BaseProcess = context.Process(
            target=_play, args=(role, self._log, self._stop, arguments), daemon=True
        )
        self.process.start()

    def said(self) -> list[list[Any]]:
        return read_log(self._log)

    def wait_until_it_plays(self) -> None:
        deadline = time.monotonic() + _SECONDS_TO_START
        while not self._log.exists() or not self._log.stat().st_size:
            if not self.process.is_alive() or time.monotonic() > deadline:
                raise RuntimeError(f"{self._log.stem} did not start")
            time.sleep(0.002)

    def kill(self) -> bool:
        """End it with SIGKILL; whether it was alive until then."""
        self.process.kill()
        self.process.join(_SECONDS_TO_STOP)
        return self.process.exitcode == -9

    def end(self) -> None:
        """Ask it to stop, and wait."""
        self._stop.touch()
        self.process.join(_SECONDS_TO_STOP)
        if self.process.is_alive():
            self.process.kill()

    def crash(self) -> str | None:
        """Why it ended by itself; ``None`` if it did not, or as it should."""
        for what, *facts in self.said():
            if what == "crash":
                return str(facts[0])
        code = self.process.exitcode
        return None if code in (None, 0, -9) else f"{self._log.stem} ended with {code}"

    def forget(self) -> None:
        self._log.unlink(missing_ok=True)
        self._stop.unlink(missing_ok=True)


def _play(role: Callable[..., None], path: Path, stop: Path, arguments: tuple[Any, ...]) -> None:
    log = Log(path)
    log.say("begins")
    try:
        role(log, stop, *arguments)
    except BaseException:
        log.say("crash", traceback.format_exc())
        raise


def make_context() -> Any:
    """What processes are made from."""
    context = multiprocessing.get_context(_METHOD)
    if _METHOD == "forkserver":
        context.set_forkserver_preload(list(_PRELOADED))
        # The server finds modules by its environment alone, which it gets when it starts.
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            forkserver.ensure_running()
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before
    return context


@dataclasses.dataclass
class Findings:
    """What a run of kills has found.

    Attributes:
        num_kills: processes that were killed while they were at work.
        killed_while: what they had said last, with their role.
        num_looks: how often a process was started afterwards to look at what was left.
        counts: what roles and looks have counted, by name.
        problems: what must not happen, in words; empty if all is well.
    """

    num_kills: int = 0
    killed_while: Counter[str] = dataclasses.field(default_factory=Counter)
    num_looks: int = 0
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    problems: list[str] = dataclasses.field(default_factory=list)


class Kills:
    """Kills processes that work in one folder at random moments, while others read there.

    Args:
        folder: an empty one, for the folder that all work in, and the logs.
        longest: seconds between the start of one process and the end of another, at most; half of
            the times are less than an eighth of it, so that starts are hit, too.
        seed: of all that is random but the clock.
    """

    def __init__(self, folder: Path, longest: float, seed: int):
        self.findings = Findings()
        self.folder = folder / "cache"
        self.source = random.Random(seed)
        self.at_work: list[Actor] = []
        self._longest = longest
        self._logs = folder / "logs"
        self._logs.mkdir()
        self._context = make_context()

    def run(self, num_kills: int, kills_per_look: int = 10) -> Findings:
        """Kill that many processes, or a few more; what was found."""
        while self.findings.num_kills < num_kills:
            readers = self.start_readers()
            for _ in range(kills_per_look):
                self.fill_up()
                is_short = self.source.random() < 0.5
                time.sleep(self.source.uniform(0.0, self._longest / (8 if is_short else 1)))
                self._kill(self.source.choice(self.at_work))
                if self.source.random() < 0.1:
                    self._leave_index()
            for actor in list(self.at_work):
                self._kill(actor)
            for reader in readers:
                reader.end()
                self._note(reader)
            self.look()
            self.findings.num_looks += 1
        return self.findings

    def start_readers(self) -> list[Actor]:
        """Processes that are not killed, but told to end before each look."""
        raise NotImplementedError

    def fill_up(self) -> None:
        """See to it that enough processes are ``at_work``."""
        raise NotImplementedError

    def look(self) -> None:
        """See what is left now that no other process uses the folder."""
        raise NotImplementedError

    def note(self, what: str, facts: list[Any]) -> None:
        """Take down something that a process has said."""
        raise NotImplementedError

    def start(self, role: Callable[..., None], *arguments: Any) -> Actor:
        """A process that plays a role in the folder; a seed is its last argument."""
        seed = self.source.randrange(2**32)
        actor = Actor(self._context, role, self._logs, self.folder, *arguments, seed)
        actor.wait_until_it_plays()
        return actor

    def play(self, role: Callable[..., None], *arguments: Any) -> None:
        """Let a process play a role to its end."""
        actor = self.start(role, *arguments)
        actor.process.join(_SECONDS_TO_END)
        if actor.kill():
            self.findings.problems.append(f"{role.__name__} did not end")
        self._note(actor)

    def _kill(self, actor: Actor) -> None:
        was_at_work = actor.kill()
        self.at_work.remove(actor)
        last = self._note(actor)
        if was_at_work:
            self.findings.num_kills += 1
            self.findings.killed_while[f"{actor.role.__name__}: {last}"] += 1

    def _note(self, actor: Actor) -> str:
        """Take down what a process said before its end; what it said last."""
        said = actor.said()
        crash = actor.crash()
        if crash is not None:
            self.findings.problems.append(crash)
        for what, *facts in said:
            if what in ("wrong", "failure", "bad"):
                self.findings.problems.append(f"{actor.role.__name__}: {what} {facts}")
            elif what == "counts":
                self.findings.counts.update(facts[0])
            else:
                self.note(what, facts)
        actor.forget()
        return str(said[-1][0])

    def _leave_index(self) -> None:
        """As if an earlier version had been here, whose index is removed at the next start."""
        with contextlib.suppress(OSError):  # the folder is not there yet
            (self.folder / "index-v1.sqlite3").write_bytes(self.source.randbytes(5000))
