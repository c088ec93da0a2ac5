"""How a model of mlx-lm runs: what the table says, and which unknown models the trial accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from helpers.fast_lane import mostly_slow
from helpers.mlx_lm_models import (
    LLAMA,
    QUANTISATIONS,
    QWEN3_MOE,
    quantised_model,
    random_model,
)
from helpers.model_zoo import config_of, make_from_config
from mlx.nn import Module
from mlx.utils import tree_flatten, tree_map

from mlx_paged import Sequences, make_kv_cache, run_step
from mlx_paged.cache.paged import PagedLayerKV
from mlx_paged.core.sequence_states import SequenceState, SequenceStates
from mlx_paged.errors import FailedCheckError, UnsuitableModelError
from mlx_paged.models.mlx_lm import adapt, trial
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.mlx_lm.per_sequence import PerSequenceModel
from mlx_paged.models.mlx_lm.trial import Trial

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def made(architecture: str, dtype: mx.Dtype = mx.float32, **changes: Any) -> tuple[Module, dict]:
    """A tiny random model, and its configuration."""
    config = config_of(architecture) | changes
    model = make_from_config(config)
    model.update(tree_map(lambda w: w.astype(dtype), model.parameters()))
    mx.eval(model.parameters())
    return model, config


@pytest.fixture(autouse=True)
def no_table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All models are unknown, as with another version of mlx-lm, but for tests of the table."""
    if "table" not in request.node.name:
        monkeypatch.setattr(trial, "MLX_LM_VERSIONS", ("0.0.1",))


# What the table says


def test_a_model_in_the_table_is_not_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "Trial", None)
    assert isinstance(adapt(*made("llama")), PackedModel)
    assert isinstance(adapt(*made("afm7")), PerSequenceModel)


@pytest.mark.parametrize("change", ["another version", "another class", "not in the table"])
def test_a_model_that_the_table_does_not_know_is_tried(
    change: str, monkeypatch: pytest.MonkeyPatch
):
    model, config = made("afm7")
    if change == "another version":
        monkeypatch.setattr(mlx_lm, "__version__", "0.32.3")
    elif change == "another class":
        # As a folder with its own model_file has.
        monkeypatch.setattr(type(model), "__module__", "custom_model")
    else:
        monkeypatch.setitem(trial.ARCHITECTURES, "per sequence", "plamo")
    assert isinstance(adapt(model, config), PerSequenceModel)
    monkeypatch.setattr(Trial, "run", lambda self, kind: kind)
    assert adapt(model, config) is PackedModel


def test_a_configuration_that_needs_another_way_than_the_table_says_is_tried():
    """With dynamic scaling of RoPE, DeepSeek V3 converts the offset to a number."""
    scaling = {"type": "dynamic", "factor": 2.0}
    assert isinstance(adapt(*made("deepseek_v3")), PackedModel)
    assert isinstance(adapt(*made("deepseek_v3", rope_scaling=scaling)), PerSequenceModel)


# Which ones are turned away


@pytest.mark.parametrize("window", [8, 128, 2048])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_window_that_is_longer_in_a_prompt_is_found_whatever_its_length_and_the_dtype(
    window: int, dtype: mx.Dtype
):
    """plamo3 prefills with one token more than its cache keeps."""
    with pytest.raises(UnsuitableModelError, match=r"differ by .* where a prompt is cut elsewhere"):
        adapt(*made("plamo3", dtype, sliding_window=window))


@mostly_slow("dtype", DTYPES[1:], ids=str)
def test_a_mask_that_depends_on_the_cut_is_found_in_half_precision(dtype: mx.Dtype):
    with pytest.raises(
        UnsuitableModelError, match=r"small copy .* where a prompt is cut elsewhere"
    ):
        adapt(*made("phi3small", dtype))


@mostly_slow("dtype", DTYPES, ids=str, quick=(2,))
def test_a_step_that_reads_the_state_before_the_last_one_is_found(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
):
    """Of a model that forgets slowly, whose greedy tokens may be the same all the while."""

    def put(states: SequenceStates, newest: Mapping[Any, SequenceState]) -> None:
        for seq, state in newest.items():
            before = states._states.get(seq, state)
            states._states[seq] = SequenceState(state.num_tokens, before.content)

    monkeypatch.setattr(SequenceStates, "put", put)
    with pytest.raises(UnsuitableModelError, match="its logits of tokens that come one by one"):
        adapt(*made("rwkv7", dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fault_that_begins_beyond_a_window_is_found(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
):
    """Of 4,096 tokens, more than a model is tried with."""
    fetch = PagedLayerKV.update_and_fetch

    def first_twice(self: Any, run: Any, k: mx.array, v: mx.array, num_before: int | None) -> Any:
        k, v = fetch(self, run, k, v, num_before)
        is_full = num_before is not None and k.shape[1] > num_before
        return (mx.concatenate([k[:, 1:2], k[:, 1:]], axis=1) if is_full else k), v

    model, config = made("gemma3_text", dtype, sliding_window=4096)
    Trial(model, config).run(PerSequenceModel)
    monkeypatch.setattr(PagedLayerKV, "update_and_fetch", first_twice)
    with pytest.raises(UnsuitableModelError, match="in a small copy of the model, its logits of"):
        Trial(model, config).run(PerSequenceModel)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_positions_from_the_shape_of_k_are_found_in_the_model_itself(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trial, "small_copy", lambda *_: None)
    assert isinstance(adapt(*made("afm7", dtype)), PerSequenceModel)


@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE], ids=["dense", "experts"])
def test_keys_of_the_wrong_tokens_are_found_in_quantised_weights(
    config: dict, monkeypatch: pytest.MonkeyPatch
):
    fetch = PagedLayerKV.update_and_fetch

    def first_twice(self: Any, run: Any, k: mx.array, v: mx.array, num_before: int | None) -> Any:
        k, v = fetch(self, run, k, v, num_before)
        return mx.concatenate([k[:, 1:2], k[:, 1:]], axis=1), v

    monkeypatch.setattr(trial, "small_copy", lambda *_: None)
    monkeypatch.setattr(PagedLayerKV, "update_and_fetch", first_twice)
    with pytest.raises(UnsuitableModelError, match="its logits of its first tokens differ"):
        Trial(quantised_model(config, ("mxfp4", 4, 32)), config).run(PerSequenceModel)


