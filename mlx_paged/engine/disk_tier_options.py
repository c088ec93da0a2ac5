"""``DiskTierOptions``: the folder in which an engine stores K/V, and its limits. Imports no MLX."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mlx_paged.block_store import BlockStore, Fingerprint
from mlx_paged.block_store.layout import folder_path
from mlx_paged.config import (
    DEFAULT_CACHE_DIR_SIZE,
    DURATION,
    NBYTES,
    NBYTES_A_DAY,
    SchedulerConfig,
)
from mlx_paged.errors import ArgumentError, shown


@dataclass(frozen=True)
class DiskTierOptions:
    """Where full blocks of K/V are stored on disk.

    Args:
        folder: absolute path; made if it does not exist.
        max_nbytes: the most bytes that its blocks take, including those of other models and engines
            that use the folder.
        ttl: seconds after which an unused block is removed; ``None`` for never.
        max_nbytes_a_day: the most bytes that are written in 24 hours; ``None`` for no limit.
    """

    folder: Path
    max_nbytes: int
    ttl: float | None = None
    max_nbytes_a_day: int | None = None

    @classmethod
    def read(
        cls,
        cache_dir: str | os.PathLike[str] | None,
        cache_dir_size: str | int | None = None,
        cache_dir_ttl: str | float | None = None,
        cache_dir_writes: str | int | None = None,
    ) -> DiskTierOptions | None:
        """The options as users give them to an engine; ``None`` without a folder.

        Args:
            cache_dir: a leading ``~`` is the user's home.
            cache_dir_size: bytes, in the notation of budgets; ``None`` is
                ``DEFAULT_CACHE_DIR_SIZE``.
            cache_dir_ttl: a duration, such as ``"7d"``, or seconds.
            cache_dir_writes: bytes per day, such as ``"50G/day"``.

        Raises:
            ArgumentError: an invalid value, or a limit without a folder.
        """
        if cache_dir is None:
            for name, value in (
                ("cache_dir_size", cache_dir_size),
                ("cache_dir_ttl", cache_dir_ttl),
                ("cache_dir_writes", cache_dir_writes),
            ):
                if value is not None:
                    raise ArgumentError(
                        f"[engine] {name} {shown(value)} is of no use without cache_dir, the "
                        "folder in which K/V are kept on disk",
                        name,
                    )
            return None
        size = DEFAULT_CACHE_DIR_SIZE if cache_dir_size is None else cache_dir_size
        ttl, writes = cache_dir_ttl, cache_dir_writes
        return cls(
            folder_path(cache_dir),
            NBYTES.check("engine", "cache_dir_size", size),
            None if ttl is None else DURATION.check("engine", "cache_dir_ttl", ttl),
            None if writes is None else NBYTES_A_DAY.check("engine", "cache_dir_writes", writes),
        )

    def __call__(self, fingerprint: Fingerprint) -> BlockStore:
        """Open the store of a fingerprint's blocks.

        Raises:
            BlockStoreError: the folder can't be used.
        """
        return BlockStore(
            self.folder, self.max_nbytes, fingerprint, self.ttl, self.max_nbytes_a_day
        )

    def check_holds(self, what: str, nbytes: int) -> None:
        """Check that one block or state fits within the limits.

        Raises:
            ArgumentError: it does not.
        """
        for name, limit in (
            ("cache_dir_size", self.max_nbytes),
            ("cache_dir_writes", self.max_nbytes_a_day),
        ):
            if limit is not None and nbytes > limit:
                a_day = " a day" if name == "cache_dir_writes" else ""
                raise ArgumentError(
                    f"[engine] {name} of {limit} bytes{a_day} is too small: a {what} takes "
                    f"{nbytes}",
                    name,
                )


def check_engine(name: str, kv: str, config: SchedulerConfig, num_ranks: int) -> None:
    """Check that an engine finds its K/V by the hashes of blocks, which a tier requires.

    Args:
        name: the option that requests a tier.

    Raises:
        ArgumentError: the cache is contiguous, there is no prefix cache, or the model is split over
            ranks.
    """
    why = None
    if kv != "paged":
        why = f"needs blocks, which kv={shown(kv)} does not have; use kv='paged'"
    elif not config.enable_prefix_caching:
        why = "needs the prefix cache, and enable_prefix_caching is False"
    elif num_ranks > 1:
        why = (
            f"can't be combined with {num_ranks} ranks, each of which has a part of the K/V; leave "
            "it out"
        )
    if why is not None:
        raise ArgumentError(f"[engine] {name} {why}", name)
