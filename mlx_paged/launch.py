"""What the environment says about ``mlx.launch``. Imports no MLX, so that the programs can check it
before they load MLX.
"""

from __future__ import annotations

import os
import warnings


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return "MLX_RANK" in os.environ


def is_follower() -> bool:
    """Whether this process follows rank 0, which alone talks to the user."""
    return os.environ.get("MLX_RANK", "0") != "0"


def say_errors_only() -> None:
    """Suppress warnings, which rank 0 shows."""
    warnings.simplefilter("ignore")
