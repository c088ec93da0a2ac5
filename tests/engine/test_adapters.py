"""Several LoRA adapters in one packed step: each answers as mlx-lm does with that adapter loaded
alone; rows keep their bits whatever else is loaded; K/V belong to the content of an adapter; and
nothing of an adapter that does not fit is loaded.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers.adapted_models import adapted_model, mlx_lm_model
from helpers.deterministic_workloads import let_mlx_vary, model_of, shorten_steps
from helpers.engine_runs import (
    answer,
    assert_nothing_held,
    greedy,
    make_engine,
    prompt,
    replays_of,
    run,
    small_model,
    tiny_models,
)
from helpers.lora_folders import write_adapter, write_files, write_peft
from helpers.mlx_lm_models import GEMMA3, LLAMA, random_model, stock_tokens
from helpers.workloads import Workload, assert_same
from mlx.utils import tree_flatten
from mlx_lm.utils import load_adapters
from paged_testing.pure_metal import pure_metal

from mlx_paged import LLM, PoolingParams
from mlx_paged.engine import compiled_decode
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.scheduling.prefix_cache import extra_hash_keys
from mlx_paged.errors import AdapterError, AdaptersInUseError
from mlx_paged.models.adapted_layers import (
    AdaptedEmbedding,
    AdaptedLinear,
    AdapterRows,
    Matrices,
    running_adapters,
    wrapper_of,
)
from mlx_paged.models.adapters import AdapterFiles, Adapters, _with_own_modules
from mlx_paged.models.identity import model_identity
from mlx_paged.models.kv_cache import weight_nbytes
from mlx_paged.models.mlx_lm import adapt
from mlx_paged.snapshots import SnapshotError

Q, O, DOWN = (  # noqa: E741
    f"model.layers.{layer}"
    for layer in ("0.self_attn.q_proj", "1.self_attn.o_proj", "1.mlp.down_proj")
)
NAMES = ("a", "b", "c")


def targets(model: nn.Module) -> list[str]:
    """The layers of a model of mlx-lm that adapters can target."""
    return [path for path, module in model.named_modules() if wrapper_of(module) is not None]


@cache
def quantised() -> nn.Module:
    model = random_model(LLAMA)
    nn.quantize(model, 64, 4)
    mx.eval(model.parameters())
    return model


# A native model; one of mlx-lm, quantised, with a tied head; with windows; with recurrent layers
# and experts, in groups of runs; one that keeps states alone; one sequence at a time.
MODELS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "native": tiny_models,
    "quantised": lambda: (adapt(quantised(), LLAMA), quantised()),
    "windows": lambda: (adapt(random_model(GEMMA3), GEMMA3), random_model(GEMMA3)),
    **{
        name: lambda name=name: (adapted_model(name), mlx_lm_model(name))
        for name in ("qwen3_next", "mamba2", "gpt_bigcode")
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the tiny models, with different layers, ranks and scales."""
    folder, theirs = tmp_path_factory.mktemp("adapters"), tiny_models()[1]
    layers = {"a": [Q, O, DOWN], "b": [Q, "model.embed_tokens", "lm_head"], "c": [DOWN]}
    return {
        name: write_adapter(folder / name, theirs, layers[name], rank=3 + seed, seed=seed)
        for seed, name in enumerate(NAMES)
    }


def with_adapter(model: nn.Module, folder: Path | None) -> nn.Module:
    """The model of mlx-lm with an adapter loaded by mlx-lm, on the same weights."""
    loaded = _with_own_modules(model)  # type: ignore[arg-type]
    if folder is not None:
        load_adapters(loaded, str(folder))
    loaded.eval()
    return loaded


def tokens_of(engine: Engine, asked: dict[str, tuple[Sequence[int], str | None]]) -> dict[str, Any]:
    for name, (tokens, adapter) in asked.items():
        engine.add_request(name, tokens, greedy(10, ignore_eos=True), adapter=adapter)
    outputs = run(engine)
    assert [output.error for output in outputs.values()] == [None] * len(asked)
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


# As with each alone


