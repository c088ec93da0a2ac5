"""K/V in files: snapshots of sequences and of prefixes, and mlx-lm's prompt caches."""

from mlx_paged.snapshots.errors import SnapshotError
from mlx_paged.snapshots.facts import KVFacts
from mlx_paged.snapshots.snapshots import (
    SnapshotFile,
    is_snapshot,
    load_prefix,
    load_snapshot,
    save_prefix,
    save_snapshot,
)

__all__ = [
    "KVFacts",
    "SnapshotError",
    "SnapshotFile",
    "is_snapshot",
    "load_prefix",
    "load_snapshot",
    "save_prefix",
    "save_snapshot",
]
