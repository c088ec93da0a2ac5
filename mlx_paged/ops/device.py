"""What kind of device MLX computes on: layers, models and drafts ask, and tests and the emulator
answer for all of them in this one place.
"""

from __future__ import annotations

import mlx.core as mx


def is_cpu() -> bool:
    """Whether MLX's default device is the CPU.

    There an operation is a function call, and small ones go by their number. On a GPU each is a
    kernel, and ``mx.fast`` has one for what takes dozens of operations here.
    """
    return mx.default_device() == mx.cpu
