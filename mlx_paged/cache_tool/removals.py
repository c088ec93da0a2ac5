"""``rm``: which blocks are removed.

A block can't be used without its ancestors, so its successors are removed with it, and so are
stored answers whose tokens are among theirs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mlx_paged.block_store import CacheFolder, Entry
from mlx_paged.cache_tool.prefixes import PrefixBlock, PrefixTree
from mlx_paged.cache_tool.selection import find
from mlx_paged.cache_tool.text import token_ids
from mlx_paged.core.tier import BlockHeader
from mlx_paged.errors import ArgumentError


@dataclass(frozen=True)
class Removal:
    """The blocks to remove, and how many of the named ones are kept because they are pinned."""

    entries: list[Entry]
    num_kept: int


def check_choice(args: argparse.Namespace) -> None:
    """Check the flags of ``rm``.

    Raises:
        ArgumentError: they name nothing, or contradict one another.
    """
    given = {
        "HASH": bool(args.hash),
        "--all": args.all,
        "--older-than": args.older_than is not None,
        "--shrink-to": args.shrink_to is not None,
    }
    ways = [name for name, is_given in given.items() if is_given]
    if len(ways) > 1:
        raise ArgumentError(
            f"{' and '.join(ways)} each say what to remove; give one of them", "hash"
        )
    if not ways and args.model is None:
        raise ArgumentError(f"say what to remove: --model, {', '.join(given)}", "hash")
    if args.shrink_to is not None and (args.model is not None or args.pinned):
        raise ArgumentError(
            "--shrink-to removes the least recently used blocks of all models except for pinned "
            "ones; it can't be combined with --model or --pinned",
            "shrink_to",
        )


def choose(
    args: argparse.Namespace, folder: CacheFolder, trees: Sequence[PrefixTree], now: float
) -> Removal:
    """The blocks that the flags of ``rm`` name, except for ``--shrink-to``.

    Args:
        folder: reads the tokens of blocks and answers.
        trees: of the requested models.
        now: seconds since 1970.

    Raises:
        ArgumentError: a hash names no block, or several.
    """
    named = list(_under(args.hash, folder, trees) if args.hash else _unused_since(args, trees, now))
    entries = [entry for entry in named if args.pinned or not entry.is_pinned]
    return Removal(entries, len(named) - len(entries))


def _under(
    texts: Iterable[str], folder: CacheFolder, trees: Sequence[PrefixTree]
) -> Iterable[Entry]:
    """The lines of ``ls`` that contain the hashes, those under them, and the answers there."""
    entries: dict[tuple[str, bytes], Entry] = {}
    for text in texts:
        tree, named = find(text, trees)
        blocks = tree.alone_with(named)
        files = [each for block in blocks for each in block.entries]
        if tree.answers and any(not each.is_pinned for each in files):
            files += _answers_with(folder, tree, blocks[0])
        entries |= {(each.digest, each.block_hash): each for each in files}
    return entries.values()


def _answers_with(folder: CacheFolder, tree: PrefixTree, block: PrefixBlock) -> list[Entry]:
    """The stored answers with a token of this block, after the same tokens before it."""
    path = tree.path_to(block)
    begin, tokens = path[0].first_token, token_ids(folder, path)
    headers = {each.block_hash: folder.header(*each.name) for each in tree.answers}

    def has_other_tokens(part: BlockHeader) -> bool:
        first = max(begin, part.first_token)
        own = part.token_ids[first - part.first_token :]
        there = tokens[first - begin :]
        return any(a != b for a, b in zip(own, there, strict=False))

    def is_within(part: BlockHeader | None) -> bool:
        if part is None or part.first_token + len(part.token_ids) <= block.first_token:
            return False
        while part is not None and not has_other_tokens(part):
            before = headers.get(part.parent_hash) if part.parent_hash else None
            if before is None or before.first_token >= part.first_token:
                return True
            part = before
        return False

    return [each for each in tree.answers if is_within(headers[each.block_hash])]


def _unused_since(
    args: argparse.Namespace, trees: Sequence[PrefixTree], now: float
) -> Iterator[Entry]:
    """Blocks that were not used for ``--older-than`` seconds; all without the flag."""
    before = math.inf if args.older_than is None else now - args.older_than
    for tree in trees:
        for block_hash, last_used in tree.last_uses().items():
            if last_used < before:
                yield from tree.blocks[block_hash].entries
        others = (*tree.answers, *tree.other_versions)
        yield from (entry for entry in others if entry.last_used < before)
