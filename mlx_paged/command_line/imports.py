"""``import_first``: what a program runs with is imported in less time.

MLX, mlx-lm, transformers and the libraries of the server are 1,100 modules with 200,000 objects,
all of which stay. While they are imported, and from then on whenever it looks everywhere, Python
looks through them for cycles that nothing uses: a tenth of the CPU time of a start. Twice as much
goes into transformers' search of its own files, which it does twice.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path


def import_first(*names: str) -> None:
    """Import modules with all that they import, and take them for needed until the process ends.

    Where MLX is imported already, as when a program is called from another one, they are only
    imported: objects of the other program have to be found when they are not used any more.
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
    """Import ``transformers`` and ``transformers.models``, either of which reads 3,300 source files
    to find out what is in them: 170 ms of CPU time. The second finds it known here.

    transformers means to keep it, too, but for 128 folders (``lru_cache``), and it has 550.
    """
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # as mlx-lm does before it imports it
    import transformers
    from transformers.utils import import_utils

    search = getattr(import_utils, "create_import_structure_from_path", None)
    if search is None:  # another version
        return
    root = Path(str(transformers.__file__)).parent / "models"
    found = search(root)  # kept: the last folder that was searched

    def known(path: str | Path) -> object:
        return found if Path(path) == root / "__init__.py" else search(path)

    import_utils.create_import_structure_from_path = known
    try:
        import_module("transformers.models")
    finally:
        import_utils.create_import_structure_from_path = search
