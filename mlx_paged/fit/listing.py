"""A table of the models on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mlx_paged.config import KVBits
from mlx_paged.errors import ArgumentError
from mlx_paged.fit.machine import Machine
from mlx_paged.fit.verdict import Fit
from mlx_paged.loading import LoadError
from mlx_paged.loading.folder import GGUF_SUFFIX, find_local_model, local_repositories
from mlx_paged.loading.gguf.files import is_later_part
from mlx_paged.loading.outline import read_outline
from mlx_paged.memory import format_nbytes

_HEADS = ("model", "weights", "runs", "fits")


class _Row(NamedTuple):
    name: str
    size: str
    runs: str
    fits: str


def list_models(
    folders: Sequence[str], machine: Machine, kv_bits: KVBits | None = None
) -> Iterator[str]:
    """The lines of a table: the models in the hub's cache, and those in ``folders``.

    Raises:
        ArgumentError: something is not a folder.
    """
    found: list[tuple[str, str | Path]] = [(repo, repo) for repo in local_repositories()]
    for name in folders:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise ArgumentError(f"{name!r} is not a folder")
        found += [(str(path), path) for path in _models_in(folder)]
    rows = [_Row(*_HEADS), *(_row(name, where, machine, kv_bits) for name, where in found)]
    if not found:
        yield "no models in the hub's cache or the given folders"
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        name, size, runs = (
            row.name.ljust(widths[0]),
            row.size.rjust(widths[1]),
            row.runs.ljust(widths[2]),
        )
        yield f"{name}  {size}  {runs}  {row.fits}".rstrip()


def _models_in(folder: Path) -> list[Path]:
    """The folder itself if it is a model's, else its subfolders and GGUF files that are models."""
    if (folder / "config.json").is_file():
        return [folder]
    return [
        path
        for path in sorted(folder.iterdir())
        if (path / "config.json").is_file()
        or (path.suffix.lower() == GGUF_SUFFIX and path.is_file() and not is_later_part(path))
    ]


def _row(name: str, where: str | Path, machine: Machine, kv_bits: KVBits | None) -> _Row:
    try:
        path = find_local_model(where)
        if path is None:
            return _Row(name, "", "", "not fully downloaded")
        outline = read_outline(path)
        fit = Fit.of(outline.model, machine, kv_bits)
    except LoadError as error:
        return _Row(name, "", "refused", str(error).removeprefix("[load] "))
    size = format_nbytes(fit.footprint.weight_nbytes)
    return _Row(name, size, outline.model.description, _how_it_fits(fit))


def _how_it_fits(fit: Fit) -> str:
    held = fit.longest_context(1)
    if fit.is_yes:
        return f"yes, with all {fit.context:,} tokens of context"
    return f"yes, with {held:,} of {fit.context:,} tokens" if held and fit.loads else "no"
