"""Attention of plain MLX on quantised K/V: the formula in float64 on what the slabs stand for, the
same bits in every batch, and never a whole slab dequantised.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import DECODING, GATHERING, REFERENCE
from helpers.fast_lane import mostly_slow
from helpers.numpy_attention import (
    DTYPES,
    PagedProblem,
    attention_in_mlx,
    before_the_step,
    eps,
    make_problem,
    to_float64,
)
from helpers.quantised_problems import BITS_OF_K_AND_V, affine, quantised
from paged_testing.by_hand import slots_of, step_of

from mlx_paged.ops import AttentionParams, KVHandle

both_bits = pytest.mark.parametrize("bits", BITS_OF_K_AND_V, ids=lambda b: f"K{b[0]}V{b[1]}")
# (head_dim, block_size, num_kv_heads, group, dtype)
SHAPES = [
    (32, 16, 2, 2, "f32"),
    (64, 8, 1, 4, "bf16"),
    (96, 16, 2, 1, "f16"),
    (128, 32, 2, 5, "f32"),
    (128, 16, 1, 8, "f16"),
    (160, 8, 2, 2, "f32"),
    (256, 64, 1, 2, "bf16"),
]
shapes = mostly_slow("shape", SHAPES, ids=lambda s: "-".join(map(str, s)), quick=(1, 2, 5))
EXTRAS = {"plain": {}, "window_sinks": {"window": 21, "sinks": True}}
extras = pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
CONTEXT_LENS, QUERY_LENS = [1, 17, 64, 131, 40, 9], [1, 1, 1, 1, 40, 5]


def finite(kv: KVHandle) -> KVHandle:
    """Unused slots with scales of zero: plain MLX multiplies them by weights of 0."""

    def without_nan(parts: tuple) -> tuple:
        return tuple(
            part if part.dtype == mx.uint32 else mx.where(mx.isfinite(part), part, 0)
            for part in parts
        )

    return KVHandle(without_nan(kv.k), without_nan(kv.v), kv.format)


def assert_matches(out: mx.array, problem: PagedProblem) -> None:
    """The error is at most twice that of MLX's operations on the dequantised rows, which are
    rounded to their dtype, one rounding of the result, and what a float sum of ``head_dim``
    terms one after the other loses on average.
    """
    kv, result = problem.kv, to_float64(out)
    params = problem.params
    for seq, (q, _, _) in enumerate(problem.dense):
        k, v = REFERENCE.gather_blocks(kv, problem.tables[seq], problem.context_lens[seq])
        rows = q, k.swapaxes(0, 1), v.swapaxes(0, 1)
        lossy = attention_in_mlx(*rows, params.scale, params.window, params.sinks)
        exact = problem.exact[seq]
        allowed = 2 * np.abs(to_float64(lossy) - exact).max()
        allowed += (eps(kv.dtype) + kv.key_dim**0.5 * eps(mx.float32)) * np.abs(exact).max()
        error = np.abs(result[problem.rows(seq)] - exact).max()
        assert error <= allowed, f"sequence {seq}: error {error:.3g}, allowed {allowed:.3g}"


def problem_of(shape: tuple, bits: tuple[int, int], extra: dict, **options) -> PagedProblem:
    head_dim, block_size, num_kv_heads, group, dtype = shape
    made = make_problem(
        options.pop("context_lens", CONTEXT_LENS),
        options.pop("query_lens", QUERY_LENS),
        head_dim=head_dim,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        group=group,
        dtype=DTYPES[dtype],
        **extra,
        **options,
    )
    made = quantised(made, *bits)
    return replace(made, kv=finite(made.kv))


@shapes
@both_bits
@extras
def test_decodes_runs_and_prefills_match_the_formula_of_what_is_stored(shape, bits, extra):
    problem = problem_of(shape, bits, extra)
    assert_matches(REFERENCE.attend(*problem.args), problem)
    assert_matches(DECODING.attend(*problem.args), problem)
    assert_matches(GATHERING.attend(*problem.args), problem)


@shapes
@both_bits
def test_rows_that_a_step_writes_are_read_as_they_are_stored(shape, bits):
    problem = problem_of(shape, bits, {})
    kv, k, v = before_the_step(problem)
    kv = finite(kv)
    out = REFERENCE.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_matches(out, problem)
    for one, other in zip(kv.slabs, problem.kv.slabs, strict=True):
        for table, context_len in zip(problem.tables, problem.context_lens, strict=True):
            positions = np.arange(context_len)
            places = np.array(table)[positions // kv.block_size], positions % kv.block_size
            ours, theirs = (np.array(slab.view(mx.uint8)) for slab in (one, other))
            assert np.array_equal(ours[places[0], :, places[1]], theirs[places[0], :, places[1]])


def test_a_key_dim_beside_another_value_dim_matches_the_formula():
    problem = quantised_two_widths()
    assert_matches(REFERENCE.attend(*problem.args), problem)


def quantised_two_widths() -> PagedProblem:
    problem = make_problem([33, 70, 12], [1, 1, 12], head_dim=64, value_dim=96)
    key, value = affine(64, 8, 8, "float32").key, affine(96, 4, 4, "float32").value
    form = type(problem.kv.format)(key, value)
    kv = KVHandle.allocate(problem.kv.num_blocks, 2, 16, 64, 96, form)
    dense = []
    for table, (q, k, v) in zip(problem.tables, problem.dense, strict=True):
        parts = form.encode(k, v)
        slots = [table[t // 16] * 16 + t % 16 for t in range(len(k))]
        REFERENCE.reshape_and_cache(*parts, kv, slots_of(slots, 16))
        dense.append((q, *form.decode(*parts)))
    return replace(problem, kv=kv, dense=tuple(dense))


@both_bits
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_sequence_gets_the_same_bits_in_every_batch(bits, dtype):
    shape = (64, 16, 2, 2, dtype)
    problem = problem_of(shape, bits, {"window": 50})
    whole = REFERENCE.attend(*problem.args)
    for seq in range(len(CONTEXT_LENS)):
        alone = REFERENCE.attend(*problem.alone(seq))
        assert mx.array_equal(alone, whole[problem.rows(seq)]).item()


@both_bits
def test_blocks_and_rows_are_copied_gathered_and_zeroed_bit_for_bit(bits):
    problem = problem_of((64, 8, 2, 2, "f16"), bits, {})
    kv, table = problem.kv, list(problem.tables[3])[: -(-131 // 8)]
    k, v = REFERENCE.gather_parts(kv, table, 131)
    for parts, slabs in ((k, kv.k), (v, kv.v)):
        for part, slab in zip(parts, slabs, strict=True):
            rows = np.array(slab.view(mx.uint8))[table].swapaxes(0, 1)
            expected = rows.reshape(kv.num_kv_heads, -1, rows.shape[-1])[:, :131]
            assert np.array_equal(np.array(part.view(mx.uint8)), expected)
    keys, values = REFERENCE.gather_blocks(kv, table, 131)
    assert keys.dtype == values.dtype == mx.float16
    for rows, parts, form in ((keys, k, kv.format.key), (values, v, kv.format.value)):
        assert mx.array_equal(rows, form.decode(parts)).item()

    taken = {block for table in problem.tables for block in table}
    spare = sorted(set(range(kv.num_blocks)) - taken)
    REFERENCE.copy_blocks(kv, [(table[0], spare[0]), (table[4], spare[1])])
    for slab in kv.slabs:
        assert mx.array_equal(slab[spare[0]], slab[table[0]]).item()
        assert mx.array_equal(slab[spare[1]], slab[table[4]]).item()
    before = [slab[table[4]] * 1 for slab in kv.slabs]
    REFERENCE.zero_blocks(kv, [spare[0]])
    assert not any(mx.any(slab[spare[0]]).item() for slab in kv.slabs)
    for slab, kept in zip(kv.slabs, before, strict=True):
        assert mx.array_equal(slab[spare[1]], kept).item()


def test_growth_and_shrinking_keep_every_part():
    kv = problem_of((64, 8, 2, 2, "f16"), (8, 4), {}).kv
    num_blocks, before = kv.num_blocks, [slab * 1 for slab in kv.slabs]
    nbytes = kv.nbytes
    kv.grow(7)
    assert kv.nbytes * num_blocks == nbytes * (num_blocks + 7) and kv.num_blocks == num_blocks + 7
    assert not any(mx.any(slab[num_blocks:]).item() for slab in kv.slabs)
    kv.shrink_to(num_blocks)
    assert kv.nbytes == nbytes
    for slab, kept in zip(kv.slabs, before, strict=True):
        assert mx.array_equal(slab, kept).item()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("context_len", [64, 2048])
def test_a_decode_takes_no_memory_for_what_it_does_not_read(
    dtype: str, context_len: int, extra_peak_bytes
):
    """Not the pool, and of 16-bit scales no more than a copy of the stored context."""
    form = affine(128, 8, 8, dtype)
    kv = KVHandle.allocate(4000, 2, 16, 128, 128, form)
    q = mx.random.normal((1, 8, 128)).astype(form.dtype)
    step = step_of([list(range(5, 5 + context_len // 16))], [context_len], [1], 16)
    mx.eval(q)

    def decode() -> None:
        mx.eval(DECODING.attend(q, kv, step, AttentionParams(0.1)))

    stored = 2 * 2 * context_len * form.key.row_nbytes(128)
    # Scores, weights and the values of each block before they are added up, in float32.
    own_work = context_len * 8 * 4 * 4 + context_len // 16 * 8 * 128 * 4 * 3
    assert extra_peak_bytes(decode) <= 2 * stored + own_work + 65536 < kv.nbytes


def test_an_append_copies_no_slab(extra_peak_bytes):
    form = affine(64, 8, 4, "float16")
    kv = KVHandle.allocate(4000, 2, 16, 64, 64, form)
    rows = mx.random.normal((2, 2, 64))
    parts = form.encode(rows, rows)
    mx.eval(parts)

    def append() -> None:
        REFERENCE.reshape_and_cache(*parts, kv, slots_of([70, 900], 16))
        mx.eval(kv.arrays)

    assert extra_peak_bytes(append) < min(slab.nbytes for slab in kv.slabs) // 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v: (k[:1], v), r"k: expected the 3 parts of .*, got 1"),
        (lambda k, v: (k, (v[0][:, :1], *v[1:])), r"v: expected .* = \[2, 2, 8\], got \[2, 1, 8\]"),
        (
            lambda k, v: ((k[0], k[1].astype(mx.float32), k[2]), v),
            "k: .*float32 rows don't fit .*float16 slabs",
        ),
    ],
    ids=["parts", "shape", "dtype"],
)
def test_rows_of_another_format_are_refused_by_name(change, message: str):
    form = affine(64, 8, 4, "float16")
    kv = KVHandle.allocate(4, 2, 16, 64, 64, form)
    rows = mx.ones((2, 2, 64))
    with pytest.raises(ValueError, match=rf"\[reshape_and_cache\] {message}"):
        REFERENCE.reshape_and_cache(*change(*form.encode(rows, rows)), kv, slots_of([0, 1], 16))
