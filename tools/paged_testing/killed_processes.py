"""Processes that play a role until they are killed, and what they wrote down before that.

Each role is a function ``role(log, stop, *arguments)``: it says what it has done in its log, and
ends when ``stop`` exists, if nobody kills it before.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# A process made by the server of forks has everything imported, and costs milliseconds. Apple's
# frameworks don't survive a fork.
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
_SECONDS_TO_START = 60.0
_SECONDS_TO_STOP = 60.0


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


def make_context(*preloaded: str) -> Any:
    """What processes are made from.

    Args:
        preloaded: modules that each of them has imported when it begins.
    """
    context = multiprocessing.get_context(_METHOD)
    if _METHOD == "forkserver":
        # The server has the path of its environment alone.
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        context.set_forkserver_preload(list(preloaded))
    return context


def random_moments(source: random.Random, longest: float) -> Iterator[float]:
    """Seconds to wait before each kill; half of them are short, so that starts are hit, too."""
    while True:
        yield source.uniform(0.0, longest if source.random() < 0.5 else longest / 8)