@pytest.mark.parametrize("kind", MODELS)
def test_eight_adapters_in_one_batch_answer_as_each_does_alone_in_mlx_lm(kind: str, tmp_path: Path):
    ours, theirs = MODELS[kind]()
    layers, rng = targets(theirs), random.Random(1)
    names = [None, *map(str, range(8))]
    folders: dict[str, Path] = {}
    for number, name in enumerate(names[1:], 1):
        chosen = rng.sample(layers, max(1, 2 * len(layers) // 3))
        folders[name] = write_adapter(
            tmp_path / name, theirs, chosen, rank=number, scale=0.5 + number / 4, seed=number
        )
    engine = make_engine(ours, adapters=folders)
    rows: dict[str, np.ndarray] = {}
    engine.read_rows(
        lambda completion, number, row: rows.setdefault(completion.request_id, np.array(row))
    )
    asked = {f"of {name}": (prompt(10 + 3 * i, i), name) for i, name in enumerate(names)}
    answers = tokens_of(engine, asked)
    for request_id, (tokens, name) in asked.items():
        alone = with_adapter(theirs, name and folders[name])
        assert answers[request_id] == stock_tokens(alone, tokens, 10)
        logits = np.array(alone(mx.array([tokens]))[0, -1])
        np.testing.assert_allclose(
            rows[request_id], logits, rtol=0, atol=2e-5 * np.abs(logits).max()
        )
    assert tokens_of(engine, asked) == answers  # with cached prefixes
    assert engine.stats().num_cached_prompt_tokens >= 16 * (len(names) - 2)
    assert_nothing_held(engine)


def test_an_adapter_of_peft_is_the_same_adapter(folders: dict[str, Path], tmp_path: Path):
    write_peft(tmp_path / "peft", folders["a"])
    engine = make_engine(tiny_models()[0], adapters={"a": folders["a"], "p": tmp_path / "peft"})
    digests = {each.digest for each in engine.adapters.loaded.values()}
    assert len(digests) == 1


@pytest.mark.parametrize(
    "options",
    [{"kv": "basic"}, {"num_draft_tokens": 4}, {"draft": True}, {"matmul": "rows"}],
    ids=str,
)
def test_other_engines_answer_the_same(folders: dict[str, Path], options: dict[str, Any]):
    # Drafts are looked up, or made by a model that has no adapters. Another matmul finds the linear
    # layers below the adapters.
    ours, theirs = tiny_models()
    if options.pop("draft", False):
        options = {"draft_model": small_model(), "num_draft_tokens": 3}
    engine = make_engine(ours, adapters=folders, **options)
    asked = {f"of {name}": (prompt(20) * 2, name) for name in (None, *NAMES)}
    answers = tokens_of(engine, asked)
    for request_id, (tokens, name) in asked.items():
        alone = with_adapter(theirs, folders[name] if name else None)
        assert answers[request_id] == stock_tokens(alone, tokens, 10)


def test_embeddings_are_those_of_each_adapter_alone(folders: dict[str, Path]):
    ours, theirs = tiny_models()
    engine = make_engine(ours, adapters=folders)
    tokens = prompt(20)
    for name in (None, *NAMES):
        engine.add_request(str(name), tokens, PoolingParams(normalize=False), adapter=name)
    outputs = run(engine)
    for name in (None, *NAMES):
        alone = with_adapter(theirs, folders[name] if name else None)
        row = np.array(alone["model"](mx.array([tokens]))[0, -1])
        assert np.abs(np.array(outputs[str(name)].pooled) - row).max() < 1e-5


def test_replayed_decodes_take_the_adapters_as_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiled_decode, "NUM_BUILT_FIRST", 0)
    ours = small_model(head_dim=32)  # A width that the kernels have.
    folders = {
        name: write_adapter(tmp_path / name, ours, [Q, O, DOWN][seed:], seed=seed)
        for seed, name in enumerate(NAMES)
    }
    mixed = [None, "a", "b"]
    orders = [mixed, mixed[::-1], ["c"] * 3, [None] * 3]
    with pure_metal():
        engine = make_engine(ours, adapters=folders, enable_prefix_caching=False)
        replays, decode = replays_of(engine), engine.runner.compiled_decode
        built = make_engine(ours, adapters=folders, backend="reference")
        for number, names in enumerate(orders):
            asked = {
                f"{number} {place}": (prompt(9, seed=place), name)
                for place, name in enumerate(names)
            }
            assert tokens_of(engine, asked) == tokens_of(built, asked)
        # A batch without adapters has traces of its own, without their products.
        assert decode is not None and not decode._has_failed
        assert {key[-1] for key in decode._traces} == {True, False}
        assert len(decode._traces) == 2 and replays.count(True) == 9 * len(orders)


# Bits


@pytest.mark.parametrize("kind", [nn.Linear, nn.QuantizedLinear, nn.Embedding])
def test_a_row_has_the_same_bits_alone_mixed_and_whatever_else_is_loaded(kind: type[nn.Module]):
    mx.random.seed(2)
    is_embedding = kind is nn.Embedding
    base = nn.Embedding(64, 96) if is_embedding else nn.Linear(64, 96)
    base = base.to_quantized(64, 4) if kind is nn.QuantizedLinear else base
    wrapper = (AdaptedEmbedding if is_embedding else AdaptedLinear)(base, 4, 16, mx.float32)

    def matrices(rank: int) -> Matrices:
        return Matrices(mx.random.normal((64, rank)), mx.random.normal((rank, 96)), 0.3)

    x = mx.arange(9)
    if not is_embedding:
        x = mx.random.normal((9, 64))
        x[0], x[3] = -0.0, mx.nan
    slots = mx.array([0, 2, 1, 0, 2, 3, 2, 1, 1], dtype=mx.uint32)

    def bits(rows: Sequence[int]) -> np.ndarray:
        index = mx.array(list(rows))
        with running_adapters(AdapterRows(slots[index])):
            return np.array(wrapper(x[index]).view(mx.uint32))

    wrapper.put(2, matrices(5))
    alone = bits([1, 4, 6])
    wrapper.put(1, matrices(16))
    wrapper.put(3, matrices(1))
    mixed = bits(range(9))
    np.testing.assert_array_equal(mixed[[1, 4, 6]], alone)
    np.testing.assert_array_equal(np.concatenate([bits([row]) for row in range(9)]), mixed)
    # Rows without an adapter, NaN and -0.0 included, and of one that does not target the layer.
    wrapper.put(1, None)
    plain = np.array(mx.concatenate([base(x[row : row + 1]) for row in range(9)]).view(mx.uint32))
    # The base's own products of several rows are those of one row here, or are compared as such.
    without = np.concatenate([bits([row]) for row in (0, 2, 3, 7, 8)])
    np.testing.assert_array_equal(without, plain[[0, 2, 3, 7, 8]])
    np.testing.assert_array_equal(bits([1, 4, 6]), alone)


def test_rows_of_a_step_keep_their_bits_when_others_are_loaded_and_evicted(
    folders: dict[str, Path],
):
    def logits(engine: Engine, names: Sequence[str | None]) -> list[bytes]:
        rows: list[list[bytes]] = [[] for _ in names]
        engine.read_rows(
            lambda completion, _, row: rows[int(completion.request_id)].append(
                np.array(row).tobytes()
            )
        )
        tokens_of(engine, {str(i): (prompt(9 + i), name) for i, name in enumerate(names)})
        return [b"".join(each) for each in rows]

    ours, options = tiny_models()[0], {"enable_prefix_caching": False}
    plain = logits(make_engine(ours, **options), [None] * 4)
    engine = make_engine(ours, max_adapters=2, **options)
    engine.load_adapter("a", folders["a"])
    first = logits(engine, [None, "a", "a", None])
    assert [first[0], first[3]] == [plain[0], plain[3]] and first[1] != plain[1]
    engine.load_adapter("b", folders["b"])
    assert logits(engine, [None, "a", "b", None])[:2] == first[:2]
    # "a" was used before "b", so "c" takes its slot.
    engine.load_adapter("c", folders["c"])
    assert list(engine.adapters.loaded) == ["b", "c"]
    assert logits(engine, ["c", "a", "a", None])[1:] == first[1:]
    assert list(engine.adapters.loaded) == ["c", "a"]
    assert logits(engine, [None] * 4) == plain


def test_a_deterministic_engine_has_the_bits_of_each_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # MLX's matmuls vary with the number of rows, and those below the adapters are not MLX's.
    shorten_steps(monkeypatch)
    let_mlx_vary(monkeypatch)
    model = model_of("16 bits")
    adapters = {
        name: write_adapter(tmp_path / name, model, [Q, O, DOWN][seed:], seed=seed)
        for seed, name in enumerate(NAMES)
    }

    def logprobs_of(names: dict[str, str | None]) -> dict[str, Any]:
        engine = make_engine(model, adapters=adapters, deterministic=True, max_num_seqs=6)
        for number, (request_id, name) in enumerate(names.items()):
            tokens = prompt(20 + 17 * number)
            engine.add_request(request_id, tokens, greedy(6, logprobs=0), adapter=name)
        return {name: output.outputs[0].logprobs for name, output in run(engine).items()}

    mixed = logprobs_of({"0": "a", "1": None, "2": "b", "3": "a", "4": "c"})
    [first] = logprobs_of({"0": "a"}).values()
    assert mixed["0"] == first
    swapped = logprobs_of({"0": "b", "1": None, "2": "b", "3": "c", "4": "c"})
    assert [swapped[each] == mixed[each] for each in "01234"] == [False, True, True, False, True]


# K/V


def test_blocks_belong_to_the_content_of_an_adapter(folders: dict[str, Path], tmp_path: Path):
    ours, tokens, params = tiny_models()[0], prompt(64), greedy(2)

    def num_cached(engine: Engine, **options: Any) -> int:
        return answer(engine, tokens, params, **options).num_cached_tokens

    options = {"cache_dir": tmp_path / "cache", "max_adapters": 2}
    engine = make_engine(ours, **options)
    engine.load_adapter("x", folders["a"])
    assert [num_cached(engine), num_cached(engine)] == [0, 48]
    assert [num_cached(engine, adapter="x") for _ in range(2)] == [0, 48]
    assert num_cached(engine, adapter="x", cache_salt="s") == 0
    path = tmp_path / "snapshot.safetensors"
    assert engine.save_snapshot(path, tokens, adapter="x") == 64
    with pytest.raises(SnapshotError, match="has another model than this cache"):
        engine.load_snapshot(path)
    # One that was trained again has the name and other blocks.
    engine.unload_adapter("x")
    engine.load_adapter("x", folders["b"])
    assert num_cached(engine, adapter="x") == 0
    engine.close()

    # In the next process they are on disk; those of the model alone also for an engine of its own.
    engine = make_engine(ours, adapters={"y": folders["a"]}, **options)
    assert [num_cached(engine), num_cached(engine, adapter="y")] == [48, 48]
    engine.reset_prefix_cache()
    assert engine.load_snapshot(path, adapter="y") == tokens
    engine.close()
    engine = make_engine(ours, cache_dir=tmp_path / "cache")
    assert num_cached(engine) == 48
    engine.close()
    assert extra_hash_keys(None) == () and extra_hash_keys("s") == ("s",)


def test_the_model_of_the_caller_is_not_changed_and_the_budget_counts_the_adapters(
    folders: dict[str, Path],
):
    ours = tiny_models()[0]
    before = model_identity(ours)
    engine = make_engine(ours, adapters=folders, max_adapters=4, max_adapter_rank=8)
    kinds = {type(module) for module in engine.runner.model.modules()}
    assert {AdaptedLinear, AdaptedEmbedding} <= kinds
    assert model_identity(ours) == before
    assert weight_nbytes(engine.runner.model) == weight_nbytes(ours) + engine.adapters.nbytes
    # Five slots of 8 rows in float32 for each input and output of the 16 layers.
    widths = 2 * (3 * (32 + 64) + 2 * (32 + 32) + 2 * (64 + 32)) + 2 * (61 + 32)
    assert engine.adapters.nbytes <= 5 * 8 * 4 * widths
    stacks = [
        leaf.nbytes for name, leaf in tree_flatten(dict(engine.runner.model)) if "._lora_" in name
    ]
    assert 0 < sum(stacks) <= engine.adapters.nbytes


# Loading and unloading


def test_an_adapter_in_use_is_kept_and_one_that_is_unloaded_serves_its_requests(
    folders: dict[str, Path],
):
    ours, theirs = tiny_models()
    engine = make_engine(ours, adapters={"a": folders["a"]}, max_adapters=1)
    expected = stock_tokens(with_adapter(theirs, folders["a"]), prompt(9), 10)
    engine.add_request("running", prompt(9), greedy(10, ignore_eos=True), adapter="a")
    engine.step()
    with pytest.raises(AdapterError, match="there is an adapter 'a' already"):
        engine.load_adapter("a", folders["a"])
    with pytest.raises(AdaptersInUseError, match="requests use all of the 1 adapters"):
        engine.load_adapter("b", folders["b"])
    engine.unload_adapter("a")
    with pytest.raises(AdapterError, match="there is no adapter 'a'; there are none"):
        engine.add_request("late", prompt(9), adapter="a")
    with pytest.raises(AdapterError, match="there is no adapter 'a'"):
        engine.unload_adapter("a")
    with pytest.raises(AdaptersInUseError):
        engine.load_adapter("b", folders["b"])
    outputs = run(engine)
    assert outputs.keys() == {"running"}
    assert outputs["running"].outputs[0].token_ids == expected
    engine.load_adapter("b", folders["b"])
    assert_nothing_held(engine)


def test_requests_of_every_kind_are_answered_the_same_while_adapters_come_and_go(
    folders: dict[str, Path],
):
    """Preempted, swapped out, forked, sampled and aborted requests; in a second engine, adapters
    are evicted and loaded again between them.
    """
    ours, workload, names = tiny_models()[0], Workload(5, 16, 61), [None, *NAMES]
    rng = random.Random(3)
    of_request = {name: rng.choice(names) for name in workload.asks}
    plain = workload.run(ours, adapters=folders, adapter_of=of_request)

    def reload(engine: Engine, wanted: str | None) -> None:
        unused = [
            name
            for name, adapter in engine.adapters.loaded.items()
            if all(each.adapter is not adapter for each in engine.reports.requests.values())
        ]
        for name in unused:
            engine.unload_adapter(name)
        for name in ([wanted] if wanted else []) + rng.sample(NAMES, 1):
            if name not in engine.adapters.known:
                engine.load_adapter(name, folders[name])

    changing = workload.run(ours, max_adapters=6, adapter_of=of_request, before_adding=reload)
    assert changing.engine.adapters.max_rank == plain.engine.adapters.max_rank == 16
    for name, output in plain.outputs.items():
        assert_same(changing.outputs[name], output)
    assert plain.engine.stats().num_preemptions > 0


def test_more_adapters_than_fit_are_loaded_again_when_they_are_asked_for(
    folders: dict[str, Path], tmp_path: Path
):
    ours, theirs = tiny_models()
    own = {name: Path(shutil.copytree(folders[name], tmp_path / name)) for name in NAMES}
    engine = make_engine(ours, adapters=own, max_adapters=2)
    assert list(engine.adapters.loaded) == ["a", "b"]
    expected = {
        name: stock_tokens(with_adapter(theirs, own[name]), prompt(64), 4) for name in NAMES
    }
    assert len(set(map(tuple, expected.values()))) == 3
    for name in "cabca":
        output = answer(engine, prompt(64), greedy(4, ignore_eos=True), adapter=name)
        assert output.outputs[0].token_ids == expected[name]
    assert list(engine.adapters.loaded) == ["c", "a"]
    # Its blocks have outlived it.
    assert answer(engine, prompt(64), greedy(1), adapter="b").num_cached_tokens == 48
    assert list(engine.adapters.loaded) == ["a", "b"]
    # Both are used now.
    for name in "ab":
        engine.add_request(name, prompt(9), greedy(4, ignore_eos=True), adapter=name)
    with pytest.raises(AdaptersInUseError, match="requests use all of the 2 adapters"):
        engine.add_request("c", prompt(9), adapter="c")
    assert run(engine).keys() == {"a", "b"}
    engine.add_request("c", prompt(9), greedy(4), adapter="c")
    assert run(engine).keys() == {"c"}
    # Under its name come its own files or none.
    (file := own["a"] / "adapters.safetensors").write_bytes((folders["c"] / file.name).read_bytes())
    with pytest.raises(AdapterError, match="the files of 'a' have changed since it was loaded"):
        engine.add_request("a", prompt(9), adapter="a")
    file.unlink()
    with pytest.raises(AdapterError, match="the adapter 'a' can't be loaded again") as error:
        engine.add_request("a", prompt(9), adapter="a")
    assert "adapters.safetensors of the adapter in " in str(error.value.__cause__)
    assert list(engine.adapters.loaded) == ["b", "c"] and not engine.reports.requests
    engine.unload_adapter("a")
    with pytest.raises(AdapterError, match="there is no adapter 'a'; there are 'b', 'c'"):
        engine.add_request("a", prompt(9), adapter="a")
    with pytest.raises(AdapterError, match="can't be read"):
        engine.load_adapter("a", own["a"])
    assert list(engine.adapters.known) == ["b", "c"]
    assert_nothing_held(engine)


def test_an_adapter_that_is_unloaded_while_it_is_loaded_again_is_gone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine(tiny_models()[0], adapters=folders, max_adapters=1)
    read, unloaded = engine.adapters.read, []

    def read_slowly(name: str, folder: Path, **options: Any) -> AdapterFiles:
        files = read(name, folder, **options)
        if not unloaded:
            unloaded.append(name)
            engine.unload_adapter(name)
        return files

    monkeypatch.setattr(engine.adapters, "read", read_slowly)
    with pytest.raises(AdapterError, match="there is no adapter 'b'"):
        engine.add_request("1", prompt(9), adapter="b")
    assert unloaded == ["b"] and not engine.reports.requests
    engine.add_request("2", prompt(9), greedy(1), adapter="c")
    assert run(engine).keys() == {"2"}
    assert_nothing_held(engine)


def test_an_adapter_that_is_replaced_while_it_is_loaded_again_is_the_new_one(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    ours, theirs = tiny_models()
    engine = make_engine(ours, adapters=folders, max_adapters=1)
    read, replaced = engine.adapters.read, []

    def read_slowly(name: str, folder: Path, **options: Any) -> AdapterFiles:
        files = read(name, folder, **options)
        if not replaced:
            replaced.append(name)
            engine.unload_adapter(name)
            engine.adapters.add(read(name, folders["c"]))
        return files

    monkeypatch.setattr(engine.adapters, "read", read_slowly)
    [tokens] = tokens_of(engine, {"1": (prompt(9), "b")}).values()
    assert replaced == ["b"]
    assert tokens == stock_tokens(with_adapter(theirs, folders["c"]), prompt(9), 10)


def test_a_request_whose_adapter_lost_its_place_meanwhile_gets_it_back(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    ours, theirs = tiny_models()
    engine = make_engine(ours, adapters=folders, max_adapters=1)
    check, lost = engine.scheduler.check, []

    def check_slowly(request: Any) -> None:
        if not lost:
            lost.append(request.adapter)
            engine.have_adapter("b")
        check(request)

    monkeypatch.setattr(engine.scheduler, "check", check_slowly)
    [tokens] = tokens_of(engine, {"1": (prompt(9), "a")}).values()
    assert tokens == stock_tokens(with_adapter(theirs, folders["a"]), prompt(9), 10)
    assert lost and lost[0] is not engine.adapters.loaded["a"]


async def answers_of(engine: AsyncEngine, names: Sequence[str | None]) -> list[list[int]]:
    async def one(name: str | None) -> list[int]:
        params = greedy(12, ignore_eos=True)
        outputs = [output async for output in engine.generate(prompt(9), params, adapter=name)]
        return outputs[-1].outputs[0].token_ids

    return await asyncio.gather(*map(one, names))


def test_requests_wait_for_room_for_their_adapter(folders: dict[str, Path]):
    ours, theirs = tiny_models()
    names = [None, *NAMES, *reversed(NAMES), None]
    with AsyncEngine(ours, kv_cache_bytes="100blocks", adapters=folders, max_adapters=1) as engine:
        answers = asyncio.run(answers_of(engine, names))

        async def leave() -> None:
            running = engine.generate(prompt(9), greedy(200, ignore_eos=True), adapter="a")
            await anext(running)
            waiting = asyncio.ensure_future(answers_of(engine, ["b"]))
            await asyncio.sleep(0.1)
            assert not waiting.done() and len(engine.engine.reports.requests) == 1
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await running.aclose()

        asyncio.run(leave())
        with pytest.raises(ValueError, match="adapter must be"):
            asyncio.run(answers_of(engine, [5]))  # type: ignore[list-item]
    assert_nothing_held(engine.engine)
    for name, tokens in zip(names, answers, strict=True):
        folder = None if name is None else folders[name]
        assert tokens == stock_tokens(with_adapter(theirs, folder), prompt(9), 12)


# What is refused


def broken(folder: Path, name: str) -> Path:
    model, config = tiny_models()[1], {"fine_tune_type": "lora", "lora_parameters": {"scale": 2.0}}
    a, b = f"{Q}.lora_a", f"{Q}.lora_b"
    good = {a: mx.ones((32, 2)), b: mx.ones((2, 64))}
    experts = {f"{Q}.lora_a": mx.ones((4, 2, 32)), f"{Q}.lora_b": mx.ones((4, 64, 2))}
    arrays, config = {
        "dora": (good, config | {"fine_tune_type": "dora"}),
        "its magnitudes": (good | {f"{Q}.m": mx.ones(64)}, config),
        "experts": (experts, config),
        "shape": (good | {a: mx.ones((33, 2))}, config),
        "ranks": (good | {b: mx.ones((3, 64))}, config),
        "half": ({a: good[a]}, config),
        "integers": (good | {b: mx.ones((2, 64), dtype=mx.int32)}, config),
        "rank": ({a: mx.ones((32, 17)), b: mx.ones((17, 64))}, config),
        "unknown": ({each.replace("q_proj", "x_proj"): good[each] for each in good}, config),
        "norm": ({each.replace("q_proj", "q_norm"): good[each] for each in good}, config),
        "scale": (good, {"lora_parameters": {"alpha": 2}}),
        "no config": (good, config),
        "no file": (good, config),
        "damaged": (good, config),
        "peft": (good, {"peft_type": "LORA", "lora_alpha": 2, "use_dora": True}),
        "ia3": (good, {"peft_type": "IA3"}),
        "large": (good | {b: mx.ones((2, 10**7))}, config),
    }[name]
    assert model is not None
    write_files(folder, arrays, config)
    file = folder / "adapters.safetensors"
    if name == "no config":
        (folder / "adapter_config.json").unlink()
    elif name == "no file":
        file.unlink()
    elif name == "damaged":
        file.write_bytes(file.read_bytes()[:100])
    return folder


def test_an_adapter_that_does_not_fit_is_one_clear_error_and_nothing_is_loaded(
    folders: dict[str, Path], tmp_path: Path
):
    engine = make_engine(tiny_models()[0], adapters={"a": folders["a"]}, max_adapters=2)
    before = tokens_of(engine, {"1": (prompt(9), "a"), "2": (prompt(9), None)})
    for name, says in {
        "dora": "its fine_tune_type is 'dora', and only lora is supported",
        "its magnitudes": "is not a matrix of LoRA; DoRA is not supported",
        "experts": r"has the shape \[4, .*\]; the layers of experts",
        "shape": "for 33 inputs and 64 outputs, and the model's layer has 32 and 64",
        "ranks": r"have the shapes \[32, 2\] and \[3, 64\]",
        "half": "has only one of its two matrices",
        "integers": "is of type mlx.core.int32",
        "rank": "has rank 17, and max_adapter_rank is 16; raise it",
        "unknown": "x_proj', which the model does not have",
        "norm": "q_norm', a RMSNorm; adapters can target linear layers and embeddings",
        "scale": "has no number as scale of its lora_parameters",
        "no config": "adapter_config.json of the adapter in .* can't be read: No such file",
        "no file": "adapters.safetensors of the adapter in .* can't be read: No such file",
        "damaged": "can't be used",
        "peft": "its use_dora is True, which is not supported",
        "ia3": "its peft_type is 'IA3'",
        "large": "has 80,000,.* bytes, and an adapter of this model has at most",
    }.items():
        folder = broken(tmp_path / name, name)
        with pytest.raises(AdapterError, match=says) as caught:
            engine.load_adapter("b", folder)
        assert "\n" not in str(caught.value)
    assert list(engine.adapters.loaded) == ["a"]
    assert tokens_of(engine, {"1": (prompt(9), "a"), "2": (prompt(9), None)}) == before


def test_a_layer_whose_weight_a_model_reads_is_refused_for_its_adapter_alone():
    layer = AdaptedLinear(nn.Linear(4, 4), 2, 1, mx.float32)
    assert layer.weight is layer["base"].weight
    with (
        running_adapters(AdapterRows(mx.array([1], dtype=mx.uint32))),
        pytest.raises(NotImplementedError, match="the model reads weight of a layer"),
    ):
        _ = layer.weight
    with (
        running_adapters(AdapterRows(mx.array([1, 0], dtype=mx.uint32))),
        pytest.raises(NotImplementedError, match="a layer gets 3 rows of a step of 2"),
    ):
        layer(mx.ones((3, 4)))


def test_settings_and_names_that_do_not_fit_are_refused(folders: dict[str, Path]):
    ours = tiny_models()[0]
    for options, says in (
        ({"adapters": folders, "max_adapters": 0}, "no room for 3 with max_adapters 0"),
        ({"adapters": ["a"]}, "adapters must be a dict of different names with a folder each"),
        ({"adapters": {"": "x"}}, "adapters must be a dict"),
        ({"max_adapter_rank": 0}, "max_adapter_rank must be a positive integer"),
        ({"adapters": folders, "max_adapter_rank": 4}, "has rank 5, and max_adapter_rank is 4"),
    ):
        with pytest.raises(ValueError, match=says):
            make_engine(ours, **options)
    engine = make_engine(ours)
    with pytest.raises(AdapterError, match="no room for adapters; give it max_adapters"):
        engine.load_adapter("a", folders["a"])
    for name, says in (("a", "there is no adapter 'a'"), (5, "adapter must be"), ("", "adapter")):
        with pytest.raises(ValueError, match=says):
            engine.add_request("1", prompt(3), adapter=name)  # type: ignore[arg-type]
    assert not engine.reports.requests
    split = _with_own_modules(ours)
    split.group = SimpleNamespace(size=lambda: 2)
    with pytest.raises(AdapterError, match="adapters can't be split over ranks"):
        Adapters(split, folders)


def test_llm_takes_an_adapter_for_each_prompt(folders: dict[str, Path]):
    ours, theirs = tiny_models()
    with LLM(ours, kv_cache_bytes="100blocks", adapters=folders) as llm:
        outputs = llm.generate([prompt(9)] * 2, greedy(5), adapter=["a", None])
        [of_all] = llm.generate([prompt(9)], greedy(5), adapter="a")
        with pytest.raises(ValueError, match="1 adapter for 2 prompts"):
            llm.generate([prompt(9)] * 2, adapter=["a"])
        llm.unload_adapter("a")
        llm.load_adapter("a", str(folders["a"]))
    of_each = zip([*outputs, of_all], (folders["a"], None, folders["a"]), strict=True)
    for output, folder in of_each:
        expected = stock_tokens(with_adapter(theirs, folder), prompt(9), 5)
        assert output.outputs[0].token_ids == expected
