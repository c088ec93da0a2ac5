"""What ``mlx.launch`` tells this process. Imports no MLX, so that the programs can ask before they
load it.
"""

from __future__ import annotations

import os
import warnings


def is_launched() -> bool:
    """Whether a launcher started this process, perhaps beside others."""
    return "MLX_RANK" in os.environ


def is_follower() -> bool:
    """Whether another process, rank 0, hears the user: this one prints nothing but errors."""
    return os.environ.get("MLX_RANK", "0") != "0"


def say_errors_only() -> None:
    """Leave notices to rank 0, which has the same ones."""
    warnings.simplefilter("ignore")
