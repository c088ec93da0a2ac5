"""Where the Metal sources are: inside the package of a wheel, beside it in a source checkout.

``importlib.resources`` finds only the former, as nothing beside a package belongs to it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
METAL_FOLDER = _PACKAGE / "metal"
if not METAL_FOLDER.is_dir():
    METAL_FOLDER = _PACKAGE.parent / "metal"


@cache
def read_source(name: str) -> str:
    """The text of one source file; raises ``FileNotFoundError`` when the installation lacks it."""
    return (METAL_FOLDER / name).read_text(encoding="utf-8")
