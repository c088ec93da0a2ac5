"""Kills writers of a block store at random moments, and compares what is left with their words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paged_testing.killed_processes import Actor, Kills
from paged_testing.killed_writers import ROOMY, look, read, tend, write


class StoreKills(Kills):
    """Writers of one folder, and one who tends it with the tool, while two others read.

    Args:
        folder: empty.
        max_nbytes: the limit; with ``ROOMY`` no block may be lost.
        longest, seed: see :class:`Kills`.
    """

    def __init__(self, folder: Path, max_nbytes: int, seed: int = 0, longest: float = 0.3):
        super().__init__(folder, longest, seed)
        self._max_nbytes = max_nbytes
        # Digests and hashes of blocks that were said to be written, and to be pinned.
        self._written: set[tuple[str, str]] = set()
        self._pinned: set[tuple[str, str]] = set()
        self._there: set[tuple[str, str]] = set()

    def start_readers(self) -> list[Actor]:
        return [self.start(read) for _ in range(2)]

    def fill_up(self) -> None:
        while len(self.at_work) < 3:
            is_tended = any(actor.role is tend for actor in self.at_work)
            self.at_work.append(self.start(write if is_tended else tend, self._max_nbytes))

    def note(self, what: str, facts: list[Any]) -> None:
        if what == "written":
            self._written |= {(facts[0], block_hash) for block_hash in facts[1]}
        elif what == "pinned":
            self._pinned.add((facts[0], facts[1]))
        elif what == "unpins":
            self._pinned.discard((facts[0], facts[1]))
        elif what == "there":
            self._there |= {(facts[0], block_hash) for block_hash in facts[1]}
        elif what == "left":
            self._compare({(digest, block_hash) for digest, block_hash in facts[0]}, *facts[1:])

    def look(self) -> None:
        self._there.clear()
        self.play(look, self._max_nbytes)

    def _compare(
        self,
        pins: set[tuple[str, str]],
        nbytes: int,
        nbytes_of_files: int,
        num_unfinished: int,
    ) -> None:
        """Hold what is there against what was said.

        Args:
            pins: blocks that are pinned now.
            nbytes: that all blocks take by the tool.
            nbytes_of_files: that they take.
            num_unfinished: files that a writer began to write.
        """
        counts, limit = self.findings.counts, self._max_nbytes
        counts["blocks written"] = len(self._written)
        counts["most bytes afterwards"] = max(counts["most bytes afterwards"], nbytes_of_files)
        lost = self._written - self._there if limit >= ROOMY else set()
        lost_pins, lost_pinned = self._pinned - pins, self._pinned - self._there
        self.findings.problems += [
            problem
            for problem, is_present in (
                (f"{len(lost)} blocks that were written are lost", lost),
                (f"pins are lost: {lost_pins}", lost_pins),
                (f"pinned blocks are lost: {lost_pinned}", lost_pinned),
                (f"{nbytes} bytes by the tool, {nbytes_of_files}", nbytes != nbytes_of_files),
                (f"{nbytes_of_files} bytes, the limit is {limit}", nbytes_of_files > limit),
                (f"{num_unfinished} unfinished files are left", num_unfinished),
            )
            if is_present
        ]
        # Each is counted once.
        self._written -= lost
        self._pinned -= lost_pins | lost_pinned
