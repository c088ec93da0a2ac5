"""Timing loops that may have a step under way: sides take turns of several steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx

Step: TypeAlias = Callable[[], Any]

NUM_FIRST_STEPS = 2  # of a turn, not counted: a loop that runs ahead has one ready


def take_turns(steps: dict[str, Step], num_turns: int, num_steps: int) -> dict[str, list[float]]:
    """Milliseconds per step of each side, one figure per turn.

    A machine that speeds up or slows down does so for all sides.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(num_turns):
        for name, step in steps.items():
            for _ in range(NUM_FIRST_STEPS):
                step()
            start = time.perf_counter()
            for _ in range(num_steps):
                step()
            times[name].append((time.perf_counter() - start) / num_steps * 1e3)
            mx.synchronize()
    return times


def median_ratio(times: list[float], others: list[float]) -> float:
    """The median, over the turns, of one side's time over another's in the same turn."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def median_and_fastest(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"median": statistics.median(turns), "fastest": min(turns)}
        for name, turns in times.items()
    }


def num_steps_taken(num_turns: int, num_steps: int) -> int:
    """How many steps :func:`take_turns` takes of each side."""
    return num_turns * (num_steps + NUM_FIRST_STEPS)
