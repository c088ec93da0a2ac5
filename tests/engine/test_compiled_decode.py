"""Decodes that are replayed from a trace: the same bits as decodes that are built, traces used for
as long as they fit, and nothing left behind by one that fails.

Kernels are functions of MLX operations here, so that ``mx.compile`` itself traces and computes.
"""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.adapted_models import adapted_model, greedy_answer
from helpers.cache_helpers import scheduled_step, sequences_of
from helpers.engine_runs import greedy, load_demo, lose_all_kv, make_engine, prompt, replays_of, run
from helpers.fast_lane import mostly_slow
from helpers.mlx_lm_models import (
    GEMMA3,
    GEMMA3N,
    GPT_OSS,
    LLAMA,
    Config,
    random_model,
    stock_tokens,
)
from helpers.workloads import Workload, assert_same
from mlx.utils import tree_map
from paged_testing.pure_metal import pure_metal

from mlx_paged.cache.open_decode import DecodeArrays
from mlx_paged.cache.paged import PagedKVCache, PagedLayerKV
from mlx_paged.engine import compiled_decode
from mlx_paged.engine.compiled_decode import CompiledDecode
from mlx_paged.engine.engine import Engine
from mlx_paged.models.mlx_lm import adapt
from mlx_paged.ops import SlotMapping, traced_decode

NUM_BUILT_FIRST = compiled_decode.NUM_BUILT_FIRST


@pytest.fixture(autouse=True)
def pure() -> Iterator[None]:
    with pure_metal(), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first decode of a shape is traced."""
    monkeypatch.setattr(compiled_decode, "NUM_BUILT_FIRST", 0)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each decode that Python builds in a trace; that of the check does not count."""
    found: list[int] = []
    traced_layers, check = compiled_decode.traced_layers, CompiledDecode._check

    def watched(
        cache: PagedKVCache, shape: Any, arrays: DecodeArrays, states: Any = None
    ) -> list[PagedLayerKV]:
        found.append(shape.num_tokens)
        return traced_layers(cache, shape, arrays, states)

    def unwatched(*arguments: Any) -> list[mx.array]:
        found.pop()
        return check(*arguments)

    monkeypatch.setattr(compiled_decode, "traced_layers", watched)
    monkeypatch.setattr(CompiledDecode, "_check", unwatched)
    return found


def plain_tokens(model: nn.Module, requests: dict[str, tuple[list[int], Any]]) -> dict[str, Any]:
    engine = make_engine(model, backend="reference")
    return tokens_of(engine, requests)


def tokens_of(engine: Engine, requests: dict[str, tuple[list[int], Any]]) -> dict[str, Any]:
    for name, (tokens, params) in requests.items():
        engine.add_request(name, tokens, params)
    outputs = run(engine)
    assert all(output.error is None for output in outputs.values())
    return {
        name: [completion.token_ids for completion in output.outputs]
        for name, output in outputs.items()
    }


# The same numbers


def test_the_logits_are_those_of_a_built_decode(
    demo_model: nn.Module, at_once: None, monkeypatch: pytest.MonkeyPatch
):
    replay, differences = CompiledDecode.replay, []

    def compared(compiled: CompiledDecode, tokens: mx.array) -> mx.array | None:
        # The function of a trace changes nothing, so both may run.
        shape, arrays, _, _ = compiled._cache.open_decode() or (None,) * 4
        logits = replay(compiled, tokens)
        if logits is not None:
            layers = compiled_decode.traced_layers(compiled._cache, shape, arrays)
            built = demo_model(tokens, layers)
            differences.append(mx.abs(built - logits).max().item())
            fences = zip(layers, compiled._cache.layers, strict=True)
            assert all(mx.allclose(a.kv.fence, b.kv.fence, atol=1e-5).item() for a, b in fences)
        return logits

    monkeypatch.setattr(CompiledDecode, "replay", compared)
    engine = make_engine(demo_model)
    for size in (3, 40, 150):
        engine.add_request(str(size), prompt(size), greedy(12, ignore_eos=True))
    run(engine)
    # Where mx.compile joins operations, the last bits differ (MLX 0.32.2).
    assert len(differences) > 9 and max(differences) < 2e-5


