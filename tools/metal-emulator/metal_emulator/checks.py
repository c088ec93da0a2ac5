"""How thoroughly a call is checked, and what may be written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

# What nobody has written yet, from run to run: NaN in float32, float16 and bfloat16 alike.
OUTPUT_POISONS = (0x7FE57FE5, 0xFFC3FFC3, 0x7FD97FD9)
SHARED_POISONS = (0x7FB67FB6, 0xFFA4FFA4, 0x7FEB7FEB)

# Byte ranges of an input that a call may write, or None: all of it.
Ranges = list[tuple[int, int]] | None


@dataclass(frozen=True)
class Call:
    """One call of a kernel: the element of a trace, and what a write rule decides on."""

    kernel: str
    inputs: dict[str, Any]  # the mx.array objects of the call, or LargeArray
    template: dict[str, Any]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    addresses: dict[str, int] = field(
        default_factory=dict
    )  # of the inputs' memory: views of one buffer share it
    outputs: dict[str, mx.array] = field(default_factory=dict)
    written_inputs: dict[str, list[tuple[int, int]]] = field(
        default_factory=dict
    )  # byte ranges that changed
    copied_inputs: tuple[str, ...] = ()  # not row-contiguous, so the kernel saw a copy
    counts: dict[str, int] = field(
        default_factory=dict
    )  # barriers, simdgroup operations, threadgroup bytes
    # Bytes by buffer, and those of "threadgroup" memory; only with Checks(count_accesses=True).
    loaded_bytes: dict[str, int] = field(default_factory=dict)
    stored_bytes: dict[str, int] = field(default_factory=dict)
    # Those that are loaded, each word of four bytes once per threadgroup: what caches can't spare.
    distinct_bytes: dict[str, int] = field(default_factory=dict)


WriteRule = Callable[[Call], dict[str, Ranges]]


@dataclass(frozen=True)
class Checks:
    """What is checked at each call.

    Attributes:
        orders: one run for each; with more than one, all runs must agree bit for bit, and buffers
            lie against a guard page with their end in one and with their start in the next.
        unwritten: every element of an output must be written.
        writable: says for a call which inputs it may write, and where; inputs it doesn't name can't
            be written. ``None`` lets a kernel write all of its inputs.
        num_workers: CPU threads; ``None`` is one per core.
        time_limit_s: of one run.
        watch_accesses: each load and store is held against the bounds of what it lies in, against
            what other threads did there since the last barrier, and against what was never
            written; slow, and in one thread of the CPU.
        count_accesses: the trace gets the bytes that threads load and store, by buffer; slow.
    """

    orders: tuple[str, ...] = ("ascending", "descending", "random")
    unwritten: bool = True
    writable: WriteRule | None = None
    num_workers: int | None = None
    time_limit_s: float = 120.0
    seed: int = 0
    watch_accesses: bool = True
    count_accesses: bool = False

    @classmethod
    def quick(cls, **changes: Any) -> Checks:
        """One run per call, with guard pages and poison, for long computations."""
        return replace(cls(orders=("ascending",), watch_accesses=False), **changes)
