"""The kernels on Metal itself: what the other files show on the emulator, and an order that only a
GPU can upset.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import METAL, REFERENCE
from helpers.kernel_checks import (
    assert_same_bits,
    assert_same_slabs,
    attend_and_compare,
    copy_of,
    random_array,
    random_handle,
)
from helpers.kernel_grid import GRID
from helpers.numpy_attention import assert_matches_formula, before_the_step, make_problem
from helpers.quantised_problems import quantised
from paged_testing.by_hand import slots_of, step_of
from test_generation_on_kernels import greedy_in_a_ragged_batch, prompts_of
from test_kernel_formats import GRID as QUANTISED_GRID

from mlx_paged import Engine, SamplingParams, load
from mlx_paged.loading import demo_model_path
from mlx_paged.ops import AttentionParams
from mlx_paged.ops.in_place import check_writes_in_place
from mlx_paged.ops.rows_matmul import MODES, try_rows_matmul

pytestmark = pytest.mark.skipif(
    not mx.metal.is_available(),
    reason="needs Metal; the other files of this folder run the kernels on an emulator",
)


def test_this_device_writes_in_place():
    assert check_writes_in_place() is None


@pytest.mark.parametrize("case", GRID, ids=str)
def test_attention_matches_the_formula(case):
    problem = case.problem()
    assert_matches_formula(METAL.attend(*problem.args), problem)


@pytest.mark.parametrize(("case", "bits"), QUANTISED_GRID, ids=str)
def test_attention_on_quantised_rows_matches_the_formula(case, bits):
    attend_and_compare(quantised(case.problem(), *bits))


@pytest.mark.parametrize("case", GRID[::4], ids=str)
def test_a_step_that_writes_its_rows_matches_the_formula_and_fills_its_slots(case):
    problem = case.problem()
    kv, k, v = before_the_step(problem)
    out = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_matches_formula(out, problem)
    assert_same_slabs(kv, problem.kv)


@pytest.mark.parametrize("case", GRID[::4], ids=str)
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(case):
    problem = case.problem()
    together = METAL.attend(*problem.args)
    for seq in range(len(problem.context_lens)):
        assert_same_bits(METAL.attend(*problem.alone(seq)), together[problem.rows(seq)])


def test_a_long_chain_of_writes_and_reads_keeps_its_order_within_one_graph():
    # Nothing is evaluated in between, so all of the order there is comes from the tokens.
    problem = make_problem([1], 1, num_kv_heads=4, head_dim=128, dtype=mx.float16)
    kv = problem.kv
    metadata = step_of([problem.tables[0]], [1], [1], 16)
    queries = mx.zeros((1, 8, 128), mx.float16)
    seen = []
    for turn in range(1, 301):
        rows = mx.full((1, 4, 128), turn, mx.float16)
        if turn % 3:
            METAL.update_and_attend(queries, rows, rows, kv, metadata, AttentionParams(1.0))
        else:
            METAL.reshape_and_cache((rows,), (rows,), kv, metadata.slot_mapping)
        seen.append(METAL.attend(queries, kv, metadata, AttentionParams(1.0))[0, 0, 0])
        keys, _ = METAL.gather_blocks(kv, problem.tables[0], 1)
        seen.append(keys[3, 0, 127])
    assert mx.stack(seen).tolist() == [turn for turn in range(1, 301) for _ in range(2)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_rows_are_written_and_blocks_copied_as_by_the_reference(dtype):
    rng = np.random.default_rng(0)
    slabs = random_handle(rng, 40, 2, 16, 64, dtype)
    twin = copy_of(slabs)
    k, v = ((random_array(rng, (50, 2, 64), dtype),) for _ in "kv")
    slots = [
        -1 if row % 7 == 0 else slot for row, slot in enumerate(rng.permutation(640)[:50].tolist())
    ]
    for kv, backend in ((slabs, METAL), (twin, REFERENCE)):
        backend.reshape_and_cache(k, v, kv, slots_of(slots, kv.block_size))
        backend.copy_blocks(kv, [(3, 4), (3, 7), (39, 0)])
    assert_same_slabs(slabs, twin)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("mode", "bits"), [(m, b) for m, (_, all_b, _) in MODES.items() for b in all_b]
)
def test_matmuls_of_a_few_rows_have_the_bits_of_plain_mlx(mode, bits, dtype):
    assert try_rows_matmul(dtype, bits, MODES[mode][2][-1], mode)


def test_the_bundled_model_writes_the_text_of_the_reference():
    model, tokenizer = load(demo_model_path())
    texts = [
        greedy_in_a_ragged_batch(model, prompts_of(tokenizer), name)[0]
        for name in ("metal", "reference")
    ]
    assert texts[0] == texts[1]


def test_replayed_decodes_of_the_bundled_model_give_the_tokens_of_built_ones():
    model, tokenizer = load(demo_model_path())
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    answers = []
    for is_built in (False, True):
        engine = Engine(model, tokenizer, backend="metal", kv_cache_bytes="60blocks")
        compiled = engine.runner.compiled_decode
        assert compiled is not None
        if is_built:
            engine.runner.compiled_decode = None
        for number, prompt in enumerate(prompts_of(tokenizer)):
            engine.add_request(str(number), prompt, params)
        tokens = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = output.outputs[0].token_ids
        answers.append(tokens)
        assert any(callable(trace) for trace in compiled._traces.values()) != is_built
    assert answers[0] == answers[1]
