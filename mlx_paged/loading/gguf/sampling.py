"""How a GGUF file's authors want it sampled: its ``general.sampling.*``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_paged.loading.gguf.header import read_header

# The names of generation_config.json -> the file's.
_KEYS = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


def read_gguf_sampling(path: Path) -> dict[str, Any]:
    """What the file recommends, under the names of ``generation_config.json``."""
    metadata = read_header(path).metadata
    values = {name: metadata.get(f"general.sampling.{key}") for name, key in _KEYS.items()}
    return {name: value for name, value in values.items() if value is not None}
