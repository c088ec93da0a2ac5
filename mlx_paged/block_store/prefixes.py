"""The blocks of a folder as trees of shared prefixes, one tree for each fingerprint.

A block's hash identifies the whole prefix that ends with it, and its header names its parent. So
prefixes with a common beginning share its blocks, and fork where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mlx_paged.block_store.folder import CacheFolder, Entry
from mlx_paged.block_store.layout import Fingerprint
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
        first_token: the position of its first token.
        end_token: the position after its last token.
        nbytes: size of its files.
        created, last_used: of the oldest and of the last used file, in seconds since 1970.
        groups: the groups of layers whose files it has.
        state: the file of the state.
        is_pinned: whether a pin keeps it.
        expires: when the first of its files expires, in seconds since 1970; ``None`` for never.
        parent: the preceding block, if it is in the folder.
        after: the blocks that continue it, the most recently used first.
        num_prefixes: how many prefixes without a successor go through it, 1 if it ends one.
        last_use: when it or one of its successors was last used, in seconds since 1970.
    """

    def __init__(self, entries: Iterable[Entry]):
        self.entries = tuple(sorted(entries, key=lambda entry: entry.group))
        first, last = self.entries[0], self.entries[-1]
        self.block_hash = first.block_hash[:HASH_NBYTES]
        self.first_token, self.end_token = first.first_token, first.first_token + first.num_tokens
        self.nbytes = sum(entry.nbytes for entry in self.entries)
        self.created = min(entry.created for entry in self.entries)
        self.last_used = self.last_use = max(entry.last_used for entry in self.entries)
        self.state = last if last.group == STATES else None
        self.groups = [entry.group for entry in self.entries if entry is not self.state]
        self.is_pinned = any(entry.is_pinned for entry in self.entries)
        self.expires = min((entry.expires for entry in self.entries if entry.expires), default=None)
        self.parent: PrefixBlock | None = None
        self.after: list[PrefixBlock] = []
        self.num_prefixes = 1

    @property
    def hash(self) -> str:
        """In hex."""
        return self.block_hash.hex()

    @property
    def has_state(self) -> bool:
        return self.state is not None

    def path(self) -> list[PrefixBlock]:
        """The blocks of the prefix that ends with this one, as far as they are in the folder."""
        path: list[PrefixBlock] = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    def last_state(self) -> PrefixBlock | None:
        """The last block up to this one after which there is a recurrent state."""
        return next((each for each in reversed(self.path()) if each.has_state), None)

    def below(self) -> list[PrefixBlock]:
        """All successors."""
        found, waiting = [], list(self.after)
        while waiting:
            found.append(waiting.pop())
            waiting += found[-1].after
        return found

    def alone(self) -> list[PrefixBlock]:
        """The blocks that only prefixes through this one use: its ancestors back to the last fork,
        itself and its successors.
        """
        first = self
        while first.parent is not None and len(first.parent.after) == 1:
            first = first.parent
        return [first, *first.below()]


class BlockRun:
    """Consecutive blocks without a fork, either all pinned or none.

    Args:
        blocks: at least one.
        level: depth in the tree of runs.
        siblings_follow: for each level that is drawn, down to its own, whether more runs follow.

    Attributes:
        hash: of the last block, in hex: it names the prefix up to the end of the run.
        parent_hash: of the preceding block, in hex, if it is in the folder.
        num_prefixes: how many prefixes contain all of these blocks; 1 if they aren't shared.
        is_cut_off: whether the preceding blocks are not in the folder, so that it is found only
            while an engine has them in memory.
        Others: as those of its blocks, together.
    """

    def __init__(
        self,
        blocks: Sequence[PrefixBlock],
        level: int = 0,
        siblings_follow: tuple[bool, ...] = (),
    ):
        first, last = blocks[0], blocks[-1]
        self.blocks, self.level, self.siblings_follow = blocks, level, siblings_follow
        self.hash, self.num_blocks = last.hash, len(blocks)
        self.parent_hash = None if first.parent is None else first.parent.hash
        self.first_token, self.end_token = first.first_token, last.end_token
        self.num_prefixes, self.is_pinned = first.num_prefixes, last.is_pinned
        needs_more = first.first_token > 0 and first.entries[0].group != STATES
        self.is_cut_off = needs_more and first.parent is None
        self.nbytes = sum(block.nbytes for block in blocks)
        self.num_states = sum(block.has_state for block in blocks)
        self.last_used = max(block.last_used for block in blocks)


