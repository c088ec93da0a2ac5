"""Models of mlx-lm, unmodified, on the caches of this package."""

from mlx_paged.errors import UnsuitableModelError
from mlx_paged.models.mlx_lm.trial import adapt, check_model, layer_specs_of

__all__ = ["UnsuitableModelError", "adapt", "check_model", "layer_specs_of"]
