"""Entries of a folder of blocks, made up from short descriptions of sequences."""

from __future__ import annotations

import hashlib

from mlx_paged.block_store import Entry, Fingerprint
from mlx_paged.block_store.prefixes import PrefixTree, as_trees

BLOCK_SIZE = 16
NOW = 1_000_000.0

DEMO = Fingerprint("content", "demo", ("8 heads of 16, float32",) * 2, "float32", BLOCK_SIZE, "1")


def hash_of(prefix: str, group: int = 0) -> bytes:
    """A stand-in for the chained hash of a prefix, which is given as one letter for each block."""
    block_hash = hashlib.sha256(prefix.encode()).digest()
    return block_hash + group.to_bytes(2, "little") if group else block_hash


def entry(prefix: str, fingerprint: Fingerprint = DEMO, **fields: object) -> Entry:
    """The last block of a prefix; ``age`` is how many seconds ago it was used."""
    age = fields.pop("age", 60.0)
    group = fields.get("group", 0)
    defaults = {
        "digest": fingerprint.digest,
        "block_hash": hash_of(prefix, group),
        "parent_hash": hash_of(prefix[:-1], group) if len(prefix) > 1 else None,
        "first_token": BLOCK_SIZE * (len(prefix) - 1),
        "num_tokens": BLOCK_SIZE,
        "group": 0,
        "nbytes": 1_000_000,
        "created": NOW - 3600,
        "ttl": None,
        "last_used": NOW - age,
        "is_pinned": False,
    }
    return Entry(**{**defaults, **fields})


def entries(*sequences: str, **fields: object) -> list[Entry]:
    """All blocks of sequences, shared ones once."""
    prefixes = {word[:end] for word in sequences for end in range(1, len(word) + 1)}
    return [entry(prefix, **fields) for prefix in sorted(prefixes)]


def tree_of(*blocks: Entry) -> PrefixTree:
    (tree,) = as_trees({DEMO.digest: DEMO}, blocks)
    return tree
