"""mlx-lm's models, unmodified, on the caches of this package."""
