"""Which models of a folder are meant."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_paged.cache_tool.prefixes import PrefixTree
from mlx_paged.errors import ArgumentError, one_line, shown

_MIN_DIGITS = 4  # of a fingerprint


def of_model(trees: Sequence[PrefixTree], name: str | None) -> list[PrefixTree]:
    """Those of a model, or all if ``name`` is ``None``.

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
        there_is = f"it holds {one_line(known)}" if known else "it is empty"
        raise ArgumentError(
            f"--model {shown(name)}: the folder has no blocks of it; {there_is}", "model"
        )
    return found


def _is_called(tree: PrefixTree, name: str) -> bool:
    is_digest = len(name) >= _MIN_DIGITS and tree.digest.startswith(name.lower())
    return name in (tree.name, tree.name.rpartition("/")[2]) or is_digest
