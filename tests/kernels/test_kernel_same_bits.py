"""A sequence gets the same bits alone and in any batch: nothing about its sums depends on what else
is there.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.backends import METAL
from helpers.fast_lane import mostly_slow
from helpers.kernel_checks import assert_same_bits
from helpers.kernel_grid import SETTINGS
from helpers.numpy_attention import assert_matches_formula, before_the_step, make_problem
from paged_testing.by_hand import dense_handle, step_of

from mlx_paged.ops import AttentionParams, attention_plan, kernels
from mlx_paged.ops.attention_plan import PartitionCut
from mlx_paged.ops.metal import MetalBackend

settings = pytest.mark.parametrize(
    "setting",
    [
        pytest.param(SETTINGS["f16-d64-b16-2x4"], id="f16-d64-b16-2x4"),
        pytest.param(SETTINGS["bf16-d256-b8-1x5"], id="bf16-d256-b8-1x5", marks=pytest.mark.slow),
    ],
)
WINDOW_AND_SINKS = {"window": 300, "sinks": True}
# Without a window once; what else an instance is made of does not decide over windows.
ways = pytest.mark.parametrize(
    ("setting", "extras"),
    [
        pytest.param(SETTINGS["f16-d64-b16-2x4"], {}, id="f16-d64-b16-2x4-plain"),
        pytest.param(SETTINGS["f16-d64-b16-2x4"], WINDOW_AND_SINKS, id="f16-d64-b16-2x4"),
        pytest.param(
            SETTINGS["bf16-d256-b8-1x5"],
            WINDOW_AND_SINKS,
            id="bf16-d256-b8-1x5",
            marks=pytest.mark.slow,
        ),
    ],
)
# Lengths of one partition and of several, so that a batch needs its partitions merged or not by who
# is in it.
CONTEXT_LENS = (8, 255, 17, 1000, 256, 257, 300)
QUERY_LENS = {1: [1] * 7, 2: [2] * 7, 4: [3, 4, 4, 3, 3, 4, 3], 8: [8, 5, 6, 7, 8, 6, 5]}
SHORT = (0, 1, 2, 4)
# All capacities and two prefills, the last of them from empty.
MIXED = [
    (1000, 1),
    (17, 2),
    (256, 4),
    (300, 8),
    (9, 1),
    (257, 3),
    (70, 12),
    (255, 6),
    (1, 1),
    (40, 40),
    (513, 2),
]


def part_of(problem, seqs):
    """Metadata of some sequences of a problem, in this order, and their rows of its flat arrays."""
    metadata = step_of(
        [problem.tables[seq] for seq in seqs],
        [problem.context_lens[seq] for seq in seqs],
        [problem.query_lens[seq] for seq in seqs],
        problem.kv.block_size,
    )
    rows = [row for seq in seqs for row in range(problem.rows(seq).start, problem.rows(seq).stop)]
    return metadata, mx.array(rows)


def compare_batches(problem, attention, batches):
    """``attention(metadata, rows)`` for every batch and for every sequence alone gives each
    sequence the same bits.
    """
    alone = {}
    for seq in range(len(problem.context_lens)):
        alone[seq] = attention(*part_of(problem, [seq]))
    for seqs in batches:
        out = attention(*part_of(problem, seqs))
        assert_same_bits(out, mx.concatenate([alone[seq] for seq in seqs]))


@ways
@mostly_slow("capacity", QUERY_LENS, quick=(1,))
def test_every_kernel_gives_a_sequence_the_same_bits_in_every_batch(
    capacity, setting, extras, metal
):
    problem = make_problem(CONTEXT_LENS, QUERY_LENS[capacity], **setting, **extras)

    def attention(metadata, rows):
        return METAL.attend(problem.q[rows], problem.kv, metadata, *problem.args[3:])

    everyone = range(len(CONTEXT_LENS))
    compare_batches(
        problem,
        attention,
        [everyone, everyone[::-1], SHORT, SHORT[::-1], [2, 3], [3, 2], [6, 1, 6]],
    )
    partial = {
        call.template["PARTIAL"] for call in metal if call.kernel == "mlx_paged_paged_attention"
    }
    assert partial == {False, True}


@mostly_slow("num_kv_heads", [1, 2])
def test_sequences_around_each_change_of_their_partitions_get_the_same_bits_in_every_batch(
    num_kv_heads, metal
):
    # With one KV head: whole up to 255, then partitions of 16, of 32 from 2,048 on; with two, twice
    # that.
    context_lens = (255, 256, 257, 271, 272, 273, 288, 289, 2047, 2048, 2049, 2081)
    setting = SETTINGS["f16-d64-b16-2x4"] | {"num_kv_heads": num_kv_heads}
    problem = make_problem(context_lens, 1, **setting, poison="nan_values")

    def attention(metadata, rows):
        out = METAL.attend(problem.q[rows], problem.kv, metadata, problem.params)
        mx.eval(out)
        return out

    everyone = range(len(context_lens))
    compare_batches(problem, attention, [everyone, everyone[::-1], [0, 9], [8, 0, 3], [1, 2]])
    assert_matches_formula(METAL.attend(*problem.args), problem)


@ways
@mostly_slow("runs", [(1,), (4,)], ids=["run_1", "run_4"], quick=(1,))
def test_empty_records_change_no_bit_and_write_no_slot(runs, setting, extras, metal, monkeypatch):
    # Where the kernel for single tokens does not work, decodes take one for runs.
    problem = make_problem(CONTEXT_LENS, 1, **setting, **extras, poison="nan_values")
    backend = MetalBackend(decode_runs={setting["group"]: runs})

    def decode(seqs):
        kv, k, v = before_the_step(problem)
        metadata, rows = part_of(problem, seqs)
        q = problem.q[rows]
        out = backend.update_and_attend(q, k[rows], v[rows], kv, metadata, *problem.args[3:])
        return out, kv.k[0], kv.v[0]

    def num_empty(call):
        work = call.inputs["plan"].tolist()[8:]
        return sum(work[7 * record + 2] == 0 for record in range(call.grid[2]))

    for seqs in (range(len(CONTEXT_LENS)), SHORT, [3]):
        metal.clear()
        attention_plan._cut_sequences.cache_clear()
        monkeypatch.setattr(attention_plan, "num_records", lambda count: count)
        expected = decode(seqs)
        attention_plan._cut_sequences.cache_clear()
        monkeypatch.setattr(attention_plan, "num_records", lambda count: count + 5)
        actual = decode(seqs)
        attention_plan._cut_sequences.cache_clear()
        for one, other in zip(actual, expected, strict=True):
            assert_same_bits(one, other)
        calls = [call for call in metal if call.kernel == "mlx_paged_paged_attention"]
        assert [num_empty(call) for call in calls] == [0, 5]


@ways
def test_every_step_that_writes_gives_a_sequence_the_same_bits_in_every_batch(
    setting, extras, metal
):
    context_lens, query_lens = zip(*MIXED, strict=True)
    problem = make_problem(context_lens, query_lens, **setting, **extras, poison="nan_values")

    def attention(metadata, rows):
        kv, k, v = before_the_step(problem)
        out = METAL.update_and_attend(
            problem.q[rows], k[rows], v[rows], kv, metadata, *problem.args[3:]
        )
        mx.eval(out)
        return out

    everyone = range(len(MIXED))
    compare_batches(
        problem, attention, [everyone, everyone[::-1], [8, 4, 2, 1, 7], [8, 3, 4, 6], [9, 0]]
    )


@settings
def test_writing_and_attending_gives_the_bits_of_attending_to_what_was_written(setting, metal):
    context_lens, query_lens = zip(*MIXED, strict=True)
    problem = make_problem(context_lens, query_lens, **setting)
    kv, k, v = before_the_step(problem)
    written = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_same_bits(written, METAL.attend(*problem.args))


@ways
def test_other_blocks_of_the_pool_give_the_same_bits(setting, extras, metal):
    context_lens, query_lens = zip(*MIXED, strict=True)
    problems = [
        make_problem(context_lens, query_lens, **setting, **extras, order=order)
        for order in ("adjacent", "shuffled", "reversed", "long_runs")
    ]
    # The order of the blocks is drawn after the keys and values, but before the queries and sinks.
    q, _, _, *rest = problems[0].args
    outs = [METAL.attend(q, problem.kv, problem.metadata, *rest) for problem in problems]
    assert len({problem.tables for problem in problems}) == 4
    for out in outs[1:]:
        assert_same_bits(out, outs[0])


def test_other_kv_heads_change_the_bits_of_a_head_only_by_the_size_of_partitions(
    metal, monkeypatch
):
    # As on a model cut over machines by heads: each gets some of them.
    monkeypatch.setattr(attention_plan, "partition_sizes", lambda num_kv_heads: [64] * 33)
    problem = make_problem(CONTEXT_LENS, QUERY_LENS[2], **SETTINGS["f16-d64-b16-2x4"])
    both = METAL.attend(*problem.args)
    for head in range(2):
        kv = dense_handle(*(mx.contiguous(slab[:, head : head + 1]) for slab in problem.kv.slabs))
        heads = slice(4 * head, 4 * head + 4)
        one = METAL.attend(
            problem.q[:, heads], kv, problem.metadata, AttentionParams(problem.params.scale)
        )
        assert_same_bits(one, both[:, heads])


def test_another_cut_of_the_sums_would_be_seen(metal, monkeypatch):
    # If streams depended on the batch, results would stay within rounding, and their bits would not
    # stay the same.
    problem = make_problem([200, 100], 1, **SETTINGS["f32-d96-b8-3x1"])
    out = METAL.attend(*problem.args)
    monkeypatch.setattr(kernels, "cut_rows", lambda *rows: PartitionCut(2, 1, 1))
    other = METAL.attend(*problem.args)
    attention = [call for call in metal if call.kernel == "mlx_paged_paged_attention"]
    assert [call.threadgroup[0] for call in attention] == [128, 64]
    assert_matches_formula(other, problem)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_same_bits(other, out)
