"""K/V blocks in a folder on disk, where restarts and other processes find them by their hash.

    store = BlockStore(folder, max_nbytes=20 << 30, fingerprint=fingerprint)
    store.load(block_hash)                   # the payload, or None
    worker = BlockWorker(store, max_queued_nbytes=256 << 20, max_ready_nbytes=256 << 20)
    worker.offer(BlockHeader(block_hash, parent_hash, token_ids, first_token), payload)
    worker.read(read := Read(), block_hashes)
    blocks = worker.take(read, max_nbytes=64 << 20)

A block is a file named after the block's hash, in a folder named after the fingerprint of
everything else that its bytes depend on. So a lookup takes one system call, and a file is checked
before it is used. Its modification time is that of the block's last use. There is no index: the
folder's size and the order of eviction are read from the directory entries (catalogue.py). This
package handles bytes and imports no MLX.
"""

from mlx_paged.block_store.folder import CacheFolder, Entry, FolderSize, Removed
from mlx_paged.block_store.layout import (
    STORED_KV_VERSION,
    BlockName,
    BlockStoreError,
    Fingerprint,
)
from mlx_paged.block_store.prefixes import BlockRun, PrefixBlock, PrefixTree, read_trees
from mlx_paged.block_store.store import BlockStore
from mlx_paged.block_store.worker import BlockWorker, Read

__all__ = [
    "STORED_KV_VERSION",
    "BlockName",
    "BlockRun",
    "BlockStore",
    "BlockStoreError",
    "BlockWorker",
    "CacheFolder",
    "Entry",
    "Fingerprint",
    "FolderSize",
    "PrefixBlock",
    "PrefixTree",
    "Read",
    "Removed",
    "read_trees",
]
