"""The blocks of a folder as trees of shared prefixes, one tree for each fingerprint, and the search
for the models and blocks that a user names.

A block's hash identifies the whole prefix that ends with it, and its header names its parent. So
prefixes with a common beginning share its blocks, and fork where they differ.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mlx_paged.block_store import CacheFolder, Entry, Fingerprint
from mlx_paged.core.block_hash import HASH_NBYTES
from mlx_paged.core.tier import ANSWERS, STATES
from mlx_paged.errors import ArgumentError, one_line, shown

MAX_NAME = 200  # characters of a model's name
MAX_LEVELS = 8
"""Levels of the tree that are drawn, the innermost ones: a conversation may fork at each turn."""
SHOWN_DIGITS = 8  # of a hash, unless more are needed
_MIN_DIGITS = 4  # as in git
_MAX_CANDIDATES = 5
_HASH = re.compile(rf"[0-9a-fA-F]{{{_MIN_DIGITS},64}}")


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
        first, last = self.entries[0], self.entries[-1]
        self.block_hash = first.block_hash[:HASH_NBYTES]
        self.parent_hash = first.parent_hash and first.parent_hash[:HASH_NBYTES]
        self.first_token = first.first_token
        self.end_token = first.first_token + first.num_tokens
        self.nbytes = sum(entry.nbytes for entry in self.entries)
        self.created = min(entry.created for entry in self.entries)
        self.last_used = max(entry.last_used for entry in self.entries)
        self.state = last if last.group == STATES else None
        self.is_pinned = any(entry.is_pinned for entry in self.entries)
        self.expires = min((entry.expires for entry in self.entries if entry.expires), default=None)


class BlockRun:
    """Consecutive blocks without a fork, either all pinned or none.

    Args:
        blocks: of the tree, at least one.
        level: depth in the tree of runs.
        siblings_follow: for each level that is drawn, down to its own, whether more runs follow.

    Attributes:
        last: the block whose hash names the prefix up to the end of the run.
        num_prefixes: how many prefixes contain all of these blocks; 1 if they aren't shared.
        is_cut_off: whether the preceding blocks are not in the folder, so that it is found only
            while an engine has them in memory.
        Others: as those of its blocks, together.
    """

    def __init__(
        self,
        tree: PrefixTree,
        blocks: Sequence[PrefixBlock],
        level: int = 0,
        siblings_follow: tuple[bool, ...] = (),
    ):
        self.blocks, self.level, self.siblings_follow = blocks, level, siblings_follow
        first, self.last = blocks[0], blocks[-1]
        self.first_token, self.end_token = first.first_token, self.last.end_token
        self.num_prefixes = tree.num_prefixes[first.block_hash]
        needs_more = first.first_token > 0 and first.entries[0].group != STATES
        self.is_cut_off = needs_more and tree.parent(first) is None
        self.nbytes = sum(block.nbytes for block in blocks)
        self.num_states = sum(block.state is not None for block in blocks)
        self.last_used = max(block.last_used for block in blocks)
        self.is_pinned = self.last.is_pinned


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
        children: of each block, and under ``None`` the roots, whose parents are not in the folder;
            the most recently used first.
        num_prefixes: number of leaves below each block, 1 for a leaf.
        num_leaves: how many prefixes have no successor.
        last_uses: when each block or one of its successors was last used, in seconds since 1970.
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
        self.children: dict[bytes | None, list[PrefixBlock]] = {}
        self.num_prefixes: dict[bytes, int] = {}
        self.last_uses: dict[bytes, float] = {}
        # Children come before their parents.
        for block in sorted(self.blocks.values(), key=lambda block: -block.first_token):
            parent, after = self.parent(block), [each.block_hash for each in self.after(block)]
            parent_hash = None if parent is None else parent.block_hash
            self.children.setdefault(parent_hash, []).append(block)
            self.num_prefixes[block.block_hash] = (
                sum(self.num_prefixes[each] for each in after) or 1
            )
            uses = [block.last_used, *(self.last_uses[each] for each in after)]
            self.last_uses[block.block_hash] = max(uses)
        for siblings in self.children.values():
            siblings.sort(key=lambda block: (-block.last_used, block.first_token, block.block_hash))
        roots = self.children.get(None, ())
        self.num_leaves = sum(self.num_prefixes[root.block_hash] for root in roots)
        blocks = self.blocks.values()
        self.num_tokens = sum(block.end_token - block.first_token for block in blocks)
        self.num_states = sum(block.state is not None for block in blocks)
        stored: list[PrefixBlock | Entry] = [*blocks, *self.answers]
        self.nbytes = sum(each.nbytes for each in stored)
        self.last_used = max((each.last_used for each in stored), default=-math.inf)

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

    def runs(self) -> Iterator[BlockRun]:
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
        self, first: PrefixBlock, level: int = 0, rails: tuple[bool, ...] = ()
    ) -> BlockRun:
        """The run that begins with a block; ``rails`` are its ``siblings_follow``."""
        blocks = [first]
        while len(after := self.after(blocks[-1])) == 1 and after[0].is_pinned == first.is_pinned:
            blocks += after
        return BlockRun(self, blocks, level, rails)

    def runs_of(self, path: Sequence[PrefixBlock]) -> list[BlockRun]:
        """The runs of a prefix, up to its end."""
        runs: list[BlockRun] = []
        while path:
            runs.append(BlockRun(self, self.run_from(path[0]).blocks[: len(path)]))
            path = path[len(runs[-1].blocks) :]
        return runs


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


# What a user names: any unique beginning of a hash names a block, as in git.


def of_model(trees: Sequence[PrefixTree], name: str | None) -> list[PrefixTree]:
    """The trees of one model, or all if ``name`` is ``None``.

    Args:
        name: the model's name, its part after the last ``/``, or the first digits of a fingerprint.

    Raises:
        ArgumentError: the folder has no such model.
    """
    if name is None:
        return list(trees)
    is_digest = len(name) >= _MIN_DIGITS
    found = [
        tree
        for tree in trees
        if name in (tree.name, tree.name.rpartition("/")[2])
        or (is_digest and tree.digest.startswith(name.lower()))
    ]
    if not found:
        known = ", ".join(dict.fromkeys(tree.name for tree in trees))
        held = f"it holds {one_line(known)}" if known else "it is empty"
        raise ArgumentError(
            f"--model {shown(name)}: the folder has no blocks of it; {held}", "model"
        )
    return found


def find(text: str, trees: Sequence[PrefixTree]) -> tuple[PrefixTree, PrefixBlock]:
    """The one block whose hash begins with ``text``, and its tree.

    Raises:
        ArgumentError: there is none, or more than one.
    """
    if not _HASH.fullmatch(text):
        form = f"a hash is {_MIN_DIGITS} to 64 hex digits, got {shown(text)}"
        raise ArgumentError(f"{form}; ls shows those in the folder", "hash")
    pairs = [(tree, block) for tree in trees for block in tree.blocks.values()]
    found = [pair for pair in pairs if pair[1].block_hash.hex().startswith(text.lower())]
    if not found:
        raise ArgumentError(f"there is no block whose hash begins with {text}", "hash")
    if len(found) == 1:
        return found[0]
    hashes = {block.block_hash for _, block in found}
    num_digits = num_unique_digits(hashes)
    candidates = ", ".join(
        f"{block.block_hash.hex()[:num_digits]} ({block.end_token:,} tokens of "
        f"{tree.name}, {tree.digest[:SHOWN_DIGITS]})"
        for tree, block in found[:_MAX_CANDIDATES]
    )
    num_more = len(found) - _MAX_CANDIDATES
    more = f", and {num_more:,} more" if num_more > 0 else ""
    # A hash does not depend on the model: two models given the same tokens share it.
    way_out = "; say which with --model" if len(hashes) == 1 else ""
    raise ArgumentError(f"{text} is ambiguous: {candidates}{more}{way_out}", "hash")


def num_unique_digits(block_hashes: Iterable[bytes]) -> int:
    """How many hex digits distinguish these hashes; at least 8."""
    digits = sorted({block_hash.hex() for block_hash in block_hashes})
    longest = SHOWN_DIGITS
    for one, other in itertools.pairwise(digits):
        while one[:longest] == other[:longest]:
            longest += 1
    return longest
