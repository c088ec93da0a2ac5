"""What one gather of several sequences is told, and how its result is divided."""

from __future__ import annotations

import mlx.core as mx
from paged_testing.by_hand import step_of

from mlx_paged.ops.gather_plan import GatherPlan


def test_a_plan_names_each_block_with_its_sequence_then_where_each_sequence_begins():
    plan = GatherPlan.pack([[7, 3, 9], [4], [5, 6]], [40, 16, 17])
    assert plan.array.dtype == mx.int32
    assert plan.array.tolist() == [
        *(7, 0, 3, 0, 9, 0, 4, 1, 5, 2, 6, 2),
        *(0, 0, 40),
        *(3, 40, 16),
        *(4, 56, 17),
    ]
    assert (plan.num_blocks, plan.num_tokens) == (6, [40, 16, 17])


def test_a_short_plan_is_filled_up_to_what_metal_passes_as_an_array():
    assert GatherPlan.pack([[7]], [3]).array.tolist() == [7, 0, 0, 0, 3, 0, 0, 0]


def test_each_sequence_gets_its_rows_heads_first():
    plan = GatherPlan.pack([[1], [2], [3]], [2, 1, 3])
    rows = mx.arange(12)[:, None]
    assert [[part[:, :, 0].tolist() for part in pair] for pair in plan.split(rows, -rows, 2)] == [
        [[[0, 1], [2, 3]], [[0, -1], [-2, -3]]],
        [[[4], [5]], [[-4], [-5]]],
        [[[6, 7, 8], [9, 10, 11]], [[-6, -7, -8], [-9, -10, -11]]],
    ]


def test_a_step_is_packed_once():
    step = step_of([[1, 2], [3]], [20, 16], [9, 16], 16)
    assert GatherPlan.of(step) is GatherPlan.of(step)
    assert GatherPlan.of(step).num_tokens == [20, 16]
    assert GatherPlan.of(step.with_history) is GatherPlan.of(step.with_history)
    assert GatherPlan.of(step.with_history).num_tokens == [20]
