"""Entries of a folder of blocks, made up from short descriptions of sequences; and folders as
engines write them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

from mlx_paged.block_store import BlockStore, Entry, Fingerprint
from mlx_paged.block_store.prefixes import PrefixTree, as_trees
from mlx_paged.core.block_hash import hash_token_blocks
from mlx_paged.core.prefix_lookup import state_key
from mlx_paged.core.tier import ANSWERS, STATES, BlockHeader

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


def put(
    folder: Path,
    tokens: list[int],
    fingerprint: Fingerprint = DEMO,
    groups: int = 1,
    states: Collection[int] = (),
    answers: Sequence[int] = (),
) -> str:
    """Write the blocks of a sequence as an engine does; the hash of its last one, in hex.

    Args:
        groups: the groups of layers, each of which has a file of its own.
        states: numbers of tokens after which there is a recurrent state.
        answers: numbers of tokens at which stored answers end, each continuing the one before.
    """
    store = BlockStore(folder, 1 << 30, fingerprint)
    hashes = hash_token_blocks(tokens, BLOCK_SIZE)
    for group in range(groups):
        names = [h + group.to_bytes(2, "little") if group else bytes(h) for h in hashes]
        for index, name in enumerate(names):
            start, parent = index * BLOCK_SIZE, names[index - 1] if index else None
            part = tuple(tokens[start : start + BLOCK_SIZE])
            assert store.store(BlockHeader(name, parent, part, start, group), b"K/V " * 500)
            if start + BLOCK_SIZE in states:
                header = BlockHeader(state_key(name), name, part, start, STATES)
                assert store.store(header, b"state" * 99)
    for start, end in zip((0, *answers), answers, strict=False):
        parent = answer_key(tokens[:start]) if start else None
        part = tuple(tokens[start:end])
        header = BlockHeader(answer_key(tokens[:end]), parent, part, start, ANSWERS)
        assert store.store(header, b"an answer")
    store.maintain()
    store.close()
    return hashes[-1].hex() if hashes else ""


def answer_key(tokens: list[int]) -> bytes:
    """The name of the stored answer that ends a conversation of these tokens."""
    return hashlib.sha256(repr(tokens).encode()).digest() + ANSWERS.to_bytes(2, "little")
