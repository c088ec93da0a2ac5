"""What a user should hear once: another way than the usual one is taken."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def say_once(message: str) -> None:
    """Warn with ``message`` the first time that it comes."""
    warnings.warn(message, stacklevel=3)
