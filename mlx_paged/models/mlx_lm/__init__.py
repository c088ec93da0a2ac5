"""Models of mlx-lm, unmodified, on the caches of this package."""

from mlx_paged.models.mlx_lm.adapt import adapt
from mlx_paged.models.mlx_lm.errors import UnsuitableModelError

__all__ = ["UnsuitableModelError", "adapt"]
