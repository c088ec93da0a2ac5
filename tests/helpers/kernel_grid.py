"""A fixed list of settings for the attention kernels: each instance of a kernel takes half a second
to compile.

All 16 group sizes meet all 4 kernel capacities, and every pair of what an instance is made of is
there but for 47 of head_dim and group size, `test_the_grid_covers_what_it_says` counts them. What
costs nothing to compile (lengths, windows, sinks, order of the blocks, poison) is spread over the
list so that each value meets merged partitions and single ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from helpers.numpy_attention import DTYPES, PagedProblem, make_problem
from mlx_paged.ops.attention_plan import partition_sizes

HEAD_DIMS = (32, 64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64)
CAPACITIES = (1, 2, 4, 8)

# For the kernels without a group: each head_dim meets each block size, and each dtype all of both.
SHAPES = [
    (head_dim, block_size, list(DTYPES)[(i + j) % 3])
    for i, head_dim in enumerate(HEAD_DIMS)
    for j, block_size in enumerate(BLOCK_SIZES)
]


@dataclass(frozen=True)
class Case:
    dtype: str
    head_dim: int
    block_size: int
    num_kv_heads: int
    group: int
    seqs: tuple[
        tuple[int, int], ...
    ]  # context length and query run of each; all runs go to the same kernel
    window: int | None
    sinks: bool
    order: str
    poison: str

    @property
    def capacity(self) -> int:
        """Query tokens per sequence of the kernel that computes the case."""
        longest = max(query_len for _, query_len in self.seqs)
        return next(capacity for capacity in CAPACITIES if longest <= capacity)

    @property
    def row_bytes(self) -> int:
        """Of a row of K, V or a query, in the dtype that is computed in."""
        return self.head_dim * DTYPES[self.dtype].size

    @property
    def is_merged(self) -> bool:
        """Whether some sequence sees keys of several partitions."""
        for context_len, query_len in self.seqs:
            window = context_len if self.window is None else self.window
            first = max(0, context_len - query_len - window + 1)
            size = partition_sizes(self.num_kv_heads)[(context_len - first).bit_length()]
            if first // size != (context_len - 1) // size:
                return True
        return False

    def problem(self, **changes: object) -> PagedProblem:
        settings = dict(
            num_kv_heads=self.num_kv_heads,
            group=self.group,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=DTYPES[self.dtype],
            order=self.order,
            window=self.window,
            sinks=self.sinks,
            poison=self.poison,
            seed=self.group,
        )
        context_lens, query_lens = zip(*self.seqs, strict=True)
        return make_problem(context_lens, query_lens, **settings | changes)

    def __str__(self) -> str:
        cut = "merged" if self.is_merged else "direct"
        extras = f"-w{self.window}" * (self.window is not None) + "-sinks" * self.sinks
        return (
            f"{self.dtype}-d{self.head_dim}-b{self.block_size}-{self.num_kv_heads}x{self.group}"
            f"-run{self.capacity}-{cut}{extras}"
        )


# dtype, head_dim, block_size, num_kv_heads x group, window, sinks, order, what is NaN; then context
# length / query run of each sequence
_GRID = """
f32  96  8  2x1  100  -     adjacent values 511/1 16/1 1000/1 256/1
f32  128 32 2x2  5000 -     shuffled values 1/1 513/1
bf16 256 16 3x3  100  -     shared   values 1000/1 1/1 15/1
f32  80  8  2x4  2    sinks shuffled keys   1000/1 255/1 16/1
f16  256 8  3x5  5000 sinks reversed values 1/1 255/1
f32  96  64 3x6  1    -     reversed values 513/1 1/1 257/1 512/1
f32  64  32 3x7  255  sinks shuffled values 512/1 511/1 1000/1 257/1
bf16 96  32 2x8  256  sinks shuffled values 1/1 256/1 17/1 513/1
f16  256 32 3x9  300  -     shuffled keys   1/1 16/1 15/1
bf16 256 64 3x10 2    -     reversed values 513/1 15/1 17/1 512/1
f16  128 16 3x11 100  sinks reversed keys   257/1 1000/1 16/1
bf16 256 8  3x12 256  sinks adjacent values 256/1 17/1 511/1 16/1
f32  128 8  1x13 257  -     shared   values 511/1 512/1 16/1 257/1
bf16 32  16 3x14 257  sinks shuffled values 1/1 17/1 15/1
f32  256 8  3x15 -    sinks adjacent values 100/1 1/1
bf16 80  8  2x16 5000 -     shuffled keys   512/1 15/1 17/1 1000/1
f16  96  16 3x1  -    -     shuffled keys   15/2 17/2
bf16 128 8  1x2  255  sinks adjacent keys   16/2 2/2
bf16 96  64 2x3  257  -     shuffled keys   16/2 2/2 255/2 17/2
f16  256 16 2x4  5000 sinks reversed values 16/2 256/2 255/2
f16  64  16 1x5  2    sinks shared   values 511/2 512/2 15/2
f16  80  8  3x6  -    sinks shared   keys   15/2 17/2 512/2 2/2
f16  64  16 3x7  300  -     shared   keys   15/2 255/2
bf16 80  64 1x8  300  -     reversed values 17/2 16/2
f32  256 8  3x9  -    sinks adjacent values 511/2 16/2 255/2
f32  32  8  3x10 100  sinks shared   values 511/2 513/2 2/2
bf16 96  8  1x11 255  sinks shared   keys   511/2 2/2 15/2 513/2
f32  128 32 2x12 16   -     reversed values 15/2 255/2 257/2
bf16 256 32 3x13 255  sinks reversed keys   512/2 255/2 256/2 17/2
f16  64  64 1x14 1    -     adjacent values 255/2 512/2 513/2
f32  32  64 2x15 256  -     reversed values 16/2 100/2
f16  128 64 1x16 257  sinks reversed keys   255/2 15/2 257/2 1000/2
f32  256 32 1x1  257  -     shuffled keys   255/4 256/3 17/4
bf16 32  16 3x2  2    sinks shared   values 257/4 513/3 3/3 256/4
f16  256 32 2x3  1    sinks reversed keys   513/3 511/3 257/4 255/3
f32  32  32 1x4  -    -     shuffled values 255/3 257/3 16/3 1000/4
f32  32  64 1x5  256  -     adjacent values 17/3 513/4 256/4 511/3
f16  128 32 2x6  300  -     reversed keys   256/3 255/4 17/3
f32  32  64 1x7  16   sinks adjacent keys   511/3 4/4
f32  96  8  3x8  16   sinks shared   keys   15/3 17/4 1000/4
bf16 128 64 1x9  100  -     reversed keys   15/4 512/3
f32  80  16 1x10 257  sinks adjacent values 16/4 17/4 3/3 511/4
f32  64  64 2x11 -    -     reversed values 15/4 16/3 100/4 99/3
bf16 32  64 1x12 -    sinks shared   keys   513/3 16/3
bf16 64  64 2x13 5000 -     adjacent keys   100/3 60/4
bf16 128 8  2x14 255  -     reversed values 255/3 17/4 256/3
f16  96  16 1x15 16   -     shuffled values 513/3 16/4
f32  128 16 1x16 1    -     adjacent keys   15/4 16/3
bf16 64  64 3x1  16   sinks reversed keys   512/8 513/7 256/5 1000/8
f16  32  64 3x2  1    -     reversed keys   256/5 17/7 1000/8
f32  32  8  1x3  300  sinks shared   keys   17/5 511/6 16/6 1000/6
bf16 32  64 3x4  255  sinks shared   keys   8/8 257/5 513/6
bf16 64  32 2x5  100  -     shuffled keys   16/8 512/5 7/7 257/8
bf16 64  16 1x6  257  sinks shuffled keys   513/8 6/6
bf16 64  8  2x7  1    -     reversed values 256/7 512/8 16/7 255/5
f16  32  16 2x8  256  sinks adjacent keys   512/7 7/7 15/7
f16  80  16 2x9  255  sinks shuffled keys   257/6
f16  80  32 2x10 -    sinks shuffled keys   127/8 16/5
f32  96  32 1x11 300  -     adjacent values 511/6
f16  256 16 2x12 2    -     reversed keys   255/7
f16  128 16 2x13 -    -     shuffled keys   255/5 257/5
f32  80  32 1x14 5000 -     shared   keys   257/7
bf16 128 32 1x15 100  -     shared   keys   257/6 17/8
f32  96  32 2x16 2    sinks shared   values 513/6
"""


def _case(line: str) -> Case:
    dtype, head_dim, block_size, heads, window, sinks, order, poison, *seqs = line.split()
    num_kv_heads, group = map(int, heads.split("x"))
    return Case(
        *(dtype, int(head_dim), int(block_size), num_kv_heads, group),
        tuple((int(context_len), int(run)) for context_len, run in (s.split("/") for s in seqs)),
        *(None if window == "-" else int(window), sinks == "sinks", order, f"nan_{poison}"),
    )


GRID = tuple(map(_case, _GRID.strip().splitlines()))

# Two cases of each capacity are in the fast lane.
each_case_of_the_grid = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if index % 16 == 3 else pytest.mark.slow)
        for index, case in enumerate(GRID)
    ],
)

# For whole steps, whose query runs take kernels of several capacities each.
SETTINGS = {
    f"{dtype}-d{head_dim}-b{block_size}-{heads}x{group}": {
        "dtype": DTYPES[dtype],
        "head_dim": head_dim,
        "block_size": block_size,
        "num_kv_heads": heads,
        "group": group,
    }
    for dtype, head_dim, block_size, heads, group in (
        ("f16", 64, 16, 2, 4),
        ("bf16", 256, 8, 1, 5),
        ("f32", 96, 8, 3, 1),
    )
}
# The first is in the fast lane.
each_setting = pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=name, marks=pytest.mark.slow if index else ())
        for index, (name, setting) in enumerate(SETTINGS.items())
    ],
)
