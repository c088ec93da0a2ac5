"""K/V in files: snapshots of sequences and of prefixes, and mlx-lm's prompt caches."""

from mlx_paged.snapshots.errors import SnapshotError
from mlx_paged.snapshots.facts import KVFacts, check_holds_everything, check_token_ids
from mlx_paged.snapshots.prompt_caches import (
    PromptCacheFile,
    export_prompt_cache,
    import_prompt_cache,
    read_prompt_cache,
    write_prompt_cache,
)
from mlx_paged.snapshots.rows import PrefixRows, find_prefix, put_prefix
from mlx_paged.snapshots.snapshots import (
    SnapshotFile,
    is_snapshot,
    load_snapshot,
    save_prefix,
    save_snapshot,
)

__all__ = [
    "KVFacts",
    "PrefixRows",
    "PromptCacheFile",
    "SnapshotError",
    "SnapshotFile",
    "check_holds_everything",
    "check_token_ids",
    "export_prompt_cache",
    "find_prefix",
    "import_prompt_cache",
    "is_snapshot",
    "load_snapshot",
    "put_prefix",
    "read_prompt_cache",
    "save_prefix",
    "save_snapshot",
    "write_prompt_cache",
]
