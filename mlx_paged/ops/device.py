"""What kind of device MLX computes on. Layers, models and drafts call this one place, which tests
and the emulator patch.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import mlx.core as mx


class AppleGPU(NamedTuple):
    """A GPU by the name of its architecture, such as ``applegpu_g15d``."""

    generation: int  # 13 for M1 to 17 for M5
    is_ultra: bool


def is_cpu() -> bool:
    """Whether MLX's default device is the CPU.

    On a CPU the cost of small operations goes by their number. On a GPU each is a kernel, and
    ``mx.fast`` replaces dozens of them by one.
    """
    return mx.default_device() == mx.cpu


def apple_gpu() -> AppleGPU | None:
    """The GPU of this machine; ``None`` if it is not one of Apple's."""
    found = re.fullmatch(r"applegpu_g(\d+)(\w)", str(mx.device_info().get("architecture")))
    return None if found is None else AppleGPU(int(found[1]), found[2] == "d")
