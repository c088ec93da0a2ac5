"""Kills writers of a block store at random moments, and looks what is left."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged_testing.killed_processes import Actor, make_context, random_moments
from paged_testing.killed_writers import MODULES, ROOMY, look, read, tend, write

_SECONDS_TO_LOOK = 60.0


@dataclasses.dataclass
class Findings:
    """What a run of kills has found.

    Attributes:
        num_kills: processes that were killed while they were at work.
        killed_while: how many of them were doing what.
        num_looks: how often a process was started afterwards to look at everything.
        num_promised: blocks that a writer had said to be written when it was killed.
        num_read: blocks that readers got meanwhile, and compared.
        num_missed: blocks that they asked for in vain.
        most_nbytes: that all files took when a process had started afterwards.
        problems: what must not happen, in words; empty if all is well.
    """

    num_kills: int = 0
    killed_while: Counter[str] = dataclasses.field(default_factory=Counter)
    num_looks: int = 0
    num_promised: int = 0
    num_read: int = 0
    num_missed: int = 0
    most_nbytes: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


class StoreKills:
    """Kills writers and tools of one folder at random moments, while others read there.

    Args:
        folder: empty.
        max_nbytes: the folder's limit; with ``ROOMY`` no block may be lost.
        seed: of all that is random but the clock.
        longest: seconds from the start of a process to its end, at most.
    """

    def __init__(self, folder: Path, max_nbytes: int, seed: int = 0, longest: float = 0.3):
        self.findings = Findings()
        self._folder = folder / "cache"
        self._logs = folder / "logs"
        self._logs.mkdir()
        self._max_nbytes = max_nbytes
        self._source = random.Random(seed)
        self._moments = random_moments(self._source, longest)
        self._context = make_context(*MODULES)
        self._at_work: list[Actor] = []
        self._promised: set[tuple[str, str]] = set()
        self._pinned: set[tuple[str, str]] = set()

    def run(self, num_kills: int, kills_per_look: int = 10) -> Findings:
        """Kill so many processes; what was found."""
        readers = [self._start(read) for _ in range(2)]
        while self.findings.num_kills < num_kills:
            for _ in range(kills_per_look):
                self._fill_up()
                time.sleep(next(self._moments))
                self._kill(self._source.choice(self._at_work))
                if self._source.random() < 0.1:
                    self._spoil_index()
            for actor in list(self._at_work):
                self._kill(actor)
            self._look()
        for reader in readers:
            reader.end()
            self._note(reader)
        return self.findings

    def _start(self, role: Callable[..., None], *arguments: object) -> Actor:
        seed = self._source.randrange(2**32)
        actor = Actor(self._context, role, self._logs, self._folder, *arguments, seed)
        actor.wait_until_it_plays()
        return actor

    def _fill_up(self) -> None:
        """Two writers, and one who tends the folder."""
        while len(self._at_work) < 3:
            has_tender = any(actor.role is tend for actor in self._at_work)
            role = write if has_tender else tend
            self._at_work.append(self._start(role, self._max_nbytes))

    def _kill(self, actor: Actor) -> None:
        was_at_work = actor.kill()
        self._at_work.remove(actor)
        said = self._note(actor)
        if was_at_work:
            self.findings.num_kills += 1
            self.findings.killed_while[f"{actor.role.__name__}: {said[-1][0]}"] += 1

    def _note(self, actor: Actor) -> list[list[Any]]:
        """Take down what a process said before its end."""
        said = actor.said()
        findings = self.findings
        crash = actor.crash()
        if crash is not None:
            findings.problems.append(crash)
        for what, *facts in said:
            if what in ("wrong", "failure", "bad"):
                findings.problems.append(f"{actor.role.__name__}: {what} {facts}")
            elif what == "written":
                digest, hashes = facts
                self._promised |= {(digest, block_hash) for block_hash in hashes}
                findings.num_promised = len(self._promised)
            elif what == "pinned":
                self._pinned.add((facts[0], facts[1]))
            elif what == "unpins":
                self._pinned.discard((facts[0], facts[1]))
            elif what == "read":
                findings.num_read += facts[0]
                findings.num_missed += facts[1]
        actor.forget()
        return said

    def _spoil_index(self) -> None:
        """As if somebody had deleted the index, or put something else in its place.

        What SQLite shares through memory (-shm) is replaced and not written over: to cut off a file
        that processes have mapped ends them with SIGBUS, whatever they do.
        """
        garbage = self._source.randbytes(5000)
        for path in self._folder.glob("index-*"):
            choice = self._source.random()
            with contextlib.suppress(OSError):
                if choice < 0.4:
                    path.unlink()
                elif choice < 0.7 and not path.name.endswith("-shm"):
                    path.write_bytes(garbage)
                else:
                    aside = self._logs / "garbage"
                    aside.write_bytes(garbage)
                    aside.replace(path)

    def _look(self) -> None:
        """See what a process finds that starts now, while nobody writes."""
        actor = Actor(self._context, look, self._logs, self._folder, self._max_nbytes)
        actor.process.join(_SECONDS_TO_LOOK)
        actor.kill()
        there: set[tuple[str, str]] = set()
        pins: set[tuple[str, str]] = set()
        sizes: list[int] = []
        for what, *facts in self._note(actor):
            if what == "there":
                there |= {(facts[0], block_hash) for block_hash in facts[1]}
            elif what == "pins":
                pins = {(digest, block_hash) for digest, block_hash in facts[0]}
            elif what == "size":
                sizes = facts
        self.findings.num_looks += 1
        if not sizes:
            self.findings.problems.append("who came to look did not end")
            return
        self._compare(there, pins, *sizes)

    def _compare(
        self,
        there: set[tuple[str, str]],
        pins: set[tuple[str, str]],
        nbytes: int,
        nbytes_of_files: int,
        num_unfinished: int,
    ) -> None:
        """Hold what is there against what was said."""
        findings = self.findings
        findings.most_nbytes = max(findings.most_nbytes, nbytes_of_files)
        lost = self._promised - there if self._max_nbytes >= ROOMY else set()
        problems = {
            f"{len(lost)} blocks that were written are lost": lost,
            f"pins are lost: {self._pinned - pins}": self._pinned - pins,
            f"pinned blocks are lost: {self._pinned - there}": self._pinned - there,
            f"the index says {nbytes} bytes, the files {nbytes_of_files}": nbytes
            != nbytes_of_files,
            f"{nbytes_of_files} bytes, and the limit is {self._max_nbytes}": (
                nbytes_of_files > self._max_nbytes
            ),
            f"{num_unfinished} unfinished files are left": num_unfinished,
        }
        findings.problems += [problem for problem, is_there in problems.items() if is_there]
        # Kept, so that each is counted once.
        self._promised -= lost
        self._pinned &= pins
