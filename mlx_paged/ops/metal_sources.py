"""Where the Metal sources are: inside the package of a wheel, at the top of a source checkout
otherwise.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def metal_folder() -> Path:
    """The folder with the Metal sources; raises ``FileNotFoundError`` when the installation lacks
    it.
    """
    for folder in (_PACKAGE / "metal", _PACKAGE.parent / "metal"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"[metal] no Metal sources in {_PACKAGE / 'metal'}; the installation is incomplete"
    )


@cache
def read_source(name: str) -> str:
    """The text of one source file; raises ``FileNotFoundError`` with the files that are there."""
    folder = metal_folder()
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(
            f"[metal] no {name} among {sorted(p.name for p in folder.iterdir())}"
        )
    return path.read_text()
