"""What kind of device MLX computes on. Layers, models and drafts call this one place, which tests
and the emulator patch.
"""

from __future__ import annotations

import mlx.core as mx


def is_cpu() -> bool:
    """Whether MLX's default device is the CPU.

    On a CPU the cost of small operations goes by their number. On a GPU each is a kernel, and
    ``mx.fast`` replaces dozens of them by one.
    """
    return mx.default_device() == mx.cpu
