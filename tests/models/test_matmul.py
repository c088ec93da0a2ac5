"""``rows_matmul`` under models: the same answers, the same number of matmuls, classes that come and
go with engines, and K/V that are not mixed with those of MLX's matmul.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers.engine_runs import CONFIG, greedy, livelier_model, make_engine, prompt, run
from helpers.mlx_lm_models import DEEPSEEK_V3, LLAMA, QWEN3_MOE, random_model
from helpers.model_zoo.configs import config_of
from helpers.workloads import Workload, assert_same
from mlx.nn.layers.base import Module
from mlx_lm.tuner.lora import LoRALinear
from paged_testing.pure_metal import pure_metal

from mlx_paged.engine import compiled_decode
from mlx_paged.engine.engine import Engine
from mlx_paged.errors import ArgumentError
from mlx_paged.models import matmul
from mlx_paged.models.identity import model_identity
from mlx_paged.models.matmul import Linears, Matmul, in_words
from mlx_paged.models.mlx_lm import check_model

MODES = {
    "affine 4": ("affine", 4, 64),
    "affine 8": ("affine", 8, 64),
    "mxfp4": ("mxfp4", 4, 32),
    "nvfp4": ("nvfp4", 4, 16),
    "mxfp8": ("mxfp8", 8, 32),
    "dense": None,
}
HYBRID = config_of("qwen3_next") | {"vocab_size": 256}
PROMPTS = [prompt(length, seed=length) for length in (5, 9, 12)]


def zoo_model(name: str, mode: str) -> Module:
    """A small model in float32, so that nothing but the order of sums differs."""
    config = {"MoE": QWEN3_MOE, "hybrid": HYBRID}.get(name, LLAMA)
    model = random_model(config)
    if (quantisation := MODES[mode]) is not None:
        kind, bits, group_size = quantisation

        def is_quantised(path: str, module: Module) -> bool:
            fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0
            return fits and not path.endswith("mlp.gate")

        nn.quantize(model, group_size, bits, mode=kind, class_predicate=is_quantised)
    if name == "adapter":
        for layer in model.layers:
            lora = LoRALinear.from_base(layer.self_attn.q_proj, r=4)
            lora.lora_b = mx.random.normal(lora.lora_b.shape) * 0.2
            layer.self_attn.q_proj = lora
    mx.eval(model)
    return model


@contextmanager
def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How many matmuls run: MLX's quantised ones, and those of ``rows_matmul``."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(*args: Any, **kwargs: Any) -> mx.array:
            calls["dense" if kwargs["mode"] == "dense" else name] += 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(mx, "quantized_matmul", counting("mlx", mx.quantized_matmul))
        patch.setattr(matmul, "rows_matmul", counting("rows", matmul.rows_matmul))
        yield calls


def answers(model: Module, option: str) -> tuple[list[list[int]], np.ndarray]:
    """Greedy answers to all prompts together, and the rows of logits that they are from."""
    engine = make_engine(model, matmul=option, enable_prefix_caching=False)
    rows: dict[tuple[str, int], np.ndarray] = {}

    def read(completion: Any, number: int, logits: mx.array) -> None:
        rows[completion.request.request_id, number] = np.array(logits.astype(mx.float32))

    engine.read_rows(read)
    for index, token_ids in enumerate(PROMPTS):
        engine.add_request(str(index), token_ids, greedy(5))
    outputs = run(engine)
    engine.close()
    tokens = [outputs[str(index)].outputs[0].token_ids for index in range(len(PROMPTS))]
    return tokens, np.stack([rows[key] for key in sorted(rows)])


ZOO = [
    *(("dense model", mode) for mode in MODES),
    *(("MoE", mode) for mode in ("affine 4", "nvfp4", "dense")),
    *(("hybrid", mode) for mode in ("affine 8", "mxfp4", "dense")),
    *(("adapter", mode) for mode in ("affine 4", "mxfp8", "dense")),
]


@pytest.mark.parametrize(("name", "mode"), ZOO)
def test_answers_are_those_of_mlxs_matmul(name: str, mode: str, monkeypatch: pytest.MonkeyPatch):
    """Logits differ by float32's rounding of some hundred sums, which is below 1e-4 of them."""
    model = zoo_model(name, mode)
    check_model(model)  # gives the last norm its class
    classes = [(module, type(module)) for module in model.modules()]
    results, calls = [], []
    for option in ("mlx", "rows"):
        with counted_calls(monkeypatch) as counts:
            results.append(answers(model, option))
        calls.append(counts)
        assert all(type(module) is kind for module, kind in classes)
    (tokens, logits), (by_rows, logits_by_rows) = results
    assert by_rows == tokens
    assert np.abs(logits_by_rows - logits).max() <= 1e-4 * np.abs(logits).max()
    assert calls[0].keys() <= {"mlx"}
    assert calls[1]["dense" if mode == "dense" else "rows"] > 0
    if mode != "dense":
        # One for one: no layer has more launches than before.
        assert calls[0]["mlx"] == calls[1]["mlx"] + calls[1]["rows"]


