"""Shapes that no kernel is made for: refused by name, or computed in another way."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.backends import METAL
from helpers.fast_lane import mostly_slow
from helpers.kernel_checks import assert_same_bits, assert_same_slabs
from helpers.numpy_attention import assert_matches_formula, before_the_step, make_problem

from mlx_paged.ops import AttentionShape, choose_backend

SHAPES = {
    "block_size": (
        {"block_size": 128},
        "block_size 128 has no Metal kernel; there are kernels for 8, 16, 32, 64",
    ),
    "small_block_size": (
        {"block_size": 4},
        "block_size 4 has no Metal kernel; there are kernels for 8, 16, 32, 64",
    ),
}


@pytest.mark.parametrize(("shape", "lack"), SHAPES.values(), ids=SHAPES)
def test_a_shape_without_a_kernel_is_refused_by_name(shape, lack, metal):
    problem = make_problem([33, 5], 2, **shape)
    with pytest.raises(ValueError) as error:
        METAL.attend(*problem.args)
    assert str(error.value) == f"[paged_attention] {lack}"


@pytest.mark.filterwarnings("ignore:.*has no Metal kernel")
@pytest.mark.parametrize(("shape", "lack"), SHAPES.values(), ids=SHAPES)
def test_auto_runs_the_reference_for_a_shape_without_a_kernel(shape, lack, metal):
    problem = make_problem([33, 5], 2, **shape)
    kv = problem.kv
    shape = AttentionShape(kv.num_kv_heads, 2, kv.key_dim, kv.value_dim, kv.block_size, kv.format)
    backend = choose_backend("auto", [shape])
    assert_matches_formula(backend.attend(*problem.args), problem)
    assert metal == []


@mostly_slow("widths", [(72, 72), (96, 72), (40, 96)], ids=str, quick=(1,))
def test_rows_of_widths_without_a_kernel_for_attention_are_gathered(widths, metal):
    head_dim, value_dim = widths
    problem = make_problem(
        [33, 300, 7], [1, 2, 7], head_dim=head_dim, value_dim=value_dim, sinks=True
    )
    kv, k, v = before_the_step(problem)
    out = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_matches_formula(out, problem)
    assert_same_slabs(kv, problem.kv)
    assert [call.kernel.removeprefix("mlx_paged_") for call in metal] == [
        "reshape_and_cache",
        "gather_blocks",
    ]


@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 129), (2, 130)], ids=["1x129", "2x130"])
def test_a_group_too_large_for_a_kernel_is_gathered_for_attention_of_mlx(
    num_kv_heads, group, metal
):
    problem = make_problem(
        [33, 300, 7],
        [2, 1, 7],
        num_kv_heads=num_kv_heads,
        group=group,
        sinks=True,
        dtype=mx.float16,
        poison="nan_keys",
    )
    out = METAL.attend(*problem.args)
    assert_matches_formula(out, problem)
    assert_same_bits(out, METAL.attend(*problem.args))
    # All sequences in one dispatch, which covers whole blocks: 3, 19 and 1, and a null block that
    # fills up the result.
    gathered = [(call.kernel, call.grid[1]) for call in metal]
    assert gathered == 2 * [("mlx_paged_gather_blocks", 24 * 16)]


def test_a_decode_of_a_group_too_large_for_a_kernel_is_written_before_it_is_gathered(metal):
    problem = make_problem(
        [33, 12], 1, num_kv_heads=1, group=129, dtype=mx.float16, poison="nan_values"
    )
    q, kv, *rest = problem.args
    k, v = (mx.concatenate([rows[i][-1:] for rows in problem.dense]) for i in (1, 2))
    out = METAL.update_and_attend(q, k, v, kv, *rest)
    assert_matches_formula(out, problem)
    assert [call.kernel.removeprefix("mlx_paged_") for call in metal] == [
        "reshape_and_cache",
        "gather_blocks",
    ]
