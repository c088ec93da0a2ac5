"""The blocks of a folder as trees of shared prefixes, one tree for each fingerprint.

A block's hash identifies the whole prefix that ends with it, and its header names its parent. So
prefixes with a common beginning share its blocks, and fork where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlx_paged.block_store import CacheFolder, Entry, Fingerprint
from mlx_paged.core.block_hash import HASH_NBYTES
from mlx_paged.core.tier import ANSWERS, STATES
from mlx_paged.errors import one_line

MAX_NAME = 200  # characters of a model's name
MAX_LEVELS = 8
"""Levels of the tree that are drawn, the innermost ones: a conversation may fork at each turn."""


class PrefixBlock:
    """The files of one block of tokens: one for each group of layers, and one for the recurrent
    state after it, if that is kept.

    Args:
        entries: the files, at least one. A model without K/V has only states.

    Attributes:
        entries: sorted by group.
        block_hash: 32 bytes, without the group.
        parent_hash: hash of the preceding block; ``None`` for the first one of a sequence.
        first_token: the position of its first token.
        end_token: the position after its last token.
        nbytes: size of its files.
        created, last_used: of the oldest and of the last used file, in seconds since 1970.
        state: the file of the state.
        is_pinned: whether a pin keeps it.
        expires: when the first of its files expires, in seconds since 1970; ``None`` for never.
    """

    def __init__(self, entries: Iterable[Entry]):
        self.entries = tuple(sorted(entries, key=lambda entry: entry.group))
        first = self.entries[0]
        self.block_hash = first.block_hash[:HASH_NBYTES]
        self.parent_hash = first.parent_hash and first.parent_hash[:HASH_NBYTES]
        self.first_token = first.first_token
        self.end_token = first.first_token + first.num_tokens
        self.nbytes = sum(entry.nbytes for entry in self.entries)
        self.created = min(entry.created for entry in self.entries)
        self.last_used = max(entry.last_used for entry in self.entries)
        last = self.entries[-1]
        self.state = last if last.group == STATES else None
        self.is_pinned = any(entry.is_pinned for entry in self.entries)
        self.expires = min((entry.expires for entry in self.entries if entry.expires), default=None)


@dataclass(frozen=True)
class Run:
    """Consecutive blocks without a fork, either all pinned or none.

    Args:
        blocks: at least one.
        num_prefixes: how many prefixes contain all of these blocks; 1 if they aren't shared.
        is_cut_off: whether the preceding blocks are not in the folder, so that it is found only
            while an engine has them in memory.
        level: depth in the tree of runs.
        siblings_follow: for each level that is drawn, down to its own, whether more runs follow.
    """

    blocks: tuple[PrefixBlock, ...]
    num_prefixes: int
    is_cut_off: bool
    level: int = 0
    siblings_follow: tuple[bool, ...] = ()

    @property
    def last(self) -> PrefixBlock:
        """The block whose hash names the prefix up to the end of the run."""
        return self.blocks[-1]

    @property
    def first_token(self) -> int:
        return self.blocks[0].first_token

    @property
    def end_token(self) -> int:
        return self.last.end_token

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def num_states(self) -> int:
        return num_states(self.blocks)

    @property
    def last_used(self) -> float:
        return max(block.last_used for block in self.blocks)

    @property
    def is_pinned(self) -> bool:
        return self.last.is_pinned


class PrefixTree:
    """The blocks of one fingerprint.

    Args:
        digest: of the fingerprint.
        fingerprint: ``None`` if its description is missing.
        entries: the files, in any order.

    Attributes:
        blocks: by hash.
        children: of each block, and under ``None`` the roots, whose parents are not in the folder;
            the most recently used first.
        num_prefixes: number of leaves below each block, 1 for a leaf.
        answers: files of answers that conversations continue from.
        other_versions: files in the format of another version, which can't be read.
    """

    def __init__(self, digest: str, fingerprint: Fingerprint | None, entries: Iterable[Entry]):
        self.digest = digest
        self.fingerprint = fingerprint
        self.answers: list[Entry] = []
        self.other_versions: list[Entry] = []
        files: dict[bytes, list[Entry]] = {}
        for entry in entries:
            if entry.group == ANSWERS:
                self.answers.append(entry)
            elif entry.num_tokens == 0:
                self.other_versions.append(entry)
            else:
                files.setdefault(entry.block_hash[:HASH_NBYTES], []).append(entry)
        self.blocks = {block_hash: PrefixBlock(parts) for block_hash, parts in files.items()}
        self.children: dict[bytes | None, list[PrefixBlock]] = {}
        self.num_prefixes: dict[bytes, int] = {}
        for block in self._last_ones_first():
            parent = self.parent(block)
            siblings = self.children.setdefault(parent.block_hash if parent else None, [])
            siblings.append(block)
            num_leaves = sum(self.num_prefixes[child.block_hash] for child in self.after(block))
            self.num_prefixes[block.block_hash] = num_leaves or 1
        for siblings in self.children.values():
            siblings.sort(key=lambda block: (-block.last_used, block.first_token, block.block_hash))

    @property
    def name(self) -> str:
        """The name of the model on one line. Another user's folder may name anything."""
        known = self.fingerprint
        return "an unknown model" if known is None else one_line(known.model_name, MAX_NAME)

    @property
    def is_outdated(self) -> bool:
        """Whether the blocks are of an earlier version, and no engine uses them any more."""
        return self.fingerprint is not None and self.fingerprint.is_outdated

    @property
    def num_leaves(self) -> int:
        """How many prefixes have no successor."""
        return sum(self.num_prefixes[root.block_hash] for root in self.children.get(None, ()))

    @property
    def num_tokens(self) -> int:
        return sum(block.end_token - block.first_token for block in self.blocks.values())

    @property
    def num_states(self) -> int:
        return num_states(self.blocks.values())

    @property
    def nbytes(self) -> int:
        nbytes = sum(block.nbytes for block in self.blocks.values())
        return nbytes + sum(answer.nbytes for answer in self.answers)

    @property
    def last_used(self) -> float:
        blocks = (block.last_used for block in self.blocks.values())
        answers = (answer.last_used for answer in self.answers)
        return max((*blocks, *answers), default=-math.inf)

    def parent(self, block: PrefixBlock) -> PrefixBlock | None:
        """The preceding block, if it is in the folder."""
        parent = self.blocks.get(block.parent_hash) if block.parent_hash else None
        # Positions increase, so that forged headers can't make a cycle.
        return parent if parent and parent.end_token == block.first_token else None

    def after(self, block: PrefixBlock) -> list[PrefixBlock]:
        """The children of a block, the most recently used first."""
        return self.children.get(block.block_hash, [])

    def path_to(self, block: PrefixBlock) -> list[PrefixBlock]:
        """The blocks of the prefix that ends with this one, as far as they are in the folder."""
        path = [block]
        while (parent := self.parent(path[-1])) is not None:
            path.append(parent)
        return path[::-1]

    def last_state(self, block: PrefixBlock) -> PrefixBlock | None:
        """The last block up to this one after which there is a recurrent state."""
        path = reversed(self.path_to(block))
        return next((each for each in path if each.state is not None), None)

    def below(self, block: PrefixBlock) -> list[PrefixBlock]:
        """All successors of a block."""
        found: list[PrefixBlock] = []
        waiting = list(self.after(block))
        while waiting:
            found.append(waiting.pop())
            waiting += self.after(found[-1])
        return found

    def alone_with(self, block: PrefixBlock) -> list[PrefixBlock]:
        """The blocks that only prefixes through this one use: its ancestors back to the last fork,
        itself and its successors.
        """
        first = block
        while (parent := self.parent(first)) and len(self.after(parent)) == 1:
            first = parent
        return [first, *self.below(first)]

    def last_uses(self) -> dict[bytes, float]:
        """When each block or one of its successors was last used, in seconds since 1970."""
        last_uses: dict[bytes, float] = {}
        for block in self._last_ones_first():
            later = (last_uses[child.block_hash] for child in self.after(block))
            last_uses[block.block_hash] = max((block.last_used, *later))
        return last_uses

    def runs(self) -> Iterator[Run]:
        """All blocks as runs, in the order in which they are drawn."""
        waiting: list[tuple[PrefixBlock, int, tuple[bool, ...]]] = [
            (root, 0, ()) for root in reversed(self.children.get(None, []))
        ]
        while waiting:
            first, level, rails = waiting.pop()
            run = self.run_from(first, level, rails)
            yield run
            waiting += [
                (block, level + 1, (*rails, index > 0)[-MAX_LEVELS:])
                for index, block in enumerate(reversed(self.after(run.last)))
            ]

    def run_from(
        self, first: PrefixBlock, level: int = 0, siblings_follow: tuple[bool, ...] = ()
    ) -> Run:
        """The run that begins with a block."""
        blocks = [first]
        while (after := self.after(blocks[-1])) and self._is_of_one_run(blocks[-1], after[0]):
            blocks.append(after[0])
        return self._run(blocks, level, siblings_follow)

    def runs_of(self, path: Iterable[PrefixBlock]) -> list[Run]:
        """The runs of a prefix, up to its end."""
        parts: list[list[PrefixBlock]] = []
        for block in path:
            if parts and self._is_of_one_run(parts[-1][-1], block):
                parts[-1].append(block)
            else:
                parts.append([block])
        return [self._run(part) for part in parts]

    def _run(
        self,
        blocks: Sequence[PrefixBlock],
        level: int = 0,
        siblings_follow: tuple[bool, ...] = (),
    ) -> Run:
        first = blocks[0]
        needs_more = first.first_token > 0 and first.entries[0].group != STATES
        is_cut_off = needs_more and self.parent(first) is None
        num_prefixes = self.num_prefixes[first.block_hash]
        return Run(tuple(blocks), num_prefixes, is_cut_off, level, siblings_follow)

    def _is_of_one_run(self, block: PrefixBlock, after: PrefixBlock) -> bool:
        return len(self.after(block)) == 1 and block.is_pinned == after.is_pinned

    def _last_ones_first(self) -> list[PrefixBlock]:
        """All blocks, children before their parents."""
        return sorted(self.blocks.values(), key=lambda block: -block.first_token)


def num_states(blocks: Iterable[PrefixBlock]) -> int:
    """How many of these blocks have a recurrent state."""
    return sum(block.state is not None for block in blocks)


def read_trees(folder: CacheFolder) -> list[PrefixTree]:
    """The trees of a folder, sorted by the models' names, then by their last use."""
    return as_trees(folder.fingerprints(), folder.entries())


def as_trees(
    fingerprints: Mapping[str, Fingerprint | None], entries: Iterable[Entry]
) -> list[PrefixTree]:
    files: dict[str, list[Entry]] = {}
    for entry in entries:
        files.setdefault(entry.digest, []).append(entry)
    trees = [PrefixTree(digest, fingerprints.get(digest), files[digest]) for digest in files]
    return sorted(trees, key=lambda tree: (tree.name, -tree.last_used, tree.digest))