@pytest.mark.slow
def test_requests_of_every_kind_get_the_same_as_in_plain_mlx(
    demo_model: nn.Module, at_once: None, traced: list[int]
):
    workload = Workload(70, 8, demo_model.args.vocab_size)
    ahead = workload.run(demo_model)
    assert ahead.engine.runner.compiled_decode is not None and len(traced) > 2
    plain = workload.run(demo_model, backend="reference")
    for name in workload.asks:
        assert_same(ahead.outputs[name], plain.outputs[name])


@pytest.mark.parametrize(
    "config",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (LLAMA, GEMMA3, GEMMA3N)), GPT_OSS],
    ids=lambda config: config["model_type"],
)
def test_models_of_mlx_lm_are_replayed_and_answer_as_there(config: Config, at_once: None):
    # Layers without windows and with them, with sinks, and layers that read the K/V of others.
    model = random_model(config)
    asked = {"a": prompt(20), "b": prompt(5, seed=1)}
    expected = {name: [stock_tokens(model, ids, 16)] for name, ids in asked.items()}
    engine = make_engine(adapt(model, config))
    replays = replays_of(engine)
    requests = {name: (ids, greedy(16, ignore_eos=True)) for name, ids in asked.items()}
    assert tokens_of(engine, requests) == expected
    # The first step is that of the prompts.
    assert replays == [False] + [True] * 15


