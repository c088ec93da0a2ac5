"""The output of ``ls``, ``show``, ``size`` and ``verify`` with ``--json``.

Hashes are complete and in hex, times are seconds since 1970, sizes are bytes. Programs depend on
the names of the fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mlx_paged.block_store import CacheFolder, CheckedFile, Fingerprint, Removed
from mlx_paged.cache_tool.prefixes import PrefixBlock, PrefixTree, Run
from mlx_paged.cache_tool.text import TextOf, token_ids


def model(tree: PrefixTree) -> dict[str, Any]:
    """A model, and the totals of its blocks."""
    return {
        "fingerprint": tree.digest,
        "depends_on": _fingerprint(tree.fingerprint),
        "is_outdated": tree.is_outdated,
        "num_prefixes": tree.num_leaves,
        "num_blocks": len(tree.blocks),
        "num_tokens": tree.num_tokens,
        "num_states": tree.num_states,
        "num_answers": len(tree.answers),
        "nbytes": tree.nbytes,
        "num_files_of_other_versions": len(tree.other_versions),
        "nbytes_of_other_versions": sum(entry.nbytes for entry in tree.other_versions),
    }


def line(tree: PrefixTree, run: Run, text_of: TextOf | None) -> dict[str, Any]:
    """A line of ``ls``."""
    parent = tree.parent(run.blocks[0])
    described = {
        "hash": run.last.block_hash.hex(),
        "parent_hash": None if parent is None else parent.block_hash.hex(),
        "first_token": run.first_token,
        "end_token": run.end_token,
        "is_cut_off": run.is_cut_off,
        "num_blocks": len(run.blocks),
        "num_states": run.num_states,
        "nbytes": run.nbytes,
        "last_used": run.last_used,
        "num_prefixes": run.num_prefixes,
        "is_pinned": run.is_pinned,
    }
    return described if text_of is None else described | {"text": text_of(run.blocks)}


def prefix(
    folder: CacheFolder, tree: PrefixTree, block: PrefixBlock, text_of: TextOf | None
) -> dict[str, Any]:
    """The output of ``show``."""
    path = tree.path_to(block)
    described = {
        "hash": block.block_hash.hex(),
        "fingerprint": tree.digest,
        "depends_on": _fingerprint(tree.fingerprint),
        "first_token": path[0].first_token,
        "end_token": block.end_token,
        "token_ids": token_ids(folder, path),
        "nbytes": sum(each.nbytes for each in path),
        "num_prefixes": tree.num_prefixes[block.block_hash],
        "blocks": [_block(tree, each) for each in path],
        "continued_by": [each.block_hash.hex() for each in tree.after(block)],
    }
    return described if text_of is None else described | {"text": text_of(path)}


def checked(
    bad: Sequence[CheckedFile], num_files: int, nbytes: int, delete: bool, removed: Removed
) -> dict[str, Any]:
    """What ``verify`` found and, with ``delete``, removed."""
    files = [{"path": file.path, "nbytes": file.nbytes, "problem": file.problem} for file in bad]
    return {
        "num_files": num_files,
        "nbytes": nbytes,
        "bad": files,
        "were_deleted": delete and not removed.left and all(file.block_hash for file in bad),
        "num_deleted": removed.num_blocks,
        "left": [{"path": path, "problem": why} for path, why in removed.left.items()],
    }


def _block(tree: PrefixTree, block: PrefixBlock) -> dict[str, Any]:
    return {
        "hash": block.block_hash.hex(),
        "first_token": block.first_token,
        "end_token": block.end_token,
        "nbytes": block.nbytes,
        "groups": [entry.group for entry in block.entries if entry is not block.state],
        "has_state": block.state is not None,
        "created": block.created,
        "last_used": block.last_used,
        "num_prefixes": tree.num_prefixes[block.block_hash],
        "is_pinned": block.is_pinned,
        "expires": block.expires,
    }


def _fingerprint(fingerprint: Fingerprint | None) -> dict[str, Any] | None:
    return None if fingerprint is None else dataclasses.asdict(fingerprint)
