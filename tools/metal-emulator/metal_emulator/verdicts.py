"""Judges the results of runs: each function raises the exception that says what a kernel did
wrong.
"""

from __future__ import annotations

import math
import signal

import mlx.core as mx
import numpy as np

from metal_emulator.checks import Call, Ranges
from metal_emulator.compiled import CompiledKernel
from metal_emulator.errors import (
    BarrierError,
    DataRace,
    EmulatorError,
    ForbiddenWrite,
    LaunchError,
    MemoryFault,
    OrderDependence,
    TimeLimit,
    UndefinedResult,
    UnwrittenOutput,
    UnwrittenRead,
)
from metal_emulator.launch import (
    DIVERGENCE,
    DONE,
    FAULT,
    MEMORY_FAULT,
    RACE,
    TIME_LIMIT,
    TOO_MUCH_MEMORY,
    UNDEFINED,
    UNWRITTEN_READ,
    GuardedBuffer,
    Report,
    Run,
)
from metal_emulator.signature import Instance

# Bytes of the outputs, and of the inputs that changed.
Result = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


# What a check in the running kernel found.
CHECKED: dict[int, type[EmulatorError]] = {
    MEMORY_FAULT: MemoryFault,
    RACE: DataRace,
    UNWRITTEN_READ: UnwrittenRead,
    UNDEFINED: UndefinedResult,
}


def check_report(
    call: Call,
    report: Report,
    buffers: dict[str, GuardedBuffer],
    compiled: CompiledKernel,
    order: str,
) -> None:
    if report.outcome == DONE:
        return
    who = f"thread {tuple(report.thread)} of threadgroup {tuple(report.threadgroup)}"
    message = report.message.decode(errors="replace")
    if report.outcome == DIVERGENCE:
        raise BarrierError(
            f"[{call.kernel}] the threads of threadgroup {tuple(report.threadgroup)} don't meet: "
            f"{message}"
        )
    if report.outcome == TOO_MUCH_MEMORY:
        raise LaunchError(f"[{call.kernel}] {message}")
    where = _where(report, compiled)
    if report.outcome == TIME_LIMIT:
        raise TimeLimit(f"[{call.kernel}] did not end in time; {who} was running{where}")
    if report.outcome == FAULT:
        raise MemoryFault(
            f"[{call.kernel}] {who} {_fault(report, buffers, message)}{where} ({order} order)"
        )
    if report.outcome in CHECKED:
        other = compiled.line_of(report.other_code) if report.outcome == RACE else None
        message = message.replace("@", f" in line {other}" if other else "")
        raise CHECKED[report.outcome](f"[{call.kernel}] {who} {message}{where} ({order} order)")
    raise EmulatorError(f"[{call.kernel}] the runtime failed: outcome {report.outcome} {message}")


def _where(report: Report, compiled: CompiledKernel) -> str:
    line = compiled.line_of(report.code) if report.has_code else None
    said = "in"
    if line is None:
        # A shuffle is its own place; of others the last one is known that they passed.
        line = report.last_line
        said = "in" if report.outcome == UNDEFINED and not report.has_code else "after"
    if not 0 < line <= len(compiled.lines):
        return ""
    return f", {said} line {line}: {compiled.lines[line - 1].strip()}"


def _fault(report: Report, buffers: dict[str, GuardedBuffer], message: str) -> str:
    if report.signal in (signal.SIGILL, signal.SIGTRAP):
        return "used a misaligned pointer"
    if report.signal == signal.SIGFPE:
        return "divided an integer by zero"
    verb = {0: "read", 1: "wrote"}.get(report.is_write, "accessed")
    if message:
        return f"{verb} {message}"
    for name, buffer in buffers.items():
        if not buffer.owns(report.address):
            continue
        offset = report.address - buffer.address
        if 0 <= offset < buffer.nbytes:
            return f"wrote byte {offset} of {name}, which it may only read"
        return f"{verb} byte {offset} of {name}, which has {buffer.nbytes} bytes"
    return f"{verb} address {report.address:#x}, far from any buffer"


