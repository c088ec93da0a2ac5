"""Several machines, one model: the ranks of ``mlx.launch`` and the messages between them.

Every rank holds its share of each layer's heads and runs the same scheduler. Activations travel
through MLX's own collectives. Rank 0 sends everything else over separate connections
(:class:`Ranks`), which cost nothing while they are idle and show at once that a rank is gone.
"""

from mlx_paged.distributed.ranks import Ranks, RanksError, connect, launched_ranks
from mlx_paged.distributed.sharding import check_divisible, check_linear_sizes

__all__ = [
    "Ranks",
    "RanksError",
    "check_divisible",
    "check_linear_sizes",
    "connect",
    "launched_ranks",
]