@pytest.fixture
def model() -> Module:
    model = livelier_model(CONFIG | {"tie_word_embeddings": True, "head_dim": 32})
    nn.quantize(model, group_size=32, bits=4)
    mx.eval(model)
    return model


def is_swapped(model: Module) -> bool:
    kinds = {"multiplies_by_rows" in vars(type(each)) for each in model.modules()}
    return kinds == {True, False}


def test_classes_are_swapped_while_an_engine_uses_them(model: Module):
    before = model_identity(model).digest
    with_mlx = make_engine(model, matmul="mlx")
    assert not is_swapped(model)
    first, second = (make_engine(model, matmul="rows") for _ in range(2))
    embedding = model.model.embed_tokens
    assert is_swapped(model) and type(embedding) is not nn.QuantizedEmbedding
    assert isinstance(embedding, nn.QuantizedEmbedding)
    assert model_identity(model).digest == before
    first.close()
    first.close()
    assert is_swapped(model), "the second engine uses them"
    del second
    gc.collect()
    assert not is_swapped(model) and type(embedding) is nn.QuantizedEmbedding
    assert with_mlx.stats().matmul.name == "mlx"


def test_engines_of_one_model_multiply_each_in_their_way(
    model: Module, monkeypatch: pytest.MonkeyPatch
):
    engines = [make_engine(model, matmul=option) for option in ("rows", "mlx")]
    counts = []
    for engine in engines:
        with counted_calls(monkeypatch) as calls:
            for index in range(2):
                engine.add_request(str(index), PROMPTS[index], greedy(3))
            run(engine)
        counts.append(calls["rows"])
    assert counts[0] > 0 and counts[1] == 0
    with counted_calls(monkeypatch) as calls:
        mx.eval(model.model.embed_tokens.as_linear(mx.ones((2, 32))))
    assert calls == {"mlx": 1}, "outside of the engine's steps"


