"""Which models and blocks a user names: any unique beginning of a hash names a block, as in git."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from mlx_paged.cache_tool.prefixes import PrefixBlock, PrefixTree
from mlx_paged.errors import ArgumentError, one_line, shown

MIN_DIGITS = 4  # as in git
SHOWN_DIGITS = 8  # unless more are needed
_MAX_CANDIDATES = 5
_HASH = re.compile(rf"[0-9a-fA-F]{{{MIN_DIGITS},64}}")


def of_model(trees: Sequence[PrefixTree], name: str | None) -> list[PrefixTree]:
    """The trees of one model, or all if ``name`` is ``None``.

    Args:
        name: the model's name, its part after the last ``/``, or the first digits of a fingerprint.

    Raises:
        ArgumentError: the folder has no such model.
    """
    if name is None:
        return list(trees)
    found = [tree for tree in trees if _is_called(tree, name)]
    if not found:
        known = ", ".join(dict.fromkeys(tree.name for tree in trees))
        content = f"it holds {one_line(known)}" if known else "it is empty"
        raise ArgumentError(
            f"--model {shown(name)}: the folder has no blocks of it; {content}", "model"
        )
    return found


def find(text: str, trees: Sequence[PrefixTree]) -> tuple[PrefixTree, PrefixBlock]:
    """The one block whose hash begins with ``text``, and its tree.

    Raises:
        ArgumentError: there is none, or more than one.
    """
    if not _HASH.fullmatch(text):
        raise ArgumentError(
            f"a hash is {MIN_DIGITS} to 64 hex digits, got {shown(text)}; ls shows those in the "
            "folder",
            "hash",
        )
    found = [
        (tree, block)
        for tree in trees
        for block_hash, block in tree.blocks.items()
        if block_hash.hex().startswith(text.lower())
    ]
    if not found:
        raise ArgumentError(f"there is no block whose hash begins with {text}", "hash")
    if len(found) > 1:
        raise ArgumentError(f"{text} is ambiguous: {_candidates(found)}", "hash")
    return found[0]


def num_unique_digits(block_hashes: Iterable[bytes]) -> int:
    """How many hex digits distinguish these hashes; at least 8."""
    digits = sorted({block_hash.hex() for block_hash in block_hashes})
    longest = SHOWN_DIGITS
    for one, other in itertools.pairwise(digits):
        while one[:longest] == other[:longest]:
            longest += 1
    return longest


def _is_called(tree: PrefixTree, name: str) -> bool:
    is_digest = len(name) >= MIN_DIGITS and tree.digest.startswith(name.lower())
    return name in (tree.name, tree.name.rpartition("/")[2]) or is_digest


def _candidates(found: Sequence[tuple[PrefixTree, PrefixBlock]]) -> str:
    num_digits = num_unique_digits(block.block_hash for _, block in found)
    is_same = len({block.block_hash for _, block in found}) == 1
    candidates = [
        f"{block.block_hash.hex()[:num_digits]} ({block.end_token:,} tokens of "
        f"{tree.name}, {tree.digest[:SHOWN_DIGITS]})"
        for tree, block in found[:_MAX_CANDIDATES]
    ]
    num_more = len(found) - len(candidates)
    more = f", and {num_more:,} more" if num_more else ""
    # A hash does not depend on the model: two models given the same tokens share it.
    way_out = "; say which with --model" if is_same else ""
    return ", ".join(candidates) + more + way_out