def margin_faults(call: Call, buffers: dict[str, GuardedBuffer], poison: int) -> list[str]:
    """Between a buffer and its guards lie a few bytes of the same page; nobody may have written
    them.
    """
    return [
        f"[{call.kernel}] a thread wrote right {where} {name} ({buffer.nbytes} bytes)"
        for name, buffer in buffers.items()
        for where, margin in (("before", buffer.before), ("behind", buffer.behind))
        if (margin != poison & 0xFF).any()
    ]


def check_written(
    call: Call,
    instance: Instance,
    results: list[Result],
    runs: list[Run],
    shapes: list[tuple[int, ...]],
) -> None:
    for name, shape, dtype in zip(
        instance.kernel.output_names, shapes, instance.output_dtypes, strict=True
    ):
        # In one run alone, a small integer may well be what the poison looks like; in two, with two
        # poisons, not.
        if len(runs) == 1 and dtype.size < 4 and not mx.issubdtype(dtype, mx.floating):
            continue
        untouched = np.ones(math.prod(shape), bool)
        for (outputs, _), run in zip(results, runs, strict=True):
            pattern = poison_bytes(run.poison, len(outputs[name]))
            untouched &= (outputs[name] == pattern).reshape(-1, dtype.size).all(axis=1)
        if untouched.any():
            first = tuple(int(i) for i in np.unravel_index(int(untouched.argmax()), shape))
            raise UnwrittenOutput(
                f"[{call.kernel}] {int(untouched.sum())} of {len(untouched)} elements of {name} "
                "were not written, "
                f"the first at {first}"
            )


def poison_bytes(poison: int, nbytes: int) -> np.ndarray:
    return np.full(-(-nbytes // 4), poison, np.uint32).view(np.uint8)[:nbytes]


def check_same(
    call: Call, expected: Result, result: Result, expected_order: str, order: str
) -> None:
    for what, one, other in zip(("output", "input"), expected, result, strict=True):
        for name in sorted(one.keys() | other.keys()):
            if name in one and name in other and np.array_equal(one[name], other[name]):
                continue
            count = (
                ""
                if name not in one or name not in other
                else f" in {int((one[name] != other[name]).sum())} bytes"
            )
            raise OrderDependence(
                f"[{call.kernel}] {what} {name} differs{count} between threads run in "
                f"{expected_order} and in {order} "
                "order: a barrier is missing, two threads write the same place, or memory is read "
                "before it is written"
            )


def changed_ranges(before: np.ndarray, after: np.ndarray) -> list[tuple[int, int]]:
    """Byte ranges ``(start, stop)`` in which the two differ."""
    changed = np.flatnonzero(before != after)
    if len(changed) == 0:
        return []
    breaks = np.flatnonzero(np.diff(changed) > 1)
    starts, stops = changed[np.r_[0, breaks + 1]], changed[np.r_[breaks, len(changed) - 1]] + 1
    return [(int(start), int(stop)) for start, stop in zip(starts, stops, strict=True)]


def check_writes(
    call: Call,
    written: dict[str, list[tuple[int, int]]],
    allowed: dict[str, Ranges] | None,
    copied: tuple[str, ...],
) -> None:
    for name, ranges in written.items():
        if name in copied:
            raise ForbiddenWrite(
                f"[{call.kernel}] writes into {name}, which is not row-contiguous: MLX copies it, "
                "the write is lost"
            )
        permitted = None if allowed is None else allowed.get(name, [])
        if permitted is None:
            continue
        is_allowed = np.zeros(call.inputs[name].nbytes, bool)
        for start, stop in permitted:
            is_allowed[start:stop] = True
        for start, stop in ranges:
            if not is_allowed[start:stop].all():
                wrong = start + int((~is_allowed[start:stop]).argmax())
                raise ForbiddenWrite(
                    f"[{call.kernel}] wrote byte {wrong} of {name}, outside what it may write: "
                    f"{permitted}"
                )
