"""The Metal sources: a resource of the package in a wheel, a folder next to the package in a
checkout. Tests and the cost model read them as text, without the launches in ``kernels.py``.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

METAL_FOLDER = files("mlx_paged") / "metal"
if not METAL_FOLDER.is_dir():
    METAL_FOLDER = Path(str(files("mlx_paged"))).parent / "metal"


@cache
def read_source(name: str) -> str:
    """The text of one source file; raises ``FileNotFoundError`` when the installation lacks it."""
    return (METAL_FOLDER / name).read_text(encoding="utf-8")
