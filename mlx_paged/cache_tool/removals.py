"""``rm``: which blocks go.

A block is of no use without those before it, so what goes takes with it all that continues it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mlx_paged.block_store import Entry
from mlx_paged.cache_tool.abbreviations import find
from mlx_paged.cache_tool.prefixes import PrefixTree
from mlx_paged.errors import ArgumentError


@dataclass(frozen=True)
class Removal:
    """What goes, and how many blocks that were named stay, since they are pinned."""

    entries: list[Entry]
    num_kept: int


def check_choice(args: argparse.Namespace) -> None:
    """Refuse flags of ``rm`` that name nothing, or contradict one another.

    Raises:
        ArgumentError: they do.
    """
    given = {
        "HASH": bool(args.hash),
        "--all": args.all,
        "--older-than": args.older_than is not None,
        "--shrink-to": args.shrink_to is not None,
    }
    ways = [name for name, is_given in given.items() if is_given]
    if len(ways) > 1:
        raise ArgumentError(f"{' and '.join(ways)} each say what goes; give one of them", "hash")
    if not ways and args.model is None:
        raise ArgumentError(f"say what goes: --model, {', '.join(given)}", "hash")
    if args.shrink_to is not None and (args.model is not None or args.pinned):
        raise ArgumentError(
            "--shrink-to takes what was least recently used of all models, and leaves what is "
            "pinned; it can't be combined with --model or --pinned",
            "shrink_to",
        )


def choose(args: argparse.Namespace, trees: Sequence[PrefixTree], now: float) -> Removal:
    """What the flags of ``rm`` name, ``--shrink-to`` aside.

    Args:
        trees: those of the models that were asked for.
        now: seconds since 1970.

    Raises:
        ArgumentError: a hash names no block, or several.
    """
    named = list(_under(args.hash, trees) if args.hash else _unused_since(args, trees, now))
    entries = [entry for entry in named if args.pinned or not entry.is_pinned]
    return Removal(entries, len(named) - len(entries))


def _under(texts: Iterable[str], trees: Sequence[PrefixTree]) -> Iterable[Entry]:
    """The lines of ``ls`` that the hashes are in, and those under them."""
    entries: dict[tuple[str, bytes], Entry] = {}
    for text in texts:
        tree, named = find(text, trees)
        for block in tree.alone_with(named):
            entries |= {(each.digest, each.block_hash): each for each in block.entries}
    return entries.values()


def _unused_since(
    args: argparse.Namespace, trees: Sequence[PrefixTree], now: float
) -> Iterator[Entry]:
    """What was not used for ``--older-than`` seconds; without the flag everything."""
    before = math.inf if args.older_than is None else now - args.older_than
    for tree in trees:
        for block_hash, last_used in tree.last_uses().items():
            if last_used < before:
                yield from tree.blocks[block_hash].entries
        yield from (entry for entry in tree.other_versions if entry.last_used < before)
