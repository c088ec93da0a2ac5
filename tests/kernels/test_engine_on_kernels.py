"""The engine on the Metal kernels: shared beginnings, forks, both ways of preemption, with the
tokens of plain MLX.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import Counter
from pathlib import Path

import mlx.nn as nn
import pytest
from helpers.engine_runs import (
    CONFIG,
    greedy,
    livelier_model,
    lose_all_kv,
    make_engine,
    run,
)
from helpers.fast_lane import mostly_slow
from helpers.fence_order import disorders
from helpers.workloads import Workload, assert_all_same
from helpers.write_rules import slots_of_the_step
from metal_emulator import Checks
from paged_testing.emulated_metal import emulated_metal
from paged_testing.integrity import check_scheduler

import mlx_paged
from mlx_paged import LLM, Engine, SamplingParams, demo_model_path, load
from mlx_paged.cache import PagedKVCache
from mlx_paged.cache.open_decode import DecodeShape
from mlx_paged.engine import compiled_decode
from mlx_paged.engine.compiled_decode import CompiledDecode
from mlx_paged.ops import kernels


@pytest.fixture(scope="module")
def demo():
    return load(demo_model_path())


def serve(
    engine: Engine, prompts: list[list[int]], params: SamplingParams
) -> dict[str, list[list[int]]]:
    """Token ids of each completion; the first two requests come at once, the others one by one."""
    waiting = [(str(index), prompt) for index, prompt in enumerate(prompts)]
    tokens: dict[str, list[list[int]]] = {}
    while waiting or engine.has_unfinished_requests():
        num_coming = 1 if tokens else 2
        for request_id, prompt in waiting[:num_coming]:
            engine.add_request(request_id, prompt, params)
        del waiting[:num_coming]
        for output in engine.step():
            tokens[output.request_id] = [
                list(completion.token_ids) for completion in output.outputs
            ]
        check_scheduler(engine.scheduler)
    return tokens


def prompts_of(tokenizer) -> list[list[int]]:
    facts = tokenizer.encode("The code of apple is 4821. The code of pear is 1234. My name is Tom.")
    questions = [
        "What is the code of pear?",
        "What is my name?",
        "What is 17 + 25?",
        "Count from 5 to 60.",
    ]
    return [facts + tokenizer.encode(question) for question in questions]


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", [None, "K:8,V:4", 4], ids=["dense", "K8V4", "K4V4"])
def test_shared_beginnings_and_forks_get_the_tokens_of_the_reference_on_metal_kernels(
    demo, compiler, kv_format
):
    model, tokenizer = demo
    prompts = prompts_of(tokenizer)
    params = SamplingParams(max_tokens=12, n=2, temperature=0.8, seed=3, ignore_eos=True)
    options = {"kv_cache_bytes": "60blocks", "max_num_batched_tokens": 70, "max_num_seqs": 8}
    options["kv_format"] = kv_format
    expected = serve(Engine(model, tokenizer, backend="reference", **options), prompts, params)
    with emulated_metal(Checks.quick(writable=slots_of_the_step)) as trace:
        engine = Engine(model, tokenizer, backend="metal", **options)
        assert serve(engine, prompts, params) == expected
    kernels = Counter(call.kernel.removeprefix("mlx_paged_") for call in trace)
    # A step in which the second request reads what the first one writes; a fork whose sides both
    # write.
    gather = "gather_blocks" if kv_format is None else "dequantize_blocks"
    write = "reshape_and_cache" if kv_format is None else "encode_and_cache"
    assert kernels[write] and kernels["copy_blocks"] and kernels[gather]
    assert engine.stats().num_hit_tokens >= 3 * 16


@mostly_slow(
    ("kv_format", "swaps"),
    [(None, True), (None, False), ("K:8,V:4", True), (4, False)],
    ids=["dense-swap", "dense-recompute", "K8V4-swap", "K4V4-recompute"],
)
def test_a_preempted_request_gets_the_tokens_of_the_reference_on_metal_kernels(
    demo, compiler, monkeypatch, swaps: bool, kv_format
):
    model, tokenizer = demo
    prompts = prompts_of(tokenizer)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    options = {"kv_cache_bytes": "60blocks", "kv_format": kv_format}
    roomy = Engine(model, tokenizer, backend="reference", **options)
    expected = serve(roomy, prompts, params)
    written, write_blocks = [], PagedKVCache.write_blocks
    monkeypatch.setattr(
        PagedKVCache, "write_blocks", lambda *args: (written.append(args), write_blocks(*args))
    )
    with emulated_metal(Checks.quick()):
        engine = Engine(
            model,
            tokenizer,
            backend="metal",
            kv_cache_bytes="9blocks",
            kv_format=kv_format,
            watermark=0.0,
            swap_bytes="9blocks" if swaps else 0,
        )
        assert serve(engine, prompts, params) == expected
    assert engine.stats().num_preemptions > 0 and roomy.stats().num_preemptions == 0
    assert bool(written) == swaps


@pytest.fixture
def replays(monkeypatch) -> Counter[DecodeShape]:
    """How often each shape of a decode is replayed, from the first step of it on."""
    counts: Counter[DecodeShape] = Counter()
    new_trace = CompiledDecode._new_trace

    def counted(compiled, shape, before):
        trace = new_trace(compiled, shape, before)

        def call(*arguments):
            counts[shape] += 1
            return trace(*arguments)

        return call

    monkeypatch.setattr(compiled_decode, "NUM_BUILT_FIRST", 0)
    monkeypatch.setattr(CompiledDecode, "_new_trace", counted)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", [None, "K:8,V:4"], ids=["dense", "K8V4"])
def test_replayed_decodes_get_the_tokens_of_the_reference_on_metal_kernels(
    demo, compiler, replays, kv_format
):
    model, tokenizer = demo
    # 3 and 260 tokens: partitions are merged, or not, by who is in the batch.
    tokens = tokenizer.encode("The code of apple is 4821. The code of pear is 1234. " * 12)
    requests = {"long": (tokens[:260], 7), "short": (tokens[:3], 18), "same": (tokens[:100], 12)}
    outputs = []
    for backend in ("reference", "metal"):
        with emulated_metal(Checks.quick()) as trace:
            options = {"kv_cache_bytes": "60blocks", "kv_format": kv_format}
            engine = Engine(model, tokenizer, backend=backend, **options)
            engine.cache._initial_blocks = 20  # It grows.
            lose_all_kv(engine)
            for name, (prompt, max_tokens) in requests.items():
                params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
                engine.add_request(name, prompt, params)
                engine.step()
            outputs.append(serve(engine, [], None))
    assert outputs[0] == outputs[1] and set(outputs[0]) == set(requests)
    assert replays.total() > 12 and max(replays.values()) > 3
    assert {any(plan.num_partial_rows for plan in shape.plans) for shape in replays} == {
        True,
        False,
    }
    assert len({shape.num_blocks for shape in replays}) > 1
    assert disorders(trace) == []


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [False, True], ids=["recompute", "swap"])
def test_replayed_decodes_between_forks_hits_and_preemptions_get_the_tokens_of_the_reference(
    demo, compiler, replays, swaps: bool
):
    model, tokenizer = demo
    prompts = prompts_of(tokenizer)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5, n=2)
    roomy = Engine(model, tokenizer, backend="reference", kv_cache_bytes="60blocks")
    expected = serve(roomy, prompts, params)
    assert not replays
    with emulated_metal(Checks.quick()):
        engine = Engine(
            model,
            tokenizer,
            backend="metal",
            kv_cache_bytes="13blocks",
            watermark=0.0,
            swap_bytes="13blocks" if swaps else 0,
        )
        assert serve(engine, prompts, params) == expected
    assert engine.stats().num_preemptions > 0 and engine.stats().num_hit_tokens > 0
    assert replays.total() > 20


def test_what_a_replayed_decode_keeps_of_another_step_is_seen(demo, compiler, replays, monkeypatch):
    model, tokenizer = demo
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = prompts_of(tokenizer)[:1]
    engine = Engine(model, tokenizer, backend="reference", kv_cache_bytes="60blocks")
    expected = serve(engine, prompts, params)
    traced_layers, first = compiled_decode.traced_layers, {}
    for field in ("positions", "plans", "keys", "values"):
        first.clear()

        def faulty(cache, shape, arrays, states=None, field=field):
            kept = first.setdefault(shape, getattr(arrays, field))
            return traced_layers(cache, shape, arrays._replace(**{field: kept}), states)

        monkeypatch.setattr(compiled_decode, "traced_layers", faulty)
        with emulated_metal(Checks.quick()):
            engine = Engine(model, tokenizer, backend="metal", kv_cache_bytes="60blocks")
            same = serve(engine, prompts, params) == expected
        # Slabs are the same arrays in all steps, until they grow.
        assert same == (field in ("keys", "values"))


@pytest.mark.slow
def test_requests_of_every_kind_get_the_tokens_of_plain_mlx_one_step_ahead_on_kernels(
    demo, compiler, replays
):
    model, tokenizer = demo
    for seed, kv_format in ((1, None), (3, 8)):
        workload = Workload(seed, 8, model.args.vocab_size)
        waiting = workload.run(model, tokenizer, backend="reference", kv_format=kv_format)
        with emulated_metal(Checks.quick(writable=slots_of_the_step)):
            ahead = workload.run(model, tokenizer, backend="metal", kv_format=kv_format)
        if kv_format is None:
            assert_all_same(ahead, waiting)
            continue
        # A number of K or V may lie between two of 8 bits, 1/255 of the range of its group apart.
        # Then the rounding of what came before decides, and log-probabilities differ visibly.
        tokens_ahead, tokens_waiting = (
            {
                name: [completion.token_ids for completion in output.outputs]
                for name, output in run.outputs.items()
            }
            for run in (ahead, waiting)
        )
        assert tokens_ahead == tokens_waiting
    assert replays.total() > 20


def test_linear_layers_that_multiply_by_rows_take_a_launch_each(compiler):
    model = livelier_model(CONFIG | {"head_dim": 32, "tie_word_embeddings": True})
    nn.quantize(model, group_size=32, bits=4)
    token_ids, num_launches = [], Counter()
    for backend, option in (("reference", "mlx"), ("metal", "rows")):
        with emulated_metal(Checks.quick()) as trace:
            engine = make_engine(model, backend=backend, matmul=option)
            for name in ("a", "b"):
                engine.add_request(name, [ord(name) % 50] * 9, greedy(4))
            outputs = run(engine)
            num_launches = Counter(call.kernel for call in trace)
            engine.close()
        token_ids.append([outputs[name].outputs[0].token_ids for name in ("a", "b")])
    assert token_ids[0] == token_ids[1]
    # Seven in each of two layers and the logits, in three decodes of two rows. The prompts have 18
    # rows; the two with logits alone go through six products at the end.
    assert num_launches["mlx_paged_rows_matmul"] == 3 * 15 + 6


def test_fourteen_calls_lead_from_the_library_to_a_decode_on_metal(demo, compiler):
    ours = str(Path(mlx_paged.__file__).parent)
    stacks: list[list[list[str]]] = []
    made = kernels.kernel

    def names_of(frame):
        codes = [each.f_code for each, _ in traceback.walk_stack(frame)]
        return [code.co_name for code in codes if code.co_filename.startswith(ours)]

    def watched(name):
        def call(**arguments):
            # The caller waits for the engine's thread.
            waiting = sys._current_frames()[threading.main_thread().ident]
            stacks.append([names_of(None), names_of(waiting)])
            return made(name)(**arguments)

        return call

    with emulated_metal(Checks.quick()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "kernel", watched)
        llm = LLM(*demo, backend="metal", kv_cache_bytes="9blocks")
        stacks.clear()
        llm.generate([1, 2, 3], SamplingParams(max_tokens=3))
    at_work, waiting = stacks[-1]
    assert waiting[::-1] == ["generate", "share", "_complete", "step", "result"]
    assert at_work[::-1][:3] == ["_run", "run", "_step"]
    assert at_work[::-1][3:] == [
        *("run", "_launch", "launch"),
        *("__call__", "__call__", "update_and_attend", "update_and_attend"),
    ]
