"""A store to work on."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.block_stores import open_store

from mlx_paged.block_store import BlockStore


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    """An empty one in ``tmp_path / "cache"``, with room for a thousand small blocks."""
    return open_store(tmp_path / "cache")
