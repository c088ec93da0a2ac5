"""The check at start-up: which kernels it tries, what it finds, and what runs instead of a kernel
that fails.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from helpers.fast_lane import mostly_slow
from helpers.numpy_attention import assert_matches_formula, before_the_step, make_problem
from helpers.quantised_problems import affine, quantised
from metal_emulator import Checks
from metal_emulator.checks import Call
from paged_testing.emulated_metal import emulated_metal

from mlx_paged import LLM, SamplingParams, demo_model_path, load, make_kv_cache
from mlx_paged.ops import AttentionShape, KVFormat, PlanKey, choose_backend, kernels, self_check
from mlx_paged.ops.metal import DECODE_RUNS, MetalBackend
from mlx_paged.ops.self_check import WorkingKernels, try_kernels

SHAPE = AttentionShape(2, 2, 64, 64, 16, KVFormat.dense("float16"))
ALL = WorkingKernels(writes=True, gathers=True, decode_runs=DECODE_RUNS)
OF_SHAPE = r" \(float16, head_dim 64, blocks of 16, 2 query heads for each of 2 KV heads\) "

Change = Callable[[list[mx.array], dict[str, Any]], list[mx.array]]


@pytest.fixture
def metal(compiler) -> Iterator[list[Call]]:
    """As on a device, with the check at start-up."""
    with emulated_metal(Checks.quick(), tries_kernels=True) as trace:
        yield trace


@pytest.fixture
def break_kernel(monkeypatch) -> Callable[[str, Change], None]:
    """Calls of a kernel give ``change(results, arguments)`` from now on."""
    made = kernels.kernel

    def put(broken: str, change: Change) -> None:
        def kernel(name: str):
            def call(**arguments):
                results = made(name)(**arguments)
                return change(results, arguments) if name == broken else results

            return call

        monkeypatch.setattr(kernels, "kernel", kernel)

    return put


def larger(results: list[mx.array], arguments: dict[str, Any]) -> list[mx.array]:
    """One row is wrong by some roundings."""
    results[0][0] = results[0][0] * 1.01
    return results


def spoil(slab: mx.array, block_id: int, offset: int) -> None:
    """One row is wrong by some roundings."""
    slab[block_id, 0, offset] = slab[block_id, 0, offset] * 1.01


def refuse(results: list[mx.array], arguments: dict[str, Any]) -> list[mx.array]:
    raise RuntimeError("[metal::Device] Unable to build metal library from source")


def libraries(trace: list[Call]) -> set[tuple]:
    return {(call.kernel, *call.template.items()) for call in trace}


@pytest.fixture(scope="module")
def demo():
    return load(demo_model_path())


def answer(demo, backend: str) -> list[int]:
    """After a prompt that ends in another partition than it began in."""
    model, tokenizer = demo
    prompt = tokenizer.encode("The code of apple is 4821. Count from 5 to 60.")
    prompt = (prompt * 20)[-270:]
    llm = LLM(model, tokenizer, backend=backend, kv_cache_bytes="60blocks")
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True))
    return list(output.outputs[0].token_ids)


# What is tried


def test_working_kernels_pass_and_nothing_is_said(metal):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert try_kernels(SHAPE) == ALL
        backend = choose_backend("auto", [SHAPE])
    assert isinstance(backend, MetalBackend)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "bits"), [(5, None), (16, None), (2, (8, 4))])
def test_every_library_that_a_layer_can_need_was_tried(group, bits, metal):
    format = affine(32, *bits, "float32") if bits else KVFormat.dense("float32")
    shape = AttentionShape(1, group, 32, 32, 8, format)
    choose_backend("metal", [shape])
    tried = libraries(metal)
    metal.clear()
    backend = MetalBackend()
    for context_lens, query_lens in (
        ([7, 9, 12, 20], [1, 2, 3, 5]),
        ([300, 301, 302, 303, 304], [1, 2, 4, 8, 20]),
    ):
        problem = make_problem(
            context_lens, query_lens, num_kv_heads=1, group=group, head_dim=32, block_size=8
        )
        problem = quantised(problem, *bits) if bits else problem
        kv, k, v = before_the_step(problem)
        backend.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    backend.copy_blocks(kv, [(0, 1)])
    backend.gather_parts(kv, problem.tables[0], 5)
    assert libraries(metal) <= tried


QUANTISED = replace(SHAPE, format=affine(64, 8, 4, "float16"))


ROTATED = replace(SHAPE, format=affine(64, 4, 8, "bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [QUANTISED, ROTATED], ids=["V4", "K4"])
def test_working_kernels_of_quantised_rows_pass(shape, metal):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert try_kernels(shape) == ALL


@pytest.mark.slow
@pytest.mark.parametrize("shape", [QUANTISED, ROTATED], ids=["V4", "K4"])
def test_a_device_that_flushes_denormal_halves_has_plain_mlx_for_quantised_rows(
    shape, plant, metal
):
    # Numbers are read as denormal halves.
    plant("affine_rows.h", "as_type<half2>(load & 0x000f000fu)", "half2(0)")
    with pytest.warns(
        UserWarning, match=r"gather_blocks.*times the error that rounding allows.*plain MLX"
    ):
        backend = choose_backend("metal", [shape])
    assert backend.name == "reference"


@pytest.mark.slow
def test_a_shape_is_tried_once_per_process(metal, demo):
    make_kv_cache(demo[0], backend="metal", kv_cache_bytes="9blocks")
    num_calls = len(metal)
    make_kv_cache(demo[0], backend="metal", kv_cache_bytes="20blocks")
    assert len(metal) == num_calls > 0


def test_the_shape_of_a_model_says_how_many_query_heads_there_are(demo):
    (spec,) = set(demo[0].layer_specs)
    assert (spec.num_heads, spec.num_kv_heads) == (4, 2)
    assert spec.attention_shape(16) == AttentionShape(2, 2, 32, 32, 16, KVFormat.dense("float32"))


def test_a_group_without_a_decode_kernel_is_not_tried(metal):
    found = try_kernels(AttentionShape(1, 129, 32, 32, 8, KVFormat.dense("float32")))
    assert found == WorkingKernels(writes=True, gathers=True, decode_runs=())
    assert "mlx_paged_paged_attention" not in {call.kernel for call in metal}


@mostly_slow("bits", [None, (8, 4)], ids=["dense", "K8V4"], quick=(1,))
def test_latents_are_tried_for_as_many_rows_as_pay(bits, metal):
    form = affine(256, *bits, "float16", 64) if bits else KVFormat.dense("float16")
    shape = AttentionShape(1, 8, 256, 64, 16, form, holds_latents=True)
    assert try_kernels(shape) == replace(ALL, decode_runs=(1, 2, 4))
    assert {call.template["HOLDS_LATENTS"] for call in metal if "GROUP" in call.template} == {True}


# What is found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (larger, r"has [\d.]+ times the error that rounding allows"),
        (refuse, r"raised RuntimeError: \[metal::Device\] Unable to build metal library"),
    ],
    ids=["wrong", "raises"],
)
@pytest.mark.parametrize("name", ["paged_attention", "merge_partitions"])
def test_attention_that_fails_is_gathered_and_that_is_said_once(
    name, change, said, metal, break_kernel
):
    break_kernel(name, change)
    expected = rf"^\[metal\] paged_attention of 1, 2, 4, 8 query tokens{OF_SHAPE}{said}"
    with pytest.warns(UserWarning) as record:
        backends = [choose_backend("auto", [SHAPE]) for _ in range(2)]
    assert [bool(re.match(expected, str(warning.message))) for warning in record] == [True]
    metal.clear()
    problem = make_problem([40, 300], [1, 3], dtype=mx.float16, poison="nan_values")
    for backend in backends:
        kv, k, v = before_the_step(problem)
        out = backend.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
        assert_matches_formula(out, problem)
    assert [call.kernel.removeprefix("mlx_paged_") for call in metal] == 2 * [
        "reshape_and_cache",
        "gather_blocks",
    ]


def test_a_run_whose_kernel_fails_takes_the_next_larger_one(metal, break_kernel):
    def fail_at_2(results, arguments):
        is_broken = dict(arguments["template"])["RUN"] == 2
        return larger(results, arguments) if is_broken else results

    break_kernel("paged_attention", fail_at_2)
    with pytest.warns(UserWarning, match="paged_attention of 2 query tokens"):
        backend = choose_backend("auto", [SHAPE])
    metal.clear()
    problem = make_problem([40, 300], [1, 2], dtype=mx.float16)
    assert_matches_formula(backend.attend(*problem.args), problem)
    runs = [call.template["RUN"] for call in metal if "RUN" in call.template]
    assert runs == [1, 4]


@pytest.mark.parametrize("name", ["reshape_and_cache", "copy_blocks"])
def test_where_a_write_fails_slots_are_written_by_scatter(name, metal, break_kernel):
    calls = []

    def refuse_here(results, arguments):
        calls.append(name)
        return refuse(results, arguments)

    assert self_check.writes_in_place()
    break_kernel(name, refuse_here)
    with pytest.warns(
        UserWarning, match=rf"{name}.*raised RuntimeError.*written by donated scatter instead"
    ):
        backend = choose_backend("auto", [SHAPE])
    assert calls == [name]
    problem = make_problem([40, 300], [1, 30], dtype=mx.float16)
    kv, k, v = before_the_step(problem)
    out = backend.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_matches_formula(out, problem)
    backend.copy_blocks(kv, [(0, 1)])
    assert calls == [name]


def test_a_write_into_another_slot_is_found(metal, plant):
    plant("reshape_and_cache.metal", "slot_mapping[row]", "(slot_mapping[row] ^ 1)")
    with pytest.warns(UserWarning, match="writes wrong bits into the slabs"):
        assert not self_check.try_kernels(SHAPE).writes


def test_a_written_row_that_is_wrong_is_found(metal, break_kernel):
    def write(results, arguments):
        _, _, key_slab, _, slots, _ = arguments["inputs"]
        spoil(key_slab, *divmod(slots[1].item(), SHAPE.block_size))
        return results

    assert self_check.writes_in_place()
    break_kernel("reshape_and_cache", write)
    with pytest.warns(UserWarning, match="reshape_and_cache or copy_blocks"):
        assert try_kernels(SHAPE) == replace(ALL, writes=False)


def test_a_copied_row_that_is_wrong_is_found(metal, break_kernel):
    def copy(results, arguments):
        _, value_slab, pairs, _ = arguments["inputs"]
        spoil(value_slab, pairs[1].item(), 3)
        return results

    break_kernel("copy_blocks", copy)
    with pytest.warns(UserWarning, match=r"copy_blocks .* writes wrong bits into the slabs"):
        assert try_kernels(SHAPE) == replace(ALL, writes=False)


@mostly_slow("widths", [(576, 64), (192, 104), (72, 72)], ids=str)
def test_rows_of_any_width_are_written_and_gathered(widths, metal):
    shape = replace(SHAPE, key_dim=widths[0], value_dim=widths[1])
    assert try_kernels(shape) == replace(ALL, decode_runs=())


def test_attention_that_writes_another_slot_is_found(metal, break_kernel):
    def write(results, arguments):
        arguments["inputs"][0][0, 0, 0, 0] = 3.0
        return results

    break_kernel("paged_attention", write)
    with pytest.warns(UserWarning, match="writes wrong bits into the slabs"):
        assert try_kernels(SHAPE).decode_runs == ()


def test_attention_that_multiplies_unused_slots_by_0_is_found(metal, break_kernel):
    def multiply(results, arguments):
        _, value_slab, *_ = arguments["inputs"]
        results[0][0] += 0 * value_slab[-1].sum()  # no sequence has the last block
        return results

    break_kernel("paged_attention", multiply)
    with pytest.warns(UserWarning, match="has nan times the error"):
        assert try_kernels(SHAPE).decode_runs == ()


def test_attention_without_sinks_is_found(metal, monkeypatch):
    sink_logits = kernels.sink_logits
    monkeypatch.setattr(kernels, "sink_logits", lambda _, num_heads: sink_logits(None, num_heads))
    with pytest.warns(UserWarning, match="times the error"):
        assert try_kernels(SHAPE).decode_runs == ()


def test_attention_without_a_window_is_found(metal, monkeypatch):
    of = PlanKey.of
    monkeypatch.setattr(PlanKey, "of", lambda window, kv: of(None, kv))
    with pytest.warns(UserWarning, match="times the error"):
        assert try_kernels(SHAPE).decode_runs == ()


def test_where_writes_in_place_raise_slots_are_written_by_scatter(metal, break_kernel):
    self_check.writes_in_place.forget()
    break_kernel("reshape_and_cache", refuse)
    with pytest.warns(
        UserWarning, match=r"a write in place raised RuntimeError: .*scatter instead"
    ):
        backend = choose_backend("auto", [SHAPE])
    assert isinstance(backend, MetalBackend) and backend._scatter is not None
    assert try_kernels(SHAPE).decode_runs == DECODE_RUNS


@pytest.mark.parametrize("change", [larger, refuse], ids=["wrong", "raises"])
def test_where_a_gather_fails_plain_mlx_runs(change, metal, break_kernel):
    assert self_check.writes_in_place()
    break_kernel("gather_blocks", change)
    with pytest.warns(UserWarning, match=r"gather_blocks .* plain MLX operations run instead"):
        assert choose_backend("metal", [SHAPE]).name == "reference"


@mostly_slow("name", ["gather_blocks", "dequantize_blocks"], quick=(1,))
def test_a_gather_of_quantised_rows_that_is_wrong_is_found(name, metal, break_kernel):
    break_kernel(name, larger)
    with pytest.warns(UserWarning, match=r"gather_blocks .* plain MLX operations run instead"):
        assert choose_backend("metal", [QUANTISED]).name == "reference"


def test_a_source_that_does_not_compile_is_replaced(metal, plant):
    plant("merge_partitions.metal", "constexpr int", "constexpr no_such_type")
    with pytest.warns(UserWarning, match="raised CompileError"):
        assert try_kernels(SHAPE) == replace(ALL, decode_runs=())


# What users get


@mostly_slow(
    "name",
    ["paged_attention", "merge_partitions", "gather_blocks", "reshape_and_cache", None],
    quick=(0, 4),
)
def test_tokens_are_right_whatever_kernel_fails(name, demo, metal, break_kernel):
    expected = answer(demo, "reference")
    if name is None:
        assert answer(demo, "metal") == expected
        return
    break_kernel(name, refuse)
    with pytest.warns(UserWarning, match="raised RuntimeError"):
        assert answer(demo, "metal") == expected