def test_a_model_that_raises_on_our_caches_is_refused_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
):
    def broken(*_: Any) -> None:
        raise TypeError("no such mask")

    monkeypatch.setattr(PagedLayerKV, "update_and_fetch", broken)
    with pytest.raises(
        UnsuitableModelError, match=r"per sequence, it can't run .*TypeError: no such mask"
    ):
        adapt(*made("gpt_bigcode"))


# Which ones are not


def test_latents_in_bfloat16_run_packed_however_many_layers_round():
    """Of 32 layers, mlx-lm's own logits are 0.07 from those of float32; ours as much."""
    model, config = made("deepseek_v3", mx.bfloat16, num_hidden_layers=32, first_k_dense_replace=32)
    assert isinstance(adapt(model, config), PackedModel)


@mostly_slow("seed", range(2), quick=(1,))
@mostly_slow("quantisation", QUANTISATIONS, ids=str, quick=(5, 6))
@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("has_copy", [True, False])
def test_quantised_weights_in_bfloat16_run_packed(
    config: dict,
    quantisation: tuple[str, int, int],
    seed: int,
    has_copy: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    """Rounding to bfloat16 sends tokens to other experts than float32 does, so that mlx-lm's own
    logits are far from those of float32; ours are mlx-lm's.
    """
    if not has_copy:
        monkeypatch.setattr(trial, "small_copy", lambda *_: None)
    assert isinstance(adapt(quantised_model(config, quantisation, seed), config), PackedModel)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "minicpm3", "mamba2"])
def test_half_precision_runs_as_float32_does(architecture: str, dtype: mx.Dtype):
    adapted = adapt(*made(architecture, dtype))
    assert adapted.description == adapt(*made(architecture)).description
    assert adapted.dtype == dtype


def test_a_model_without_a_small_copy_is_tried_by_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "small_copy", lambda *_: None)
    assert isinstance(adapt(*made("llama", mx.bfloat16)), PackedModel)
    with pytest.raises(UnsuitableModelError, match="where a prompt is cut elsewhere"):
        adapt(*made("plamo3", sliding_window=8))


# The way out


@pytest.mark.parametrize(
    ("architecture", "kind"), [("plamo3", PerSequenceModel), ("afm7", PerSequenceModel)]
)
@pytest.mark.parametrize("has_copy", [True, False])
def test_without_the_check_a_model_runs_in_the_way_that_computes_the_least_itself(
    architecture: str, kind: type, has_copy: bool, monkeypatch: pytest.MonkeyPatch
):
    """plamo3 fails in both ways; afm7 would be wrong if it ran packed."""
    if not has_copy:
        monkeypatch.setattr(trial, "small_copy", lambda *_: None)
    model, config = made(architecture)
    adapted = adapt(model, config, skip_check=True)
    assert isinstance(adapted, kind)
    prompt = [5, 9, 2, 7]
    logits = run_step(adapted, Sequences(make_kv_cache(adapted)), {"a": prompt})[0]
    assert mx.allclose(logits, model(mx.array([prompt]))[0, -1], rtol=1e-4, atol=1e-4)


def test_a_model_that_can_run_in_no_way_is_refused_without_the_check_too():
    model, config = made("deepseek_v41")
    with pytest.raises(UnsuitableModelError) as refused:
        adapt(model, config, skip_check=True)
    assert not isinstance(refused.value, FailedCheckError)


# What it takes


def test_the_check_leaves_weights_random_numbers_and_logits_as_they_were():
    model, config = made("llama", mx.bfloat16, sliding_window=2048)
    tokens = mx.array([[1, 2, 3]])
    before, weights = model(tokens), dict(tree_flatten(model.parameters()))
    mx.random.seed(3)
    expected = mx.random.normal((3,))
    mx.random.seed(3)
    adapt(model, config)
    assert mx.array_equal(mx.random.normal((3,)), expected)
    assert mx.array_equal(model(tokens), before)
    after = dict(tree_flatten(model.parameters()))
    assert all(after[name] is weight for name, weight in weights.items())


@pytest.mark.parametrize(
    ("window", "expected"), [(None, 40), (8, 40), (128, 144), (496, 512), (497, 40)]
)
def test_a_model_is_tried_beyond_its_own_windows(window: int | None, expected: int):
    config = LLAMA | {
        "sliding_window": window,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    config = LLAMA if window is None else config
    adapted = PackedModel(random_model(config), config)
    assert trial.lengths_for(adapted) == (expected, 7)


def test_a_model_is_tried_within_its_context():
    config = LLAMA | {"max_position_embeddings": 16}
    assert trial.lengths_for(PackedModel(random_model(config), config)) == (13, 7)
