"""K/V in files: snapshots of sequences and of prefixes, and mlx-lm's prompt caches."""

from mlx_paged.snapshots.prompt_caches import (
    PromptCacheFile,
    export_prompt_cache,
    import_prompt_cache,
    read_prompt_cache,
    written_prompt_cache,
)
from mlx_paged.snapshots.rows import SnapshotError, check_path, prefix_headers, sequence_headers
from mlx_paged.snapshots.snapshots import (
    KVFacts,
    SnapshotFile,
    check_has_blocks,
    check_token_ids,
    is_snapshot,
    load_snapshot,
    save_snapshot,
    written_snapshot,
)

__all__ = [
    "KVFacts",
    "PromptCacheFile",
    "SnapshotError",
    "SnapshotFile",
    "check_has_blocks",
    "check_path",
    "check_token_ids",
    "export_prompt_cache",
    "import_prompt_cache",
    "is_snapshot",
    "load_snapshot",
    "prefix_headers",
    "read_prompt_cache",
    "save_snapshot",
    "sequence_headers",
    "written_prompt_cache",
    "written_snapshot",
]