def run_from(first: PrefixBlock) -> list[PrefixBlock]:
    """The blocks of the run that begins with this one."""
    blocks = [first]
    while len(after := blocks[-1].after) == 1 and after[0].is_pinned == first.is_pinned:
        blocks += after
    return blocks


def runs_of(path: Sequence[PrefixBlock]) -> Iterator[BlockRun]:
    """The runs of a prefix, up to its end."""
    while path:
        blocks = run_from(path[0])[: len(path)]
        yield BlockRun(blocks)
        path = path[len(blocks) :]


class PrefixTree:
    """The blocks of one fingerprint.

    Args:
        digest: of the fingerprint.
        fingerprint: ``None`` if its description is missing.
        entries: the files, in any order.

    Attributes:
        name: of the model, on one line. Another user's folder may name anything.
        is_outdated: whether the blocks are of an earlier version, and no engine uses them any more.
        blocks: by hash.
        roots: the blocks whose parents are not in the folder, the most recently used first.
        num_leaves: how many prefixes have no successor.
        answers: files of answers that conversations continue from.
        other_versions: files in the format of another version, which can't be read.
    """

    def __init__(self, digest: str, fingerprint: Fingerprint | None, entries: Iterable[Entry]):
        self.digest, self.fingerprint = digest, fingerprint
        self.name, self.is_outdated = "an unknown model", False
        if fingerprint is not None:
            self.name = one_line(fingerprint.model_name, MAX_NAME)
            self.is_outdated = fingerprint.is_outdated
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
        blocks = self.blocks.values()
        for block in blocks:
            parent_hash = block.entries[0].parent_hash
            parent = self.blocks.get(parent_hash[:HASH_NBYTES]) if parent_hash else None
            # Positions increase, so that forged headers can't make a cycle.
            if parent is not None and parent.end_token == block.first_token:
                block.parent = parent
                parent.after.append(block)
        # Successors come before their parents.
        for block in sorted(blocks, key=lambda block: -block.first_token):
            block.after.sort(key=_newest_first)
            block.num_prefixes = sum(each.num_prefixes for each in block.after) or 1
            block.last_use = max([block.last_used, *(each.last_use for each in block.after)])
        self.roots = sorted((each for each in blocks if each.parent is None), key=_newest_first)
        self.num_leaves = sum(root.num_prefixes for root in self.roots)
        self.num_tokens = sum(block.end_token - block.first_token for block in blocks)
        self.num_states = sum(block.has_state for block in blocks)
        stored: list[PrefixBlock | Entry] = [*blocks, *self.answers]
        self.nbytes = sum(each.nbytes for each in stored)
        self.last_used = max((each.last_used for each in stored), default=-math.inf)

    def runs(self) -> Iterator[BlockRun]:
        """All blocks as runs, in the order in which they are drawn."""
        waiting: list[tuple[PrefixBlock, int, tuple[bool, ...]]] = [
            (root, 0, ()) for root in reversed(self.roots)
        ]
        while waiting:
            first, level, rails = waiting.pop()
            run = BlockRun(run_from(first), level, rails)
            yield run
            waiting += [
                (block, level + 1, (*rails, index > 0)[-MAX_LEVELS:])
                for index, block in enumerate(reversed(run.blocks[-1].after))
            ]


def _newest_first(block: PrefixBlock) -> tuple[float, int, bytes]:
    return -block.last_used, block.first_token, block.block_hash


def read_trees(folder: CacheFolder) -> list[PrefixTree]:
    """The trees of a folder, sorted by the models' names, then by their last use."""
    return as_trees(folder.fingerprints(), folder.entries())


def as_trees(
    fingerprints: Mapping[str, Fingerprint | None], entries: Iterable[Entry]
) -> list[PrefixTree]:
    """The trees of these blocks, sorted as :func:`read_trees` says."""
    files: dict[str, list[Entry]] = {}
    for entry in entries:
        files.setdefault(entry.digest, []).append(entry)
    trees = [PrefixTree(digest, fingerprints.get(digest), files[digest]) for digest in files]
    return sorted(trees, key=lambda tree: (tree.name, -tree.last_used, tree.digest))
