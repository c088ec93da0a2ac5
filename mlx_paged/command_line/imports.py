"""``import_first``: what a program runs with is imported without looks for unused memory.

MLX, mlx-lm, transformers and the libraries of the server are 1,100 modules with 200,000 objects,
all of which stay. While they are imported, and from then on whenever it looks everywhere, Python
looks through them for cycles that nothing uses: a tenth of the CPU time of a start.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module


def import_first(*names: str) -> None:
    """Import modules with all that they import, and take them for needed until the process ends.

    Where MLX is imported already, as when a program is called from another one, they are only
    imported: objects of the other program have to be found when they are not used any more.
    """
    is_first = "mlx.core" not in sys.modules
    if is_first:
        gc.disable()
    try:
        for name in names:
            import_module(name)
        if is_first:
            gc.freeze()
    finally:
        if is_first:
            gc.enable()
