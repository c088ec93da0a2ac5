"""What one gather of several sequences is told, and how its result is divided."""

from __future__ import annotations

import mlx.core as mx
from paged_testing.by_hand import step_of

from mlx_paged.ops.gather_plan import GatherPlan


def test_a_plan_names_each_block_with_its_sequence_then_where_each_sequence_begins():
    plan = GatherPlan.pack([[7, 3, 9], [4], [5, 6]], [40, 16, 17], 16)
    assert plan.array.dtype == mx.int32
    assert plan.array.tolist() == [
        *(7, 0, 3, 0, 9, 0, 4, 1, 5, 2, 6, 2, 0, 3),
        *(0, 0, 40),
        *(3, 40, 16),
        *(4, 56, 17),
        *(6, 73, 7),  # a null block behind them
        *[0] * 38,
    ]
    assert (plan.num_blocks, plan.num_tokens, plan.num_out_tokens) == (7, [40, 16, 17], 80)


def test_plans_and_results_of_a_growing_context_have_few_sizes():
    plans = [GatherPlan.pack([range(-(-n // 16))], [n], 16) for n in range(1, 2000)]
    assert sorted({plan.array.size for plan in plans}) == [64, 128, 256, 512]
    sizes = sorted({plan.num_out_tokens for plan in plans})
    assert sizes[-9:] == [1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048]
    assert len(sizes) == 16 + 7 * 8
    assert all(n <= plan.num_out_tokens < n + n / 8 for n, plan in enumerate(plans, 1))


def test_each_sequence_gets_its_rows_heads_first():
    plan = GatherPlan.pack([[1], [2], [3]], [2, 1, 3], 16)
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
