"""Several machines, one model: the ranks of ``mlx.launch`` and the messages between them.

Every rank holds its share of each layer's heads and runs the same scheduler. Activations travel
through MLX's own collectives. Rank 0 sends everything else over separate connections
(:class:`Ranks`), which cost nothing while they are idle and show at once that a rank is gone.
"""

from mlx_paged.distributed.links import RanksError
from mlx_paged.distributed.ranks import Ranks, connect, join_ranks, launched_ranks, smallest_budget
from mlx_paged.distributed.values import as_json, from_json

__all__ = [
    "Ranks",
    "RanksError",
    "as_json",
    "connect",
    "from_json",
    "join_ranks",
    "launched_ranks",
    "smallest_budget",
]
