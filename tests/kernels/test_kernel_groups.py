"""Groups of more query heads than a threadgroup holds rows of: several threadgroups share them."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.backends import METAL
from helpers.kernel_checks import assert_same_bits, attend_and_compare, checked_metal
from helpers.numpy_attention import make_problem
from helpers.quantised_problems import quantised

from mlx_paged.ops.attention_plan import cut_rows

SEQS = ([300, 17], [1, 1])


def problem_of(group: int, context_lens=SEQS[0], query_lens=SEQS[1], **changes):
    settings = {"num_kv_heads": 2, "dtype": mx.float16, "sinks": True, "poison": "nan_values"}
    return make_problem(context_lens, query_lens, group=group, **settings | changes)


@pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=() if group == 17 else pytest.mark.slow) for group in (17, 32, 71)],
)
def test_a_large_group_matches_the_formula(group, metal):
    attend_and_compare(problem_of(group))
    attention = [call for call in metal if "ROW_PARTS" in call.template]
    cut = cut_rows(group, 128)
    assert {call.template["ROW_PARTS"] for call in attention} == {cut.row_parts}
    assert attention[0].grid[1] == 2 * cut.row_parts > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "changes"),
    [
        (128, {"head_dim": 32, "dtype": mx.bfloat16}),
        (33, {"head_dim": 512, "num_kv_heads": 1}),
        (20, {"head_dim": 256, "dtype": mx.float32, "window": 270}),
    ],
    ids=str,
)
def test_a_large_group_of_every_width_matches_the_formula(group, changes, metal):
    attend_and_compare(problem_of(group, **changes))


@pytest.mark.slow
def test_a_large_group_on_quantised_rows_matches_the_formula(metal):
    attend_and_compare(quantised(problem_of(24), 8, 4))


def test_runs_are_decoded_up_to_128_rows_and_gathered_beyond(metal):
    problem = problem_of(48, [40, 40, 40], [1, 2, 3], num_kv_heads=1)
    attend_and_compare(problem)
    runs = [call.template.get("RUN") for call in metal]
    # Three queries are a run of 4, of 192 rows: gathered, after its rows were written.
    assert [run for run in runs if run is not None] == [1, 2, 1, 2]
    gathered = [call.kernel for call in metal if call.kernel == "mlx_paged_gather_blocks"]
    assert len(gathered) == 2


@pytest.mark.slow
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(metal):
    problem = problem_of(40)
    together = METAL.attend(*problem.args)
    for seq in range(2):
        assert_same_bits(METAL.attend(*problem.alone(seq)), together[problem.rows(seq)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("num_rows - row_part * THREADGROUP_ROWS", "num_rows"),
        ("(row_part * ROW_SPLITS + split) * SIMDGROUP_ROWS", "split * SIMDGROUP_ROWS"),
        (
            "threadgroup_position_in_grid.y / ROW_PARTS",
            "threadgroup_position_in_grid.y / (ROW_PARTS + 1)",
        ),
    ],
    ids=["rows_past_the_end", "rows_of_the_first_part", "kv_head"],
)
def test_a_mistake_in_the_parts_of_the_rows_is_seen(text, other, plant, compiler):
    with checked_metal():
        plant("paged_attention.metal", text, other)
        with pytest.raises(Exception, match=r"sequence \d|not equal|mlx_paged_paged_attention"):
            attend_and_compare(problem_of(33, [40], [1]))
