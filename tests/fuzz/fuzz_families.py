"""The families of fuzzed inputs, and which share of the cases each has."""

from __future__ import annotations

from fuzz_chat import chat_case
from fuzz_deterministic import deterministic_case
from fuzz_drafts import drafts_case
from fuzz_folders import folder_case
from fuzz_library import library_case
from fuzz_requests import request_case
from fuzz_server import server_case
from fuzzing import Family

FAMILIES: dict[str, Family] = {
    "library": library_case,
    "requests": request_case,
    "folders": folder_case,
    "chat": chat_case,
    "server": server_case,
    "drafts": drafts_case,
    "deterministic": deterministic_case,
}
# The server's cases are quick, and are counted by themselves. Those of drafts have 10 requests
# each, on two engines: the tests run a few, and --only drafts --count 200 runs 2,000 requests.
# Those of deterministic engines have 6, each of which also runs in an engine of its own.
SHARES = {
    "library": 0.5,
    "requests": 0.15,
    "folders": 0.2,
    "chat": 0.15,
    "server": 1.0,
    "drafts": 0.0,
    "deterministic": 0.0,
}
# Seconds; far beyond what any case takes on a busy machine, as only a hang is to be found.
DEADLINES = {
    "library": 60.0,
    "requests": 90.0,
    "folders": 60.0,
    "chat": 120.0,
    "server": 60.0,
    "drafts": 300.0,
    "deterministic": 300.0,
}
