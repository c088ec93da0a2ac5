"""Whether a model fits into a machine, before any of its weights is read: ``mlx-paged fit`` and
``mlx-paged list``.
"""

from mlx_paged.fit.program import main, main_of_list

__all__ = ["main", "main_of_list"]
