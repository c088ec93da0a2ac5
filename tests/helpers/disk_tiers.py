"""Engines with a tier on disk, one after the other on the same folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.engine_runs import assert_nothing_held, make_engine
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.storing.tier_cache import TierCacheStats


@contextmanager
def tiered(model: Any, folder: Path, **options: Any) -> Iterator[Engine]:
    """An engine that keeps K/V in a folder, and has written all of them at the end."""
    engine = make_engine(model, cache_dir=folder, **options)
    yield engine
    assert_nothing_held(engine)
    assert engine.close(60), "all is written"


def tier_stats(engine: Engine) -> TierCacheStats:
    stats = engine.stats().disk_tier
    assert stats is not None
    return stats


def flush(engine: Engine) -> None:
    """Wait until all that can be written is written, or has failed."""
    assert engine.disk_tier is not None
    is_complete = False
    while not is_complete:
        is_complete = not engine.save_more()
        assert engine.disk_tier._worker.flush(60)


def block_files(folder: Path) -> list[Path]:
    """The files of blocks, of all models."""
    return sorted(folder.glob("blocks/*/*/*.kv"))
