"""The families of fuzzed inputs, and which share of the cases each has."""

from __future__ import annotations

from fuzz_library import library_case
from fuzz_requests import request_case
from fuzzing import Family

FAMILIES: dict[str, Family] = {"library": library_case, "requests": request_case}
SHARES = {"library": 0.5, "requests": 0.2}
DEADLINES = {"library": 20.0, "requests": 30.0}  # seconds
