"""Block bookkeeping in pure Python: which sequence holds which block. It does not depend on MLX,
tensors or models.

    pool = BlockPool(num_blocks=256, block_size=16)
    table = BlockTable(pool)                 # one per sequence
    copies = table.reserve(40)               # [] here; None when out of blocks
    slots = table.slot_mapping(0, 40)        # where the 40 rows go
    table.advance(40)
    table.cache_full_blocks(hash_token_blocks(token_ids, 16))
    branch = table.fork()
    table.free()

The method is PagedAttention's (Kwon et al. 2023); the names are those of vLLM's v1 core.
"""

from mlx_paged.core.block_hash import (
    BlockHash,
    extend_block_hashes,
    hash_block_tokens,
    hash_token_blocks,
)
from mlx_paged.core.block_pool import BlockPool, PrefixIndex
from mlx_paged.core.block_table import BlockCopy, BlockTable, TableState
from mlx_paged.core.checkpoints import Checkpoint, Checkpoints
from mlx_paged.core.computed_blocks import BlockLoad, ComputedBlocks, SequenceTables
from mlx_paged.core.errors import (
    BlockError,
    BlockTableError,
    DoubleFreeError,
    ForeignBlockError,
    FrozenBlockError,
    UseAfterFreeError,
)
from mlx_paged.core.free_queue import FreeKVCacheBlockQueue, KVCacheBlock
from mlx_paged.core.key_positions import KeyShift
from mlx_paged.core.kv_cache_manager import KVCacheManager
from mlx_paged.core.manager_stats import KVCacheManagerStats
from mlx_paged.core.prefix_lookup import AbsentBlock, group_hashes, state_key
from mlx_paged.core.retention import KEEP_ALL, POSITION_WRAP, Retention
from mlx_paged.core.sequence_states import Cut, SequenceState, SequenceStates
from mlx_paged.core.shared_budget import BudgetSizes, SharedBudget

__all__ = [
    "KEEP_ALL",
    "POSITION_WRAP",
    "AbsentBlock",
    "BlockCopy",
    "BlockError",
    "BlockHash",
    "BlockLoad",
    "BlockPool",
    "BlockTable",
    "BlockTableError",
    "BudgetSizes",
    "Checkpoint",
    "Checkpoints",
    "ComputedBlocks",
    "Cut",
    "DoubleFreeError",
    "ForeignBlockError",
    "FreeKVCacheBlockQueue",
    "FrozenBlockError",
    "KVCacheBlock",
    "KVCacheManager",
    "KVCacheManagerStats",
    "KeyShift",
    "PrefixIndex",
    "Retention",
    "SequenceState",
    "SequenceStates",
    "SequenceTables",
    "SharedBudget",
    "TableState",
    "UseAfterFreeError",
    "extend_block_hashes",
    "group_hashes",
    "hash_block_tokens",
    "hash_token_blocks",
    "state_key",
]
