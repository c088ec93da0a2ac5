"""``rm``: which blocks are removed.

A block can't be used without its ancestors, so its successors are removed with it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mlx_paged.block_store import Entry
from mlx_paged.cache_tool.prefixes import PrefixTree
from mlx_paged.cache_tool.selection import find
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


def choose(args: argparse.Namespace, trees: Sequence[PrefixTree], now: float) -> Removal:
    """The blocks that the flags of ``rm`` name, except for ``--shrink-to``.

    Args:
        trees: of the requested models.
        now: seconds since 1970.

    Raises:
        ArgumentError: a hash names no block, or several.
    """
    named = list(_under(args.hash, trees) if args.hash else _unused_since(args, trees, now))
    entries = [entry for entry in named if args.pinned or not entry.is_pinned]
    return Removal(entries, len(named) - len(entries))


def _under(texts: Iterable[str], trees: Sequence[PrefixTree]) -> Iterable[Entry]:
    """The lines of ``ls`` that contain the hashes, and those under them."""
    entries: dict[tuple[str, bytes], Entry] = {}
    for text in texts:
        tree, named = find(text, trees)
        for block in tree.alone_with(named):
            entries |= {(each.digest, each.block_hash): each for each in block.entries}
    return entries.values()


def _unused_since(
    args: argparse.Namespace, trees: Sequence[PrefixTree], now: float
) -> Iterator[Entry]:
    """Blocks that were not used for ``--older-than`` seconds; all without the flag."""
    before = math.inf if args.older_than is None else now - args.older_than
    for tree in trees:
        for block_hash, last_used in tree.last_uses().items():
            if last_used < before:
                yield from tree.blocks[block_hash].entries
        yield from (entry for entry in tree.other_versions if entry.last_used < before)
