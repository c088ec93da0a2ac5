"""Rows of which a lane has several loads, and K and V of different widths, in the attention
kernels.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.backends import METAL
from helpers.kernel_checks import (
    assert_same_alone,
    assert_same_bits,
    attend_and_compare,
    checked_metal,
)
from helpers.numpy_attention import DTYPES, make_problem
from helpers.quantised_problems import quantised
from metal_emulator import ForbiddenWrite, MemoryFault
from metal_emulator.errors import UnwrittenOutput

SEQS = ((300, 1), (17, 1), (40, 2), (265, 4))
# K and V of Gemma 4's global layers, of MiniCPM3, and of DeepSeek without absorption; narrow keys;
# loads that do not fill their lanes; and the narrowest rows beside the widest.
WIDTHS = ((512, 512), (96, 64), (192, 128), (64, 96), (192, 192), (32, 512), (512, 32))


def problem_of(widths, dtype=mx.float16, seqs=SEQS, **changes):
    context_lens, query_lens = zip(*seqs, strict=True)
    settings = {"group": 3, "sinks": True, "window": 280, "poison": "nan_keys"} | changes
    head_dim, value_dim = widths
    return make_problem(
        context_lens, query_lens, head_dim=head_dim, value_dim=value_dim, dtype=dtype, **settings
    )


# Loads of float16 are those of bfloat16, so each width takes one of them; rows of several loads a
# lane take both. The dtype does not decide how queries share a threadgroup: runs of 4 meet float32,
# and runs of 2 the others.
PLAIN = [
    *((widths, "f32") for widths in WIDTHS),
    *((widths, ("f16", "bf16")[n % 2]) for n, widths in enumerate(WIDTHS)),
    *(((192, 192), "bf16"), ((512, 512), "bf16")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("widths", "dtype"), PLAIN, ids=str)
def test_rows_of_every_width_match_the_formula(widths, dtype, metal):
    block_size = 8 if dtype == "f16" else 32
    seqs = (*SEQS[:2], SEQS[3 if dtype == "f32" else 2])
    attend_and_compare(problem_of(widths, DTYPES[dtype], seqs, block_size=block_size))


@pytest.mark.parametrize(
    ("widths", "dtype"),
    [((96, 64), mx.float32), ((512, 512), mx.bfloat16)],
    ids=["narrower_values", "two_loads"],
)
def test_decodes_of_wide_rows_and_of_different_widths_match_the_formula(widths, dtype, metal):
    attend_and_compare(problem_of(widths, dtype, SEQS[:2], poison="nan_values"))
    call = metal[0]
    assert (call.template["KEY_DIM"], call.template["VALUE_DIM"]) == widths
    assert [c.kernel.removeprefix("mlx_paged_") for c in metal] == 2 * [
        "paged_attention",
        "merge_partitions",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("widths", WIDTHS[:3:2], ids=str)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(widths, metal):
    problem = problem_of(widths)
    assert_same_alone(problem, METAL.attend(*problem.args))


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 8, 16])
@pytest.mark.parametrize("run", [1, 8])
def test_every_cut_of_rows_of_512_matches_the_formula(group, run, metal):
    seqs = ((300, run), (20, run))
    attend_and_compare(problem_of((512, 512), mx.bfloat16, seqs, group=group, num_kv_heads=1))
    calls = [call for call in metal if call.kernel == "mlx_paged_paged_attention"]
    splits = {call.template["ROW_SPLITS"] * call.template["ROW_PARTS"] for call in calls}
    assert all(2 * each >= group * run for each in splits)


# Keys and values of each width in 8 and in 4 bits: each side is read by a format that does not know
# the other one, so two pairs of bits are enough. Equal widths in float32, too: elsewhere the
# formula's own error is no measure of sums whose terms are thrice as large.
PAIRS = (((8, 8), (4, 4)), ((8, 4), (4, 8)))
QUANTISED = [
    *(
        (widths, bits, ("f16", "bf16")[n // 2 % 2])
        for n, widths in enumerate(WIDTHS)
        for bits in PAIRS[n % 2]
    ),
    *((widths, bits, "f32") for widths in ((192, 192), (512, 512)) for bits in PAIRS[1]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("widths", "bits", "dtype"), QUANTISED, ids=str)
def test_quantised_rows_of_every_width_match_the_formula(widths, bits, dtype, metal):
    # Runs of several queries with one of each width's two pairs.
    seqs = SEQS[:3] if bits[0] == 8 else SEQS[:2]
    problem = quantised(problem_of(widths, DTYPES[dtype], seqs, poison="large"), *bits)
    assert_same_alone(problem, attend_and_compare(problem))


@pytest.mark.parametrize(
    ("widths", "bits", "groups"),
    [((96, 64), (8, 4), (32, 64)), ((128, 96), (8, 8), (64, 32))],
    ids=["larger_of_values", "larger_of_keys"],
)
def test_quantised_rows_of_different_widths_and_groups_match_the_formula(
    widths, bits, groups, metal
):
    problem = quantised(problem_of(widths, seqs=SEQS[:2], poison="large"), *bits)
    assert (problem.kv.format.key.group_size, problem.kv.format.value.group_size) == groups
    attend_and_compare(problem)
    gathered = METAL.gather_step(problem.kv, problem.metadata)
    assert [(k.shape[-1], v.shape[-1]) for k, v in gathered] == [widths] * 2
    for (keys, values), (_, k, v) in zip(gathered, problem.dense, strict=True):
        assert_same_bits(keys.swapaxes(0, 1), k.astype(keys.dtype))
        assert_same_bits(values.swapaxes(0, 1), v.astype(values.dtype))


FAULTS = {
    "loads_of_a_lane_in_other_places": (
        (512, 192),
        "row_formats.h",
        "column * LOADS + n : column + n * LANES",
        "column * LOADS + n : column * LOADS + n + (n > 0 ? 1 : 0)",
    ),
    "values_as_wide_as_keys": (
        (512, 192),
        "row_formats.h",
        "row * (WIDTH / LOAD_SIZE) + place",
        "row * 64 + place",
    ),
    "values_of_the_first_load_alone": (
        (192, 512),
        "paged_attention.metal",
        "Values::floats(values[s][u / PARTS], u % PARTS)",
        "Values::floats(values[s][0], u % PARTS)",
    ),
    "keys_of_the_first_load_alone": (
        (512, 192),
        "paged_attention.metal",
        "Keys::floats(keys[s][u / PARTS], u % PARTS)",
        "Keys::floats(keys[s][0], u % PARTS)",
    ),
    "queries_past_the_end_of_a_row": (
        (192, 512),
        "paged_attention.metal",
        "KeyRow::is_there(column, n / QUERY_LOADS) ? loaded : uint4(0)",
        "loaded",
    ),
    "a_width_of_partials_that_is_of_keys": (
        (512, 192),
        "paged_attention.metal",
        "PARTIAL ? VALUE_WIDTH + 4",
        "PARTIAL ? KEY_WIDTH + 4",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("widths", "name", "text", "other"), FAULTS.values(), ids=FAULTS)
def test_a_mistake_in_the_place_of_a_load_is_seen(widths, name, text, other, plant, compiler):
    with checked_metal():
        plant(name, text, other)
        with pytest.raises(Exception, match=r"sequence \d|not equal|mlx_paged_paged_attention"):
            attend_and_compare(problem_of(widths, mx.float16, SEQS[:2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "other"),
    [
        (
            "affine_slabs.metal",
            "Affine<T, VALUE_DIM, VALUE_BITS, VALUE_GROUP>",
            "Affine<T, VALUE_DIM, VALUE_BITS, KEY_GROUP>",
        ),
        (
            "paged_attention.metal",
            "LeastOf<KeyRow::SHARERS, ValueRow::SHARERS>",
            "LeastOf<KeyRow::SHARERS, KeyRow::SHARERS>",
        ),
    ],
    ids=["groups_of_keys", "sharers_of_keys"],
)
def test_values_in_other_groups_than_keys_are_seen(name, text, other, plant, compiler):
    # Keys of 128 share a scale by eight lanes of sixteen, values of 96 by four.
    problem = quantised(problem_of((128, 96), seqs=SEQS[:1], poison="large"), 8, 8)
    with checked_metal():
        plant(name, text, other)
        with pytest.raises(AssertionError, match=r"sequence \d"):
            attend_and_compare(problem)


@pytest.mark.slow
def test_neighbouring_loads_that_share_a_scaling_are_needed(plant, compiler):
    with checked_metal():
        plant("row_formats.h", "Format::NEIGHBOURS ?", "false ?")
        with pytest.raises(AssertionError, match=r"sequence \d"):
            attend_and_compare(quantised(problem_of((512, 512), seqs=SEQS[:1]), 8, 8))


GATHER_FAULTS = {
    "a_row_as_wide_as_keys": (
        *((8, 4), "dequantize_blocks.metal"),
        *("values + token.row * VALUE_DIM", "values + token.row * KEY_DIM"),
    ),
    "the_end_of_a_row_left_out": (
        *((8, 4), "dequantize_blocks.metal"),
        *("load < KEY_DIM / 8", "load < VALUE_DIM / 8"),
    ),
    "the_first_scale_of_a_row": (
        *((8, 4), "affine_rows.h"),
        *("Format::rest(rows, row, place, 0)", "Format::rest(rows, row, 0, 0)"),
    ),
    "the_next_slot": (
        *(None, "gather_blocks.metal"),
        *("offset = slot % BLOCK_SIZE", "offset = (slot + 1) % BLOCK_SIZE"),
    ),
    "values_in_the_place_of_keys": (
        *(None, "gather_blocks.metal"),
        *("(key_slab, row", "(value_slab, row"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "name", "text", "other"), GATHER_FAULTS.values(), ids=GATHER_FAULTS
)
def test_a_mistake_in_a_gather_is_seen(bits, name, text, other, plant, compiler):
    problem = problem_of((96, 64), seqs=((33, 1), (5, 1)), group=1, window=None)
    problem = quantised(problem, *bits) if bits else problem
    with checked_metal():
        plant(name, text, other)
        with pytest.raises((AssertionError, ForbiddenWrite, MemoryFault, UnwrittenOutput)):
            for rows, (_, k, v) in zip(
                METAL.gather_step(problem.kv, problem.metadata), problem.dense, strict=True
            ):
                for ours, dense in zip(rows, (k, v), strict=True):
                    assert_same_bits(ours.swapaxes(0, 1), dense.astype(ours.dtype))
