"""The runtime as Python sees it: guarded memory and one launch of a compiled kernel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from functools import cache

import numpy as np

from metal_emulator.compiler import build_runtime

DONE, FAULT, DIVERGENCE, TOO_MUCH_MEMORY, TIME_LIMIT, NO_MEMORY = range(6)
MEMORY_FAULT, RACE, UNWRITTEN_READ, UNDEFINED = range(6, 10)
MAX_BUFFERS = 31
ORDERS = {"ascending": 0, "descending": 1, "random": 2}


class Size3(Structure):
    _fields_ = [("x", c_uint32), ("y", c_uint32), ("z", c_uint32)]

    def __iter__(self) -> Iterator[int]:
        return iter((self.x, self.y, self.z))


class _Range(Structure):
    _fields_ = [
        ("begin", c_void_p),
        ("end", c_void_p),
        ("mapping_begin", c_void_p),
        ("mapping_end", c_void_p),
        ("name", c_char_p),
        ("element_bytes", c_int32),
        ("is_writable", c_int32),
    ]


class _Launch(Structure):
    _fields_ = [
        ("kernel", c_void_p),
        ("buffers", POINTER(c_void_p)),
        ("ranges", POINTER(_Range)),
        ("num_buffers", c_int32),
        ("grid", Size3),
        ("threadgroup", Size3),
        ("order", c_int32),
        ("seed", c_uint32),
        ("poison", c_uint32),
        ("num_workers", c_int32),
        ("start_aligned", c_int32),
        ("counts_accesses", c_int32),
        ("watches_accesses", c_int32),
        ("time_limit_s", c_double),
    ]


class Report(Structure):
    _fields_ = [
        ("outcome", c_int32),
        ("signal", c_int32),
        ("is_write", c_int32),
        ("address", c_uint64),
        ("threadgroup", Size3),
        ("thread", Size3),
        ("last_line", c_int32),
        ("code", c_int64),
        ("other_code", c_int64),
        ("has_code", c_int32),
        ("barriers", c_uint64),
        ("exchanges", c_uint64),
        ("threadgroup_bytes", c_uint64),
        ("loaded", c_uint64 * (MAX_BUFFERS + 1)),
        ("stored", c_uint64 * (MAX_BUFFERS + 1)),
        ("distinct", c_uint64 * (MAX_BUFFERS + 1)),
        ("message", c_char * 1024),
    ]


class _Mapping(Structure):
    _fields_ = [
        ("base", c_void_p),
        ("total", c_size_t),
        ("data", c_void_p),
        ("pages", c_void_p),
        ("pages_bytes", c_size_t),
    ]


@cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_runtime()))
    library.emulator_launch.argtypes = [POINTER(_Launch), POINTER(Report)]
    library.emulator_map.argtypes = [c_size_t, c_int32, POINTER(_Mapping)]
    library.emulator_protect.argtypes = [POINTER(_Mapping), c_int32]
    library.emulator_same.argtypes = [c_void_p, c_void_p, c_size_t]
    library.emulator_unmap.argtypes = [POINTER(_Mapping)]
    library.emulator_unmap.restype = None
    return library


MAX_IDLE_BYTES = 256 << 20
_idle_buffers: dict[tuple[int, bool], list[GuardedBuffer]] = {}
_idle_bytes = 0


class GuardedBuffer:
    """Bytes between two regions that fault.

    The data end at a guard, or start at one. Alignment to 16 bytes leaves up to 15 bytes between
    the end and the guard; these hold poison and are checked after the run.
    """

    def __init__(self, nbytes: int, start_aligned: bool):
        self.nbytes = nbytes
        self._kind = nbytes, start_aligned
        self._is_protected = False
        self._mapping = _Mapping()
        if _runtime().emulator_map(nbytes, start_aligned, byref(self._mapping)):
            raise MemoryError(f"[metal emulator] no address space for a buffer of {nbytes} bytes")
        self.address: int = self._mapping.data
        pages = bytes_at(self._mapping.pages, self._mapping.pages_bytes)
        start = self.address - self._mapping.pages
        self.data = pages[start : start + nbytes]
        self.before, self.behind = pages[:start], pages[start + nbytes :]

    @classmethod
    def take(cls, nbytes: int, start_aligned: bool) -> GuardedBuffer:
        """A buffer with any content; ``give_back`` it. Fresh pages cost more than the copy into
        them.
        """
        global _idle_bytes
        idle = _idle_buffers.get((nbytes, start_aligned))
        if not idle:
            return cls(nbytes, start_aligned)
        buffer = idle.pop()
        _idle_bytes -= buffer._mapping.pages_bytes
        return buffer

    def give_back(self) -> None:
        global _idle_bytes
        if self._is_protected:
            _runtime().emulator_protect(byref(self._mapping), 1)
            self._is_protected = False
        _idle_bytes += self._mapping.pages_bytes
        if _idle_bytes > MAX_IDLE_BYTES:
            for buffer in (buffer for kind in _idle_buffers.values() for buffer in kind):
                _runtime().emulator_unmap(byref(buffer._mapping))
            _idle_buffers.clear()
            _idle_bytes = self._mapping.pages_bytes
        _idle_buffers.setdefault(self._kind, []).append(self)

    def unmap(self) -> None:
        """Give the address space back, for good; nobody may look at the data any more."""
        _runtime().emulator_unmap(byref(self._mapping))

    def fill_around(self, pattern: int) -> None:
        self.before[:] = self.behind[:] = pattern

    def protect(self) -> None:
        """From now on a write faults."""
        _runtime().emulator_protect(byref(self._mapping), 0)
        self._is_protected = True

    def range(self, name: str, element_bytes: int) -> _Range:
        base: int = self._mapping.base
        return _Range(
            begin=self.address,
            end=self.address + self.nbytes,
            mapping_begin=base,
            mapping_end=base + self._mapping.total,
            name=name.encode(),
            element_bytes=element_bytes,
            is_writable=not self._is_protected,
        )

    def owns(self, address: int) -> bool:
        base: int = self._mapping.base
        total: int = self._mapping.total
        return base <= address < base + total

    def holds(self, content: np.ndarray) -> bool:
        return bool(_runtime().emulator_same(self.address, content.ctypes.data, self.nbytes))


class _SymbolInfo(Structure):
    _fields_ = [
        ("file", c_char_p),
        ("base", c_void_p),
        ("name", c_char_p),
        ("address", c_void_p),
    ]


def load_address(address: int) -> int:
    """Of the library that holds it."""
    info = _SymbolInfo()
    if not ctypes.CDLL(None).dladdr(c_void_p(address), byref(info)):
        return 0
    return int(info.base or 0)


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    """The memory at an address, writable."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@dataclass(frozen=True)
class Run:
    """How one launch goes about it; several of them must come to the same results."""

    order: str = "ascending"
    seed: int = 0
    poison: int = 0  # what outputs hold before the run
    shared_poison: int = 0  # what threadgroup memory holds, and the bytes around buffers
    start_aligned: bool = False
    counts_accesses: bool = False
    watches_accesses: bool = False


def launch(
    entry: int,
    addresses: Sequence[int],
    buffers: dict[str, GuardedBuffer],
    element_bytes: Sequence[int],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    run: Run,
    num_workers: int,
    time_limit_s: float,
) -> Report:
    ranges = [
        buffer.range(name, nbytes)
        for (name, buffer), nbytes in zip(buffers.items(), element_bytes, strict=True)
    ]
    report = Report()
    description = _Launch(
        kernel=entry,
        buffers=(c_void_p * max(1, len(addresses)))(*addresses),
        ranges=(_Range * max(1, len(ranges)))(*ranges),
        num_buffers=len(ranges),
        grid=Size3(*grid),
        threadgroup=Size3(*threadgroup),
        order=ORDERS[run.order],
        seed=run.seed,
        poison=run.shared_poison,
        # What memory has seen is kept for one worker.
        num_workers=1 if run.watches_accesses else num_workers,
        start_aligned=run.start_aligned,
        counts_accesses=run.counts_accesses,
        watches_accesses=run.watches_accesses,
        time_limit_s=time_limit_s,
    )
    _runtime().emulator_launch(byref(description), byref(report))
    return report


@cache
def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
