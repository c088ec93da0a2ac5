"""Models from local folders, GGUF files or the Hugging Face hub, and their recommended sampling."""

from mlx_paged.loading.draft_model import load_draft_model
from mlx_paged.loading.folder import LoadError, demo_model_path, find_model
from mlx_paged.loading.generation_config import read_sampling_defaults
from mlx_paged.loading.gguf import dtype_config
from mlx_paged.loading.launched import load_for
from mlx_paged.loading.loader import load
from mlx_paged.loading.outline import find_model_for

__all__ = [
    "LoadError",
    "demo_model_path",
    "dtype_config",
    "find_model",
    "find_model_for",
    "load",
    "load_draft_model",
    "load_for",
    "read_sampling_defaults",
]
