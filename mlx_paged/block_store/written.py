"""``WrittenBytes``: how many bytes all processes have written to a folder, in total and in the last
24 hours. They wear out an SSD, and a limit can be set on them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
import time
from collections import Counter
from typing import NamedTuple

from mlx_paged.argument_values import is_plain_integer
from mlx_paged.block_store.directory import Directory
from mlx_paged.block_store.errors import BadBlockFileError
from mlx_paged.block_store.layout import WRITTEN_NAME, BlockLayout

_SECONDS_BETWEEN_UPDATES = 10.0
_SECONDS_OF_AN_HOUR = 3600
_HOURS_OF_A_DAY = 24


class Written(NamedTuple):
    """What was written to a folder.

    Attributes:
        nbytes: in total.
        nbytes_last_day: in the last 24 hours, and in up to an hour before.
        since: when the total was 0, in seconds since 1970.
    """

    nbytes: int
    nbytes_last_day: int
    since: float


class WrittenBytes:
    """Counts the bytes that this process writes, and shares the sums with others in a file of the
    folder. Any thread may call it.

    The file is updated every ten seconds while something is written. A killed process loses what it
    has not added yet, and a damaged file begins with zero again. Failures are ignored.

    Attributes:
        nbytes_last_day: the bytes of all processes in the last 24 hours, as of the last call.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._new: Counter[int] = Counter()  # by hour, not in the file yet
        self._known = _Sums(0, time.time(), Counter())  # what the file had
        self._updated = -float("inf")
        self.nbytes_last_day = 0
        self.update()

    def add(self, nbytes: int) -> None:
        """This process has written so much more."""
        with self._lock:
            self._new[_hour()] += nbytes
        self.now()

    def now(self) -> Written:
        """The sums, with those of other processes as of the last update."""
        with self._lock:
            self.nbytes_last_day = _of_last_day(self._known.hours + self._new).total()
            nbytes = self._known.nbytes + self._new.total()
            return Written(nbytes, self.nbytes_last_day, self._known.since)

    def update(self, is_due: bool = True) -> None:
        """Add the new bytes to the file, and read what others have added.

        Args:
            is_due: do it now; otherwise only if the last time was some seconds ago.
        """
        if not is_due and time.monotonic() - self._updated < _SECONDS_BETWEEN_UPDATES:
            return
        self._updated = time.monotonic()
        with contextlib.suppress(OSError):
            self._exchange()
        self.now()

    def _exchange(self) -> None:
        top = Directory.at(self._layout.folder)
        with self._lock:
            new = self._new.copy()
        if not new:
            known = _read(top) or self._known
        else:
            with top.locked(fcntl.LOCK_EX):
                known = _read(top) or _Sums(0, self._known.since, Counter())
                hours = _of_last_day(known.hours + new)
                known = _Sums(known.nbytes + new.total(), known.since, hours)
                top.write_aside(WRITTEN_NAME, [known.as_json()])
        with self._lock:
            self._new -= new
            self._known = known


class _Sums(NamedTuple):
    nbytes: int
    since: float
    hours: Counter[int]  # bytes by hours since 1970

    def as_json(self) -> bytes:
        fields = {"nbytes": self.nbytes, "since": self.since, "hours": self.hours}
        return json.dumps(fields).encode()


def _read(top: Directory) -> _Sums | None:
    """The content of the file; ``None`` if there is none, or it is damaged."""
    try:
        fields = json.loads(top.read(WRITTEN_NAME))
        hours = Counter({int(hour): nbytes for hour, nbytes in fields["hours"].items()})
        sums = _Sums(fields["nbytes"], float(fields["since"]), hours)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, BadBlockFileError):
        return None
    is_right = all(is_plain_integer(nbytes, 0) for nbytes in (sums.nbytes, *hours.values()))
    return sums if is_right else None


def _hour() -> int:
    return int(time.time() // _SECONDS_OF_AN_HOUR)


def _of_last_day(hours: Counter[int]) -> Counter[int]:
    """The hours that are not over for a day. A time in the future is wrong, and is left out."""
    now = _hour()
    return Counter(
        {hour: nbytes for hour, nbytes in hours.items() if 0 <= now - hour <= _HOURS_OF_A_DAY}
    )
