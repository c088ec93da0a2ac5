"""``Notes``: what was written, used and lost in this process, and isn't in the index yet."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable

from mlx_paged.block_store.index import Index, IndexRow
from mlx_paged.block_store.inventory import Inventory
from mlx_paged.block_store.layout import BlockName


@dataclasses.dataclass(frozen=True)
class _Use:
    block_hashes: tuple[bytes, ...]
    time: float


@dataclasses.dataclass(frozen=True)
class _Loss:
    name: BlockName


class Notes:
    """Changes to blocks of one fingerprint, gathered because a transaction for each would cost more
    than the change.

    Any thread may call ``used`` and ``lost``; one at a time the rest.

    Attributes:
        num_written: how many blocks were written and not flushed.
    """

    def __init__(self, inventory: Inventory, digest: str) -> None:
        self.num_written = 0
        self._nbytes_written = 0
        self._inventory = inventory
        self._digest = digest
        self._changes: deque[IndexRow | _Use | _Loss] = deque()

    def written(self, row: IndexRow) -> None:
        self._changes.append(row)
        self.num_written += 1
        self._nbytes_written += row.nbytes

    def used(self, block_hashes: Iterable[bytes]) -> None:
        self._changes.append(_Use(tuple(block_hashes), time.time()))

    def lost(self, block_hash: bytes) -> None:
        self._changes.append(_Loss((self._digest, block_hash)))

    def totals(self) -> tuple[int, int]:
        """How many blocks lie in the folder, and what they take, with what was noted here."""
        num_blocks, nbytes = self._inventory.act(Index.totals)
        return num_blocks + self.num_written, nbytes + self._nbytes_written

    def flush(self) -> None:
        """Write everything into the index, and times of uses into the files, too.

        Raises:
            OSError: the system refuses to set the time of a file.
        """
        changes = [self._changes.popleft() for _ in range(len(self._changes))]
        self.num_written = self._nbytes_written = 0
        for change in changes:
            if isinstance(change, _Use):
                self._set_times(change)
        if changes:
            self._inventory.act(lambda index: self._note_down(index, changes))

    def _set_times(self, use: _Use) -> None:
        # The time of a file outlives the index.
        for block_hash in use.block_hashes:
            self._inventory.shards.set_last_use((self._digest, block_hash), use.time)

    def _note_down(self, index: Index, changes: list[IndexRow | _Use | _Loss]) -> None:
        with index.transaction():
            for change in changes:
                match change:
                    # Other processes may have removed what was written here, and written again
                    # what was lost.
                    case IndexRow() if self._is_there(change.name):
                        index.add([change])
                    case _Loss(name) if not self._is_there(name):
                        index.remove([name])
                    case _Use(block_hashes, used):
                        index.note_used(self._digest, block_hashes, used)

    def _is_there(self, name: BlockName) -> bool:
        return self._inventory.shards.status(name) is not None
