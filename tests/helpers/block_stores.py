"""Chains of blocks whose bytes can be told from their hashes, and folders to keep them in."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from mlx_paged.block_store import BlockStore, Fingerprint
from mlx_paged.core.tier import BlockHeader

UNIT = 4096  # bytes that a small block takes on disk


def fingerprint(model: str = "a model", **fields) -> Fingerprint:
    given = {"model_name": "M", "layers": ("kv 2x64",), "kv_format": "auto", "block_size": 16}
    return Fingerprint(model=model, **{**given, "code": "1", **fields})


def open_store(folder: Path, num_blocks: int = 1000, model: str = "a model", **options):
    """A store with room for so many small blocks."""
    return BlockStore(folder, num_blocks * UNIT, fingerprint(model), **options)


def named(name: str) -> bytes:
    """The hash of a block that a test calls by a name."""
    return hashlib.sha256(name.encode()).digest()


def header(name: str, parent: str | None = None, first_token: int = 0, group: int = 0):
    tokens = tuple(range(first_token, first_token + 16))
    parent_hash = None if parent is None else named(parent)
    return BlockHeader(named(name), parent_hash, tokens, first_token, group)


def payload_of(block_hash: bytes, num_bytes: int = 1000) -> bytes:
    """Bytes that follow from the hash, so that any process can check them."""
    return hashlib.shake_128(block_hash).digest(num_bytes)


def put(store: BlockStore, name: str, parent: str | None = None, first_token: int = 0) -> bool:
    return store.store(header(name, parent, first_token), payload_of(named(name)))


def put_chain(store: BlockStore, *names: str) -> None:
    for position, (parent, name) in enumerate(zip((None, *names), names, strict=False)):
        assert put(store, name, parent, 16 * position), store.failure


def found(store: BlockStore, names: str) -> str:
    """Which of the blocks, each called by a letter, a store has and gives out right."""
    there = ""
    for name in names:
        payload = store.load(named(name))
        assert store.has(named(name)) == (payload is not None)
        if payload is not None:
            assert payload == payload_of(named(name))
            there += name
    return there


def file_of(store: BlockStore, name: str) -> Path:
    return Path(store.files.path_of_block((store.fingerprint.digest, named(name))))


def block_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def make_older(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))