@pytest.mark.parametrize(
    "name", ["qwen3_next", "mamba2", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
@mostly_slow("ahead", [False, True], ids=["waiting", "ahead"], quick=(1,))
def test_models_with_states_are_replayed_and_answer_as_in_mlx_lm(
    name: str, ahead: bool, at_once: None
):
    """States are gathered where the batch has changed; a third request joins and leaves. Decodes
    reach ends of blocks, where they leave checkpoints. mamba2 keeps no K/V.
    """
    asked = {"a": (prompt(20), 24), "b": (prompt(5, seed=1), 16)}
    engine = make_engine(adapted_model(name), block_size=8, run_ahead=ahead)
    replays = replays_of(engine)
    for request_id, (ids, count) in asked.items():
        engine.add_request(request_id, ids, greedy(count, ignore_eos=True))
    for _ in range(5):
        engine.step()
    asked["c"] = prompt(9, seed=2), 4
    engine.add_request("c", asked["c"][0], greedy(4, ignore_eos=True))
    outputs = run(engine)
    for request_id, (ids, count) in asked.items():
        expected = greedy_answer(name, ids, count)
        assert outputs[request_id].outputs[0].token_ids == expected
    # But for the steps of the prompts.
    assert replays.count(False) == 2 and replays.count(True) >= 21
    again = engine.add_request(
        "again", [*asked["a"][0], *outputs["a"].outputs[0].token_ids], greedy(2)
    )
    (output,) = run(engine).values()
    assert output.num_cached_tokens == 40, again


@pytest.mark.slow
def test_many_requests_of_every_kind_get_the_same_as_from_built_decodes(
    demo_model: nn.Module, traced: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiled_decode, "NUM_BUILT_FIRST", 2)
    monkeypatch.setattr(compiled_decode, "MAX_TRACES", 5)
    workload = Workload(103, 16, demo_model.args.vocab_size)
    replayed = workload.run(demo_model)
    with monkeypatch.context() as patch:
        patch.setattr(CompiledDecode, "replay", lambda *_: None)
        built = workload.run(demo_model)
    for name in workload.asks:
        assert_same(replayed.outputs[name], built.outputs[name])
    assert replayed.engine.stats().num_preemptions > 0 and len(traced) > 5


# When a decode is traced, and when it is replayed


def test_a_shape_is_built_some_times_then_traced_once_and_replayed(
    demo_model: nn.Module, traced: list[int]
):
    engine = make_engine(demo_model)
    replays = replays_of(engine)
    requests = {"a": (prompt(20), greedy(40, ignore_eos=True))}
    assert tokens_of(engine, requests) == plain_tokens(demo_model, requests)
    # The first call is the prompt's; behind it no slab has changed its size, nor has the plan.
    assert replays == [False] * (1 + NUM_BUILT_FIRST) + [True] * (39 - NUM_BUILT_FIRST)
    assert traced == [1]


def test_built_and_replayed_decodes_and_prompts_in_between_are_one_chain(demo_model: nn.Module):
    # A link that were lost would lose what was written before it.
    engine = make_engine(demo_model, max_num_mixed_tokens=24, max_num_seqs=8)
    replays = replays_of(engine)
    requests = {
        "a": (prompt(20), greedy(44, ignore_eos=True)),
        "b": (prompt(60), greedy(30, ignore_eos=True, n=2)),
    }
    engine.add_request("a", *requests["a"])
    for _ in range(20):
        engine.step()
    tokens = {}
    engine.add_request("b", *requests["b"])
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = [c.token_ids for c in output.outputs]
    assert tokens == plain_tokens(demo_model, requests)
    changes = sum(before != after for before, after in itertools.pairwise(replays))
    assert changes >= 3 and replays.count(True) > 20


def test_growth_makes_another_shape(
    demo_model: nn.Module, at_once: None, traced: list[int], monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine(demo_model, kv_cache_bytes="64blocks")
    engine.cache._initial_blocks = 2
    lose_all_kv(engine)
    requests = {"a": (prompt(20), greedy(60, ignore_eos=True))}
    assert tokens_of(engine, requests) == plain_tokens(demo_model, requests)
    compiled = engine.runner.compiled_decode
    assert compiled is not None
    sizes = [shape.num_blocks for shape, *_ in compiled._traces]
    assert len(sizes) == len(set(sizes)) > 1 and sizes == sorted(sizes)
    # A chain of kernels begins after growth, and here its first fence is of another shape, so MLX
    # traces again.
    assert len(traced) == 2 * len(sizes)


def test_the_shapes_that_came_up_last_are_remembered(
    demo_model: nn.Module, at_once: None, traced: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiled_decode, "MAX_TRACES", 2)
    engine = make_engine(demo_model)
    compiled = engine.runner.compiled_decode
    assert compiled is not None
    for num_seqs in (1, 2, 1, 3, 1, 2):
        engine.reset_prefix_cache()
        requests = {str(i): (prompt(20, i), greedy(3, ignore_eos=True)) for i in range(num_seqs)}
        assert tokens_of(engine, requests) == plain_tokens(demo_model, requests)
        assert len(compiled._traces) <= 2
    assert [shape.num_tokens for shape, *_ in compiled._traces] == [1, 2]
    assert traced == [1, 2, 3, 2]


def test_all_threads_share_the_traces(demo_model: nn.Module, at_once: None, traced: list[int]):
    engine = make_engine(demo_model)
    requests = {"a": (prompt(20), greedy(6, ignore_eos=True))}
    expected, outputs = plain_tokens(demo_model, requests), []

    def ask() -> None:
        outputs.append(tokens_of(engine, requests))

    for _ in range(3):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    ask()
    assert outputs == [expected] * 4 and traced == [1]


def test_traces_are_dropped_in_the_engines_thread_before_its_streams_are_cleared(
    demo_model: nn.Module, at_once: None, traced: list[int], monkeypatch: pytest.MonkeyPatch
):
    # Another thread that frees a compiled function while MLX clears the streams of the one that
    # called it stops both for ever, and the garbage collector runs in any thread.
    engine = Engine(demo_model, kv_cache_bytes="100blocks")
    tokens_of(engine, {"a": (prompt(20), greedy(4))})
    decode, thread = engine.runner.compiled_decode, engine.thread
    assert decode is not None and len(decode._traces) == len(traced) == 1
    seen: list[tuple[bool, int]] = []
    clear_streams = mx.clear_streams

    def watched() -> None:
        seen.append((thread.is_current, len(decode._traces)))
        clear_streams()

    monkeypatch.setattr(mx, "clear_streams", watched)
    del engine
    gc.collect()
    thread.join()
    assert seen == [(True, 0)]


def test_what_is_no_decode_of_single_tokens_is_built(demo_model: nn.Module):
    engine = Engine(demo_model, kv_cache_bytes="100blocks")
    cache, seqs = engine.cache, sequences_of(engine)
    assert isinstance(cache, PagedKVCache)
    assert cache.open_decode() is None  # No step is open.

    def is_decode(counts: dict[str, int], **options: Any) -> bool:
        with seqs.step(counts, **options) as step:
            layers = [make_step_of(layer) for layer in cache.layers]
            decode = cache.open_decode()
            for use in layers:
                use(step.num_tokens)
            mx.eval(cache.arrays)
        return decode is not None

    assert not is_decode({"a": 5})
    assert is_decode({"a": 1})
    assert not is_decode({"a": 1, "b": 2})
    assert is_decode({"a": 1, "b": 1})
    assert not is_decode({"a": 1, "b": 1}, num_logit_rows=[1, 0])
    with scheduled_step(seqs, {"a": 1}, shares_new_blocks=True):
        assert cache.open_decode() is None
    cache.layers[1].kv.leave_chain()
    assert is_decode({"a": 1})  # A chain of kernels may begin with a replay.
    assert is_decode({"a": 1})


def make_step_of(layer: PagedLayerKV) -> Any:
    spec = layer.spec

    def use(num_tokens: int) -> None:
        rows = mx.ones((num_tokens, spec.num_kv_heads, spec.key_dim))
        queries = mx.ones((num_tokens, spec.num_heads, spec.key_dim))
        if layer.step.logit_rows is not None:
            queries = queries[layer.step.logit_rows]
        layer.update_and_attend(queries, rows, rows, scale=1.0)

    return use


def test_plain_mlx_builds_its_decodes(demo_model: nn.Module):
    engine = make_engine(demo_model, backend="reference")
    replays = replays_of(engine)
    engine.add_request("a", prompt(20), greedy(20, ignore_eos=True))
    run(engine)
    assert not any(replays)
    assert make_engine(demo_model, kv="basic").runner.compiled_decode is None


# Weights


REQUESTS = {"a": (prompt(20), greedy(24, ignore_eos=True))}


def change_weights(model: nn.Module) -> None:
    model.update(tree_map(lambda array: array * 0.7, model.parameters()))


def change_a_weight_in_place(model: nn.Module) -> None:
    weight = model.layers[0].mlp.up_proj.weight
    weight[:] = weight * -1


def quantise(model: nn.Module) -> None:
    nn.quantize(model, group_size=32, bits=4)


def add_biases(model: nn.Module) -> None:
    for layer in model.layers:
        layer.mlp.down_proj.bias = mx.linspace(-9, 9, layer.mlp.down_proj.weight.shape[0])


@mostly_slow("change", [change_weights, change_a_weight_in_place, quantise, add_biases])
def test_another_model_in_the_place_of_the_first_is_seen(
    demo_model: nn.Module, at_once: None, traced: list[int], change: Any
):
    model = load_demo()[0]
    engine = make_engine(model)
    assert tokens_of(engine, REQUESTS) == plain_tokens(demo_model, REQUESTS)
    change(model)
    mx.eval(model.parameters())
    engine.reset_prefix_cache()
    changed = tokens_of(engine, REQUESTS)
    assert changed == plain_tokens(model, REQUESTS) != plain_tokens(demo_model, REQUESTS)
    assert traced == ([1] if change in (change_weights, change_a_weight_in_place) else [1, 1])


# Failures


def test_a_trace_that_fails_leaves_decodes_to_python_and_says_so_once(
    demo_model: nn.Module, at_once: None, monkeypatch: pytest.MonkeyPatch
):
    attend, num_calls = PagedLayerKV.update_and_attend, []
    expected = plain_tokens(demo_model, REQUESTS)

    def failing(layer: PagedLayerKV, *arguments: Any, **options: Any) -> mx.array:
        if layer not in engine.cache.layers and len(num_calls) == 1:
            raise LookupError("not in a trace")
        num_calls.extend([1] * (layer not in engine.cache.layers))
        return attend(layer, *arguments, **options)

    monkeypatch.setattr(PagedLayerKV, "update_and_attend", failing)
    engine = make_engine(demo_model)
    replays = replays_of(engine)
    with pytest.warns(UserWarning, match=r"can't be compiled \(LookupError: not in a trace\)") as w:
        tokens = tokens_of(engine, REQUESTS)
    assert len(w) == 1 and len(num_calls) == 1 and not any(replays)
    assert tokens == expected


def test_a_replay_that_gives_other_logits_leaves_decodes_to_python_and_says_so_once(
    demo_model: nn.Module, at_once: None, monkeypatch: pytest.MonkeyPatch
):
    def wrong(function: Any) -> Any:
        def replay(*arguments: Any) -> Any:
            logits, *others = function(*arguments)
            return logits[:, ::-1], *others

        return replay

    expected = plain_tokens(demo_model, REQUESTS)
    monkeypatch.setattr(mx, "compile", wrong)
    engine = make_engine(demo_model)
    replays = replays_of(engine)
    with pytest.warns(UserWarning, match="a replay has different logits than the traced") as w:
        assert tokens_of(engine, REQUESTS) == expected
    assert len(w) == 1 and not any(replays)


def test_an_interrupt_while_tracing_leaves_the_model_and_the_slabs_as_they_were(
    demo_model: nn.Module, at_once: None, monkeypatch: pytest.MonkeyPatch
):
    expected = plain_tokens(demo_model, REQUESTS)["a"]
    attend, interrupts = PagedLayerKV.update_and_attend, [KeyboardInterrupt("now")]

    def interrupted(layer: PagedLayerKV, *arguments: Any, **options: Any) -> mx.array:
        if layer not in engine.cache.layers:
            seen.append(layer)
            if len(seen) == 2 and interrupts:
                raise interrupts.pop()
        return attend(layer, *arguments, **options)

    seen: list[PagedLayerKV] = []
    engine = make_engine(demo_model)
    monkeypatch.setattr(PagedLayerKV, "update_and_attend", interrupted)
    engine.add_request("a", *REQUESTS["a"])
    slabs = [(layer.kv.k[0], layer.kv.v[0]) for layer in engine.cache.layers]
    with pytest.raises(KeyboardInterrupt):
        for _ in range(5):
            engine.step()
    assert not interrupts and len(seen) == 2
    for layer, (k, v) in zip(engine.cache.layers, slabs, strict=True):
        assert layer.kv.k[0] is k and layer.kv.v[0] is v
    mx.eval(engine.cache.arrays, demo_model.parameters())  # They are no tracers.
    (tokens,) = (output.outputs[0].token_ids for output in run(engine).values())
    assert [tokens] == expected


# What a trace may read


def test_a_traced_step_has_arrays_and_counts_and_no_numbers_of_the_host():
    positions = mx.array([4, 9])
    step = traced_decode(16, positions, {"plan": "packed"})
    assert (step.num_seqs, step.num_tokens, step.max_query_len, step.block_size) == (2, 2, 1, 16)
    assert step.positions is positions and step.logit_rows is None
    assert step.derived("plan", lambda: "other") == "packed"
    assert step.parts((1, 2))[0][0].capacity == 1
    assert isinstance(step.slot_mapping, SlotMapping) and step.slot_mapping.num_tokens == 2
    for read in (
        lambda: step.context_lens[0],
        lambda: list(step.block_tables),
        lambda: step.slot_mapping.packed,
        lambda: step.slot_mapping.places(1),
        lambda: step.with_history,
    ):
        with pytest.raises(RuntimeError, match="can't read host values, which change every step"):
            read()
