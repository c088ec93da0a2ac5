"""A fixed list of settings for the attention kernels: each instance of a kernel takes half a second
to compile.

All 16 group sizes meet all 4 kernel capacities, and every pair of what an instance is made of is
there but for 47 of head_dim and group size, `test_the_grid_covers_what_it_says` counts them. What
costs nothing to compile (lengths, windows, sinks, order of the blocks, poison) is spread over the
list so that each value meets merged partitions and single ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
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


# dtype, head_dim, block_size, num_kv_heads, group, (context, run) of each sequence, window, sinks,
# order, poison
GRID = (
    Case(
        "f32",
        96,
        8,
        2,
        1,
        ((511, 1), (16, 1), (1000, 1), (256, 1)),
        100,
        False,
        "adjacent",
        "nan_values",
    ),
    Case("f32", 128, 32, 2, 2, ((1, 1), (513, 1)), 5000, False, "shuffled", "nan_values"),
    Case("bf16", 256, 16, 3, 3, ((1000, 1), (1, 1), (15, 1)), 100, False, "shared", "nan_values"),
    Case("f32", 80, 8, 2, 4, ((1000, 1), (255, 1), (16, 1)), 2, True, "shuffled", "nan_keys"),
    Case("f16", 256, 8, 3, 5, ((1, 1), (255, 1)), 5000, True, "reversed", "nan_values"),
    Case(
        "f32",
        96,
        64,
        3,
        6,
        ((513, 1), (1, 1), (257, 1), (512, 1)),
        1,
        False,
        "reversed",
        "nan_values",
    ),
    Case(
        "f32",
        64,
        32,
        3,
        7,
        ((512, 1), (511, 1), (1000, 1), (257, 1)),
        255,
        True,
        "shuffled",
        "nan_values",
    ),
    Case(
        "bf16",
        96,
        32,
        2,
        8,
        ((1, 1), (256, 1), (17, 1), (513, 1)),
        256,
        True,
        "shuffled",
        "nan_values",
    ),
    Case("f16", 256, 32, 3, 9, ((1, 1), (16, 1), (15, 1)), 300, False, "shuffled", "nan_keys"),
    Case(
        "bf16",
        256,
        64,
        3,
        10,
        ((513, 1), (15, 1), (17, 1), (512, 1)),
        2,
        False,
        "reversed",
        "nan_values",
    ),
    Case("f16", 128, 16, 3, 11, ((257, 1), (1000, 1), (16, 1)), 100, True, "reversed", "nan_keys"),
    Case(
        "bf16",
        256,
        8,
        3,
        12,
        ((256, 1), (17, 1), (511, 1), (16, 1)),
        256,
        True,
        "adjacent",
        "nan_values",
    ),
    Case(
        "f32",
        128,
        8,
        1,
        13,
        ((511, 1), (512, 1), (16, 1), (257, 1)),
        257,
        False,
        "shared",
        "nan_values",
    ),
    Case("bf16", 32, 16, 3, 14, ((1, 1), (17, 1), (15, 1)), 257, True, "shuffled", "nan_values"),
    Case("f32", 256, 8, 3, 15, ((100, 1), (1, 1)), None, True, "adjacent", "nan_values"),
    Case(
        "bf16",
        80,
        8,
        2,
        16,
        ((512, 1), (15, 1), (17, 1), (1000, 1)),
        5000,
        False,
        "shuffled",
        "nan_keys",
    ),
    Case("f16", 96, 16, 3, 1, ((15, 2), (17, 2)), None, False, "shuffled", "nan_keys"),
    Case("bf16", 128, 8, 1, 2, ((16, 2), (2, 2)), 255, True, "adjacent", "nan_keys"),
    Case(
        "bf16",
        96,
        64,
        2,
        3,
        ((16, 2), (2, 2), (255, 2), (17, 2)),
        257,
        False,
        "shuffled",
        "nan_keys",
    ),
    Case("f16", 256, 16, 2, 4, ((16, 2), (256, 2), (255, 2)), 5000, True, "reversed", "nan_values"),
    Case("f16", 64, 16, 1, 5, ((511, 2), (512, 2), (15, 2)), 2, True, "shared", "nan_values"),
    Case(
        "f16", 80, 8, 3, 6, ((15, 2), (17, 2), (512, 2), (2, 2)), None, True, "shared", "nan_keys"
    ),
    Case("f16", 64, 16, 3, 7, ((15, 2), (255, 2)), 300, False, "shared", "nan_keys"),
    Case("bf16", 80, 64, 1, 8, ((17, 2), (16, 2)), 300, False, "reversed", "nan_values"),
    Case("f32", 256, 8, 3, 9, ((511, 2), (16, 2), (255, 2)), None, True, "adjacent", "nan_values"),
    Case("f32", 32, 8, 3, 10, ((511, 2), (513, 2), (2, 2)), 100, True, "shared", "nan_values"),
    Case(
        "bf16", 96, 8, 1, 11, ((511, 2), (2, 2), (15, 2), (513, 2)), 255, True, "shared", "nan_keys"
    ),
    Case("f32", 128, 32, 2, 12, ((15, 2), (255, 2), (257, 2)), 16, False, "reversed", "nan_values"),
    Case(
        "bf16",
        256,
        32,
        3,
        13,
        ((512, 2), (255, 2), (256, 2), (17, 2)),
        255,
        True,
        "reversed",
        "nan_keys",
    ),
    Case("f16", 64, 64, 1, 14, ((255, 2), (512, 2), (513, 2)), 1, False, "adjacent", "nan_values"),
    Case("f32", 32, 64, 2, 15, ((16, 2), (100, 2)), 256, False, "reversed", "nan_values"),
    Case(
        "f16",
        128,
        64,
        1,
        16,
        ((255, 2), (15, 2), (257, 2), (1000, 2)),
        257,
        True,
        "reversed",
        "nan_keys",
    ),
    Case("f32", 256, 32, 1, 1, ((255, 4), (256, 3), (17, 4)), 257, False, "shuffled", "nan_keys"),
    Case(
        "bf16",
        32,
        16,
        3,
        2,
        ((257, 4), (513, 3), (3, 3), (256, 4)),
        2,
        True,
        "shared",
        "nan_values",
    ),
    Case(
        "f16",
        256,
        32,
        2,
        3,
        ((513, 3), (511, 3), (257, 4), (255, 3)),
        1,
        True,
        "reversed",
        "nan_keys",
    ),
    Case(
        "f32",
        32,
        32,
        1,
        4,
        ((255, 3), (257, 3), (16, 3), (1000, 4)),
        None,
        False,
        "shuffled",
        "nan_values",
    ),
    Case(
        "f32",
        32,
        64,
        1,
        5,
        ((17, 3), (513, 4), (256, 4), (511, 3)),
        256,
        False,
        "adjacent",
        "nan_values",
    ),
    Case("f16", 128, 32, 2, 6, ((256, 3), (255, 4), (17, 3)), 300, False, "reversed", "nan_keys"),
    Case("f32", 32, 64, 1, 7, ((511, 3), (4, 4)), 16, True, "adjacent", "nan_keys"),
    Case("f32", 96, 8, 3, 8, ((15, 3), (17, 4), (1000, 4)), 16, True, "shared", "nan_keys"),
    Case("bf16", 128, 64, 1, 9, ((15, 4), (512, 3)), 100, False, "reversed", "nan_keys"),
    Case(
        "f32",
        80,
        16,
        1,
        10,
        ((16, 4), (17, 4), (3, 3), (511, 4)),
        257,
        True,
        "adjacent",
        "nan_values",
    ),
    Case(
        "f32",
        64,
        64,
        2,
        11,
        ((15, 4), (16, 3), (100, 4), (99, 3)),
        None,
        False,
        "reversed",
        "nan_values",
    ),
    Case("bf16", 32, 64, 1, 12, ((513, 3), (16, 3)), None, True, "shared", "nan_keys"),
    Case("bf16", 64, 64, 2, 13, ((100, 3), (60, 4)), 5000, False, "adjacent", "nan_keys"),
    Case(
        "bf16", 128, 8, 2, 14, ((255, 3), (17, 4), (256, 3)), 255, False, "reversed", "nan_values"
    ),
    Case("f16", 96, 16, 1, 15, ((513, 3), (16, 4)), 16, False, "shuffled", "nan_values"),
    Case("f32", 128, 16, 1, 16, ((15, 4), (16, 3)), 1, False, "adjacent", "nan_keys"),
    Case(
        "bf16",
        64,
        64,
        3,
        1,
        ((512, 8), (513, 7), (256, 5), (1000, 8)),
        16,
        True,
        "reversed",
        "nan_keys",
    ),
    Case("f16", 32, 64, 3, 2, ((256, 5), (17, 7), (1000, 8)), 1, False, "reversed", "nan_keys"),
    Case(
        "f32", 32, 8, 1, 3, ((17, 5), (511, 6), (16, 6), (1000, 6)), 300, True, "shared", "nan_keys"
    ),
    Case("bf16", 32, 64, 3, 4, ((8, 8), (257, 5), (513, 6)), 255, True, "shared", "nan_keys"),
    Case(
        "bf16",
        64,
        32,
        2,
        5,
        ((16, 8), (512, 5), (7, 7), (257, 8)),
        100,
        False,
        "shuffled",
        "nan_keys",
    ),
    Case("bf16", 64, 16, 1, 6, ((513, 8), (6, 6)), 257, True, "shuffled", "nan_keys"),
    Case(
        "bf16",
        64,
        8,
        2,
        7,
        ((256, 7), (512, 8), (16, 7), (255, 5)),
        1,
        False,
        "reversed",
        "nan_values",
    ),
    Case("f16", 32, 16, 2, 8, ((512, 7), (7, 7), (15, 7)), 256, True, "adjacent", "nan_keys"),
    Case("f16", 80, 16, 2, 9, ((257, 6),), 255, True, "shuffled", "nan_keys"),
    Case("f16", 80, 32, 2, 10, ((127, 8), (16, 5)), None, True, "shuffled", "nan_keys"),
    Case("f32", 96, 32, 1, 11, ((511, 6),), 300, False, "adjacent", "nan_values"),
    Case("f16", 256, 16, 2, 12, ((255, 7),), 2, False, "reversed", "nan_keys"),
    Case("f16", 128, 16, 2, 13, ((255, 5), (257, 5)), None, False, "shuffled", "nan_keys"),
    Case("f32", 80, 32, 1, 14, ((257, 7),), 5000, False, "shared", "nan_keys"),
    Case("bf16", 128, 32, 1, 15, ((257, 6), (17, 8)), 100, False, "shared", "nan_keys"),
    Case("f32", 96, 32, 2, 16, ((513, 6),), 2, True, "shared", "nan_values"),
)

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
    "f16-d64-b16-2x4": {
        "dtype": mx.float16,
        "head_dim": 64,
        "block_size": 16,
        "num_kv_heads": 2,
        "group": 4,
    },
    "bf16-d256-b8-1x5": {
        "dtype": mx.bfloat16,
        "head_dim": 256,
        "block_size": 8,
        "num_kv_heads": 1,
        "group": 5,
    },
    "f32-d96-b8-3x1": {
        "dtype": mx.float32,
        "head_dim": 96,
        "block_size": 8,
        "num_kv_heads": 3,
        "group": 1,
    },
}
# The first is in the fast lane.
each_setting = pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=name, marks=pytest.mark.slow if index else ())
        for index, (name, setting) in enumerate(SETTINGS.items())
    ],
)
