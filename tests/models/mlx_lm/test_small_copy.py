"""Small models of the classes and with the switches of large ones."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from helpers.model_zoo import ARCHITECTURES, config_of, make
from helpers.model_zoo.published import FULL_SIZE
from mlx.nn import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from mlx_paged.errors import UnsuitableModelError
from mlx_paged.models.mlx_lm import adapt
from mlx_paged.models.mlx_lm.small_copy import ModelCut, small_config, small_copy
from mlx_paged.models.mlx_lm.trial import tried

# Of those whose layers are of more than one kind, or share K/V.
NUM_LAYERS = {
    "Command-R7B": 4,
    "DeepSeek-V3": 4,
    "DeepSeek-V3.2": 4,
    "gemma-3-27b": 6,
    "gemma-3-4b": 6,
    "gemma-3n-E2B": 10,
    "granite-4.0-h-small": 10,
    "jamba-large": 5,
    "Kimi-Linear-48B-A3B": 4,
    "LFM2-8B-A1B": 4,
    "Llama-4-Scout": 4,
    "Nemotron-H-8B": 8,
    "plamo-3-31b": 8,
    "Qwen3-Next-80B-A3B": 4,
}
# Windows, latents, recurrent layers and experts.
IN_THE_FAST_LANE = {"DeepSeek-V3", "gemma-3-4b", "gpt-oss-20b", "Qwen3-Next-80B-A3B"}
# It masks tokens by their ids.
KEEPS_ITS_VOCABULARY = {"Phi-3-small-8k": 100352}


def kinds_of(model: Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


def whole(config: dict[str, Any]) -> dict[str, Any]:
    return config | config.get("text_config", {})


def published(name: str) -> tuple[Module, dict[str, Any]]:
    """Without its weights, which nothing evaluates."""
    config = FULL_SIZE[name]
    model_class, args_class = _get_classes(config)
    return model_class(args_class.from_dict(config)), config


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_THE_FAST_LANE else pytest.mark.slow)
        for name in FULL_SIZE
    ],
)
def test_a_published_model_has_a_small_copy_with_its_kinds_of_modules_that_runs_as_the_table_says(
    name: str,
):
    model, config = published(name)
    copy, small = small_copy(model, config)
    caches, of_copy = ({type(c) for c in make_prompt_cache(each)} for each in (model, copy))
    assert of_copy == caches and kinds_of(copy) == kinds_of(model)
    weights = [weight for _, weight in tree_flatten(copy.parameters())]
    assert sum(weight.size for weight in weights) < 2**24
    assert {weight.dtype for weight in weights} == {mx.float32}
    assert len(copy.layers) == NUM_LAYERS.get(name, 2)
    assert small["vocab_size"] == KEEPS_ITS_VOCABULARY.get(name, 512)
    windows = {cache.max_size for cache in make_prompt_cache(copy) if hasattr(cache, "max_size")}
    assert windows <= {8}
    scaling = whole(small).get("rope_scaling") or {}
    assert scaling.get("original_max_position_embeddings", 16) == 16
    try:
        found = tried(copy, small).description
    except UnsuitableModelError:
        assert type(model).__module__.endswith((".phi3small", ".plamo3"))
        with pytest.raises(UnsuitableModelError):
            adapt(copy, small)
    else:
        assert adapt(copy, small).description == found


def test_what_is_small_already_stays_as_it_is():
    assert small_copy(make("llama"), config_of("llama")) is None
    changed = []
    for architecture in ARCHITECTURES:
        config = config_of(architecture)
        if small_config(config, ModelCut(99, 99)) != config:
            changed.append(architecture)
    # An original context or a window of many tokens, a vocabulary, a width, and heads.
    assert changed == [
        "deepseek_v2",
        "minicpm3",
        "phi3small",
        "plamo2",
        "prism_hadamard_qwen35",
        "step3p5",
    ]
    for architecture in ("gemma3n", "kimi_k25"):
        assert small_copy(make(architecture), config_of(architecture)) is None


def test_a_small_model_in_half_precision_has_a_copy_in_float32():
    config = config_of("gemma3_text")
    model = make("gemma3_text")
    model.set_dtype(mx.bfloat16)
    copy, small = small_copy(model, config)
    assert small == config
    assert {weight.dtype for _, weight in tree_flatten(copy.parameters())} == {mx.float32}


def test_the_same_model_has_the_same_copy_each_time():
    model, config = published("gpt-oss-20b")
    (one, _), (other, _) = small_copy(model, config), small_copy(model, config)
    weights = dict(tree_flatten(other.parameters()))
    for name, weight in tree_flatten(one.parameters()):
        assert mx.array_equal(weight, weights[name])


def test_a_configuration_that_its_class_does_not_know_has_no_copy():
    assert small_copy(make("llama"), {"model_type": "llama"}) is None