def rows_that_multiply(engine: Engine, monkeypatch: pytest.MonkeyPatch, num_requests: int) -> set:
    seen = set()
    real = matmul.rows_matmul

    def watched(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        seen.add(x.size // x.shape[-1])
        return real(x, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(matmul, "rows_matmul", watched)
        for index in range(num_requests):
            engine.add_request(str(index), [1 + index] * 20, greedy(3))
        run(engine)
    return seen


def test_one_row_and_more_than_16_stay_with_mlx(model: Module, monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(model, matmul="rows", enable_prefix_caching=False)
    assert rows_that_multiply(engine, monkeypatch, 1) == set()
    assert rows_that_multiply(engine, monkeypatch, 3) == {3}, "prompts have 60 rows"


def test_requests_of_every_kind_get_the_same_answers(model: Module):
    """Drafts, forks, preemptions and aborts included."""
    workload = Workload(3, 4, CONFIG["vocab_size"])
    by_mlx, by_rows = (workload.run(model, None, matmul=option) for option in ("mlx", "rows"))
    for name, output in by_mlx.outputs.items():
        assert_same(by_rows.outputs[name], output)


def test_replayed_decodes_multiply_by_rows(model: Module, monkeypatch: pytest.MonkeyPatch):
    """Kernels are functions of MLX operations here, so that ``mx.compile`` can trace them."""
    monkeypatch.setattr(compiled_decode, "NUM_BUILT_FIRST", 1)
    replays = []
    replay = compiled_decode.CompiledDecode.replay

    def watched(self: compiled_decode.CompiledDecode, tokens: mx.array) -> mx.array | None:
        replays.append(replay(self, tokens))
        return replays[-1]

    monkeypatch.setattr(compiled_decode.CompiledDecode, "replay", watched)
    tokens = []
    with pure_metal():
        for option in ("mlx", "rows"):
            engine = make_engine(model, matmul=option)
            for index in range(2):
                engine.add_request(str(index), PROMPTS[index], greedy(6))
            with counted_calls(monkeypatch) as calls:
                outputs = run(engine)
            tokens.append([outputs[str(index)].outputs[0].token_ids for index in range(2)])
            assert any(logits is not None for logits in replays)
            # Five decodes: one is built, one traced and checked, and three are replayed.
            assert (calls["rows"] > 0) == (option == "rows")
            replays.clear()
    assert tokens[0] == tokens[1]


def test_what_stays_with_mlx_is_said():
    moe, latents = (check_model(random_model(each)) for each in (QWEN3_MOE, DEEPSEEK_V3))
    assert Linears.of([moe]).kept == {"experts": 3 * QWEN3_MOE["num_hidden_layers"]}
    assert Linears.of([latents]).kept["a matrix for each head"] == 6
    linears = Linears.of([moe, latents, moe])
    found = Matmul(linears, dict.fromkeys(linears.shapes, (2, 3, 4, 8))).stats()
    assert found.name == "rows" and list(found.num_modules) == ["2 to 4, 8"]
    assert sum(found.num_modules.values()) == len(linears.modules)
    assert str(found) == (
        "matmul: rows for 2 to 4, 8 rows, in 43 layers; MLX in 18 (experts), 6 (a matrix for each "
        "head)"
    )
    assert str(Matmul(linears).stats()) == "matmul: MLX's"
    assert in_words(()) == "none"


def test_a_weight_that_rows_matmul_refuses_is_said():
    model = check_model(random_model(LLAMA | {"intermediate_size": 60}))
    (reason,) = Linears.of([model]).kept
    assert reason == "rows have 60 elements; a multiple of 8 is needed"


def test_blocks_of_another_matmul_are_a_miss(model: Module, tmp_path: Path):
    token_ids, num_cached = prompt(40), []
    for option in ("mlx", "rows", "auto", "rows"):
        options = {"block_size": 8, "kv_cache_bytes": "16blocks", "cache_dir": tmp_path}
        engine = make_engine(model, matmul=option, **options)
        engine.add_request("a", token_ids, greedy(2))
        num_cached.append(run(engine)["a"].num_cached_tokens)
        engine.close()
    assert num_cached == [0, 0, 32, 32], "on a CPU, auto is MLX"


def test_snapshots_of_another_matmul_are_foreign(model: Module, tmp_path: Path):
    path, token_ids = tmp_path / "a.safetensors", prompt(40)
    engines = [make_engine(model, matmul=option, block_size=8) for option in ("rows", "mlx")]
    engines[0].add_request("a", token_ids, greedy(1))
    run(engines[0])
    engines[0].save_snapshot(path, token_ids)
    foreign = [each.snapshots.open(path, None).is_foreign for each in engines]
    assert foreign == [False, True]


def test_an_unknown_matmul_is_refused(model: Module):
    with pytest.raises(ArgumentError, match="matmul must be"):
        make_engine(model, matmul="fast")
