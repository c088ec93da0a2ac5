"""K/V blocks in a folder on disk: found by their hash after a restart and by other processes.

    store = BlockStore(folder, max_nbytes=20 << 30, fingerprint=fingerprint)
    writer = BlockWriter(store, max_queued_nbytes=256 << 20)
    writer.offer(BlockHeader(block_hash, parent_hash, token_ids, first_token), payload)
    store.load(block_hash)                   # the payload, or None
    reader = BlockReader(store, max_ready_nbytes=256 << 20)
    reader.read(request_id, block_hashes)    # ahead of time
    blocks = reader.take(max_nbytes=64 << 20)

A block is a file. Its name is the block's hash, its folder the fingerprint of everything else that
its bytes depend on, so it is found by one look at a directory, and checked before it is used. Its
time is that of its last use. Nothing else is written down: sums and the order in which blocks go
are read from the directory entries (catalogue.py). Nothing here knows MLX or what a payload means.
"""

from mlx_paged.block_store.errors import BlockStoreError
from mlx_paged.block_store.fingerprint import Fingerprint
from mlx_paged.block_store.folder import CacheFolder, CheckedFile, Entry, FolderSize, Removed
from mlx_paged.block_store.layout import BlockName
from mlx_paged.block_store.reader import BlockReader, ReadBlock
from mlx_paged.block_store.store import BlockStore
from mlx_paged.block_store.weight_digests import WeightDigests
from mlx_paged.block_store.writer import BlockWriter

__all__ = [
    "BlockName",
    "BlockReader",
    "BlockStore",
    "BlockStoreError",
    "BlockWriter",
    "CacheFolder",
    "CheckedFile",
    "Entry",
    "Fingerprint",
    "FolderSize",
    "ReadBlock",
    "Removed",
    "WeightDigests",
]
