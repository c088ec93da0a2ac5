"""The memory and the memory bandwidth of a machine, this one or another."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from mlx_paged.models.memory import kv_share, memory_size, recommended_memory

# GB/s as Apple publishes them. There is no M4 Ultra; figures for the M5 Ultra and the smaller M5
# Max were not available.
BANDWIDTHS = {
    "M1": 68.25, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800,
    "M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800,
    "M3": 100, "M3 Pro": 150, "M3 Max (30-core GPU)": 300, "M3 Max (40-core GPU)": 400,
    "M3 Ultra": 819,
    "M4": 120, "M4 Pro": 273, "M4 Max (32-core GPU)": 410, "M4 Max (40-core GPU)": 546,
    "M5": 153.6, "M5 Pro": 307, "M5 Max (40-core GPU)": 614,
}  # fmt: skip
# What Metal recommends as working set, in millions of bytes, by a Mac's memory in GiB, as programs
# print it on recent versions of macOS.
RECOMMENDED = {
    16: 12_713, 18: 14_302, 24: 19_070, 32: 26_801, 36: 28_991, 48: 40_201, 64: 55_663,
    128: 115_449, 512: 498_216,
}  # fmt: skip
# Older versions recommend two thirds of the memory up to this size, and three quarters above.
_SMALL = 36 * 2**30


@dataclass(frozen=True)
class Machine:
    """A machine's memory, in bytes.

    Attributes:
        memory: physical memory.
        recommended: Metal's recommended working set; 0 for a machine without Metal.
        is_this_one: whether this is the machine that the program runs on; otherwise
            ``recommended`` is what such Macs report.
        free: the memory available now; ``None`` if unknown.
        chip: such as ``"M2 Max"``; ``None`` if it is not one of Apple's, or unknown.
    """

    memory: int
    recommended: int
    is_this_one: bool
    free: int | None = None
    chip: str | None = None

    @classmethod
    def here(cls, chip: str | None = None) -> Machine:
        return cls(memory_size(), recommended_memory(), True, free_memory(), chip or _chip_here())

    @classmethod
    def mac(cls, memory: int, chip: str | None = None) -> Machine:
        """A Mac with this much memory. For one of a size without reports, Metal is assumed to
        recommend the share that it does on the next smaller one.
        """
        mac = cls(memory, 0, False, chip=chip)
        known = max((gib for gib in RECOMMENDED if gib * 2**30 <= memory), default=0)
        if not known:
            return replace(mac, recommended=mac.recommended_before)
        return replace(mac, recommended=RECOMMENDED[known] * 10**6 * memory // (known * 2**30))

    @property
    def recommended_before(self) -> int:
        """What older versions of macOS recommend on such a Mac."""
        return self.memory * 2 // 3 if self.memory <= _SMALL else self.memory * 3 // 4

    def kv_share(self, weight_nbytes: int, activation_nbytes: int) -> int:
        """The bytes that K/V may take by default beside these weights and activations; negative if
        they leave nothing.
        """
        return kv_share(weight_nbytes, activation_nbytes, self.recommended, self.memory)

    @property
    def limit(self) -> int:
        """The bytes that weights, K/V, states and activations have to fit into."""
        return self.recommended or self.memory

    @property
    def bandwidth(self) -> float | None:
        """The published memory bandwidth in bytes per second, of the smallest GPU that the chip is
        sold with; ``None`` if unknown.
        """
        found = [each for name, each in BANDWIDTHS.items() if name.partition(" (")[0] == self.chip]
        return min(found) * 1e9 if found else None


def free_memory() -> int | None:
    """Bytes that a program can allocate without swapping others out: unused memory and file caches;
    ``None`` if the system does not report it.
    """
    try:
        if sys.platform == "darwin":
            said = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=5).stdout
            return _free_of_vm_stat(said)
        said = Path("/proc/meminfo").read_text(encoding="ascii")
        found = re.search(r"^MemAvailable:\s+(\d+) kB", said, re.MULTILINE)
        return None if found is None else int(found[1]) * 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _free_of_vm_stat(said: str) -> int | None:
    size = re.search(r"page size of (\d+) bytes", said)
    kinds = ("free", "inactive", "speculative", "purgeable")
    pages = [re.search(rf"^Pages {kind}:\s+(\d+)\.", said, re.MULTILINE) for kind in kinds]
    counts = [int(found[1]) for found in pages if found is not None]
    return int(size[1]) * sum(counts) if size is not None and counts else None


def _chip_here() -> str | None:
    name = mx.device_info().get("device_name") if mx.metal.is_available() else None
    return name.removeprefix("Apple ") if isinstance(name, str) else None
