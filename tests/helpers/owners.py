"""Files and folders of other users: real ones where the tests run as root, and elsewhere what the
system says of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

ANOTHER = 54321
"""The id of a user that does not exist."""


def give_away_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """What gives a file or a folder to ``ANOTHER``."""
    if os.geteuid() == 0:
        return lambda path: os.chown(path, ANOTHER, -1, follow_symlinks=False)
    given: set[tuple[int, int]] = set()
    held: list[int] = []  # open, so that no other file gets the number of one that is removed

    def pretend(name: str) -> None:
        function = getattr(os, name)

        def status_of(*arguments: object, **options: object) -> os.stat_result:
            status: os.stat_result = function(*arguments, **options)
            if (status.st_dev, status.st_ino) not in given:
                return status
            values = list(status)
            values[4] = ANOTHER
            times = {each: getattr(status, each) for each in dir(status) if "time" in each}
            return os.stat_result(values, times)

        monkeypatch.setattr(os, name, status_of)

    for name in ("stat", "lstat", "fstat"):
        pretend(name)

    def give_away(path: Path) -> None:
        status = path.lstat()
        held.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
        given.add((status.st_dev, status.st_ino))

    return give_away
