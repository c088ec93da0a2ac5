"""The hash of a block: H(hash of the block before it, its token ids, extra keys).

Because each hash includes its parent's, one hash names a whole prefix, and looking up a prompt in
the prefix index is a walk along a list of hashes. The names are those of vLLM's v1 core
(``hash_block_tokens``, ``extra_keys``); other projects say prefix hash or page key. The hash is
SHA-256 over an unambiguous byte string, so it is the same in every process and on every platform
(Python's own ``hash()`` is neither) and may be written to disk.

The byte string, all integers little-endian:

    tag       b"mlx_paged.block.v1\\0"
    parent    0x00 for none, or 0x01, length (8 bytes), bytes
    tokens    count (8 bytes), then 8 signed bytes each
    extra     the tuple: one type letter per key, lengths before contents (see ``_encode_key``)
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType, TypeAlias, Union

HASH_NBYTES = hashlib.sha256().digest_size
BlockHash = NewType("BlockHash", bytes)
"""``HASH_NBYTES`` bytes, 32; longer in groups of layers other than the first."""

ExtraKey: TypeAlias = Union[int, str, bytes, "tuple[ExtraKey, ...]", None]

_TAG = b"mlx_paged.block.v1\0"
_NO_PARENT = _TAG + b"\x00"
_PARENT = _TAG + b"\x01"
_length = struct.Struct("<Q").pack


def _encode_key(key: ExtraKey) -> bytes:
    # Types are exact: to Python a bool is an int, and a subclass may redefine equality.
    if type(key) is str:
        data = key.encode("utf-8", "surrogatepass")
        return b"s" + _length(len(data)) + data
    if type(key) is int:
        data = key.to_bytes(key.bit_length() // 8 + 1, "little", signed=True)
        return b"i" + _length(len(data)) + data
    if type(key) is bytes:
        return b"b" + _length(len(key)) + key
    if key is None:
        return b"n"
    if type(key) is tuple:
        return b"t" + _length(len(key)) + b"".join(map(_encode_key, key))
    raise TypeError(
        f"hash_block_tokens: extra key {key!r} is a {type(key).__name__}; "
        f"use str, int, bytes, None or a tuple"
    )


_NO_KEYS = _encode_key(())


def hash_block_tokens(
    parent_hash: bytes | None, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...] = ()
) -> BlockHash:
    """The hash of one block.

    Args:
        parent_hash: the hash of the block before it, None for the first block of a sequence.
        token_ids: the tokens of the block, ``[block_size]``.
        extra_keys: whatever else the K/V depend on: adapter, cache salt, media. Contexts with
            different extra keys never share a block. Keys are str, int, bytes, None and tuples of
            these; 1, "1", b"1", (1,) all differ.

    Raises:
        TypeError: for a token that is not an integer or an extra key of another type (bool, float,
            list included).
    """
    if type(extra_keys) is not tuple:
        raise TypeError(
            f"hash_block_tokens: extra_keys must be a tuple, got {type(extra_keys).__name__}"
        )
    num_tokens = len(token_ids)
    try:
        tokens = struct.pack(f"<Q{num_tokens}q", num_tokens, *token_ids)
    except struct.error as error:
        raise TypeError(
            f"hash_block_tokens: token ids must be integers of at most 64 bits ({error})"
        ) from error
    parent = (
        _NO_PARENT if parent_hash is None else _PARENT + _length(len(parent_hash)) + parent_hash
    )
    keys = _encode_key(extra_keys) if extra_keys else _NO_KEYS
    return BlockHash(hashlib.sha256(parent + tokens + keys).digest())


def hash_token_blocks(
    token_ids: Sequence[int], block_size: int, extra_keys: tuple[ExtraKey, ...] = ()
) -> list[BlockHash]:
    """The hashes of all full blocks of a sequence, ``[len(token_ids) // block_size]``; a partly
    filled tail has none. Raises as ``extend_block_hashes``.
    """
    block_hashes: list[BlockHash] = []
    extend_block_hashes(block_hashes, token_ids, block_size, extra_keys)
    return block_hashes


def extend_block_hashes(
    block_hashes: list[BlockHash],
    token_ids: Sequence[int],
    block_size: int,
    extra_keys: tuple[ExtraKey, ...] = (),
) -> int:
    """Append to ``block_hashes`` the hashes of the full blocks of ``token_ids`` that it lacks;
    return how many.

    This is the incremental form of ``hash_token_blocks``: call it with all tokens of a sequence as
    they come, and only new full blocks are hashed. The hashes in the list are not checked: after
    the sequence was trimmed to ``length`` tokens, first ``del block_hashes[length //
    block_size:]``.

    Raises:
        ValueError: if block_size < 1, or the list has more hashes than the sequence has full
            blocks.
        TypeError: as ``hash_block_tokens``.
    """
    if block_size < 1:
        raise ValueError(f"extend_block_hashes: block_size must be at least 1, got {block_size}")
    num_full_blocks = len(token_ids) // block_size
    num_hashed_blocks = len(block_hashes)
    if num_hashed_blocks > num_full_blocks:
        raise ValueError(
            f"extend_block_hashes: {num_hashed_blocks} hashes for {len(token_ids)} tokens, "
            f"which fill {num_full_blocks} blocks of {block_size}"
        )
    parent_hash = block_hashes[-1] if block_hashes else None
    for start in range(num_hashed_blocks * block_size, num_full_blocks * block_size, block_size):
        tokens = token_ids[start : start + block_size]
        parent_hash = hash_block_tokens(parent_hash, tokens, extra_keys)
        block_hashes.append(parent_hash)
    return num_full_blocks - num_hashed_blocks
