"""Which tests are in which lane: pyproject.toml describes the markers, CONTRIBUTING.md their use.

A lane is a rule, so that a new file of tests is in the right ones by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch

import pytest

# Whole files that few changes can break: the emulator itself, fuzzed inputs, killed processes, the
# page in a browser, the benchmarks.
GATE = (
    "tools/metal-emulator/tests/*",
    "tests/fuzz/*",
    "tests/real/*",
    "tests/block_store/test_killed_writers.py",
    "tests/server/test_page_in_a_browser.py",
    "tests/demo_model/test_demo_model_training.py",
    "tests/block_store/test_block_store_benchmark.py",
    "tests/test_*benchmark*.py",
    "tests/test_charts.py",
    "tests/test_cost_model.py",
    "tests/test_on_a_mac_script.py",
)
NUM_SMOKE_TESTS = 2  # of each file, but for these, whose first tests take seconds
NOT_SMOKE = (
    "tests/kernels/test_*_on_kernels.py",
    "tests/kernels/test_kernel_planted_faults.py",
    "tests/kernels/test_kernel_groups.py",
    "tests/kernels/test_self_check.py",
    "tests/kernels/test_unused_slots.py",
    "tests/chat/test_chat_interrupts.py",
    "tests/distributed/test_the_end_of_a_rank.py",
    "tests/engine/test_budget_of_states.py",
    "tests/engine/test_clocked_budgets.py",
    "tests/engine/test_engine_windows.py",
    "tests/engine/test_last_sequence.py",
    "tests/engine/test_preallocate.py",
    "tests/engine/test_steady_memory.py",
    "tests/engine/test_users.py",
    "tests/server/test_turns.py",
    "tests/server/test_users_shares.py",
    "tests/test_llm.py",
)


def mark_lanes(items: Iterable[pytest.Item]) -> None:
    """Mark tests of the files of ``GATE`` as ``gate`` and ``slow``, and the first quick tests of
    each other file, but for those of ``NOT_SMOKE``, as ``smoke``.
    """
    num_left: dict[str, int] = {}
    for item in items:
        file = item.location[0]
        if _is_one_of(file, GATE):
            item.add_marker(pytest.mark.gate)
            item.add_marker(pytest.mark.slow)
        elif item.get_closest_marker("slow") is None:
            left = num_left.setdefault(file, 0 if _is_one_of(file, NOT_SMOKE) else NUM_SMOKE_TESTS)
            if left:
                num_left[file] = left - 1
                item.add_marker(pytest.mark.smoke)


def _is_one_of(file: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)
