"""``import_first``: imports the libraries of a program in less time.

MLX, mlx-lm, transformers and the libraries of the server are 1,100 modules with 200,000 objects
that are never freed. Python's garbage collector scans them while they are imported, and in each
full collection from then on: a tenth of the CPU time of a start. Twice as much goes into the two
scans that transformers makes of its own files.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path


def import_first(*names: str) -> None:
    """Import modules without garbage collection, and exempt their objects from it (``gc.freeze``).

    If MLX is imported already, as when a program is called from another one, they are only
    imported: the other program's objects must remain collectable.
    """
    is_first = "mlx.core" not in sys.modules
    if is_first:
        gc.disable()
    try:
        if is_first:
            import_transformers()
        for name in names:
            import_module(name)
        if is_first:
            gc.freeze()
    finally:
        if is_first:
            gc.enable()


def import_transformers() -> None:
    """Import ``transformers`` and ``transformers.models``, each of which reads 3,300 source files
    to list their contents: 170 ms of CPU time. Here the second import reuses the first one's list.

    transformers caches it, too (``lru_cache``), but for 128 folders, and it has 550.
    """
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # as mlx-lm does before it imports it
    import transformers
    from transformers.utils import import_utils

    search = getattr(import_utils, "create_import_structure_from_path", None)
    if search is None:  # another version
        return
    root = Path(str(transformers.__file__)).parent / "models"
    found = search(root)  # cached: this was the last search of the first import

    def known(path: str | Path) -> object:
        return found if Path(path) == root / "__init__.py" else search(path)

    import_utils.create_import_structure_from_path = known
    try:
        import_module("transformers.models")
    finally:
        import_utils.create_import_structure_from_path = search
