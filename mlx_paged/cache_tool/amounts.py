"""Sizes, times and ages as the tool prints them."""

from __future__ import annotations

import time

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))  # seconds


def in_bytes(nbytes: int) -> str:
    """A number of bytes, in a decimal unit: ``0 B``, ``512 B``, ``1.8 MB``, ``20 GB``."""
    value, unit = float(nbytes), 0
    # 999.5 kB would be printed as 1000 kB.
    while value >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 1 if unit and value < 9.95 else 0
    return f"{value:.{digits}f} {_BYTE_UNITS[unit]}"


def in_short(seconds: float) -> str:
    """A duration in its largest unit, rounded down: ``0 s``, ``59 s``, ``3 min``, ``47 h``."""
    for length, unit in _AGES:
        # Hours and days begin at two: "119 min" is more precise than "1 h".
        if seconds >= (2 * length if length > 60 else length):
            return f"{int(seconds // length)} {unit}"
    return "0 s"


def in_full(moment: float, now: float) -> str:
    """A time, as local date and time, and its distance from now."""
    try:
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (OverflowError, ValueError, OSError):
        date = f"{moment:g} s after 1970"  # a file with an invalid time
    apart = in_short(abs(moment - now))
    return f"{date} (in {apart})" if moment > now else f"{date} ({apart} ago)"


def counted(number: int, thing: str, things: str = "") -> str:
    """``1 block``, ``1,024 blocks``; ``things`` is the plural if it isn't made with an s."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"
