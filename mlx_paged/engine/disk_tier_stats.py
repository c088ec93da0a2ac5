"""``DiskTierStats``: what a tier on disk holds and has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DiskTierStats:
    """What lies in the folder, of all processes that use it, and what this engine has done with it.

    Attributes:
        num_blocks, nbytes: in the folder, as far as is known here.
        num_read_blocks: found there and read; ``num_read_tokens`` are those that went into the
            pool.
        num_dropped_blocks: not written, since the writer was behind or everything is pinned.
        num_corrupt_blocks: files that were no block any more. They are gone.
        num_evicted_blocks: removed to keep the limits.
        failure: why the folder is not used any more; ``None`` while all is well.
    """

    num_blocks: int = 0
    nbytes: int = 0
    num_read_blocks: int = 0
    num_read_tokens: int = 0
    num_written_blocks: int = 0
    num_dropped_blocks: int = 0
    num_corrupt_blocks: int = 0
    num_evicted_blocks: int = 0
    failure: str | None = None
