"""mlx-lm's models, unmodified, on packed input."""

from __future__ import annotations

import copy
import gc
import importlib.util
import inspect
import sys

import mlx.core as mx
import pytest
from helpers.fast_lane import mostly_slow
from helpers.mlx_lm_models import (
    DEEPSEEK_V3,
    GEMMA3,
    GEMMA3N,
    GPT_OSS,
    LLAMA,
    random_model,
    stock_tokens,
)
from helpers.model_zoo import config_of, make

from mlx_paged import Engine, SamplingParams
from mlx_paged.cache import group_layers
from mlx_paged.errors import UnsuitableModelError
from mlx_paged.models.mlx_lm import adapt
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.mlx_lm.trial import Trial

PROMPTS = [[5, 9, 200, 17, 33, 4, 90], list(range(40, 75)), [7, 3, 3, 8] * 6]
CONFIGS = {c["model_type"]: c for c in (LLAMA, GEMMA3, GEMMA3N, GPT_OSS, DEEPSEEK_V3)}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def answers_of(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY):
    """The tokens of each prompt's completions."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    answers = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[int(output.request_id)] = [list(each.token_ids) for each in output.outputs]
    return [answers[index] for index in range(len(prompts))]


# gemma3n has windows, as the two that are slow.
@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in ("gemma3_text", "gpt_oss") else ())
        for name in CONFIGS
    ]
)
def model_and_config(request):
    config = CONFIGS[request.param]
    return random_model(config), config


@pytest.mark.parametrize("kv", ["paged", pytest.param("basic", marks=pytest.mark.slow)])
def test_answers_are_those_of_mlx_lm(model_and_config, kv):
    model, config = model_and_config
    expected = [[stock_tokens(model, prompt, 12)] for prompt in PROMPTS]
    engine = Engine(
        adapt(model, config), kv=kv, block_size=8, max_num_seqs=4, max_num_batched_tokens=16
    )
    assert answers_of(engine, PROMPTS) == expected
    # The second time their beginnings are cached.
    assert answers_of(engine, PROMPTS) == expected
    assert engine.stats().num_cached_prompt_tokens > 0


@mostly_slow("model_and_config", CONFIGS, indirect=True)
@pytest.mark.parametrize(
    "swap_bytes",
    [pytest.param(0, id="recompute", marks=pytest.mark.slow), pytest.param("40blocks", id="swap")],
)
def test_a_preempted_request_goes_on_with_the_same_tokens(model_and_config, swap_bytes):
    model, config = model_and_config
    prompts = [[seed, 2 * seed, 90, seed] for seed in range(1, 5)]
    expected = [[stock_tokens(model, prompt, 30)] for prompt in prompts]
    num_blocks = 8 * len(group_layers(adapt(model, config).layer_specs, 8))
    budget = f"{num_blocks}blocks"
    engine = Engine(
        adapt(model, config), block_size=8, kv_cache_bytes=budget, swap_bytes=swap_bytes
    )
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    assert answers_of(engine, prompts, params) == expected
    assert engine.stats().num_preemptions > 0


def test_weights_and_stock_logits_are_untouched():
    model = random_model(LLAMA)
    before = model(mx.array([[1, 2, 3]]))
    adapt(model, LLAMA)
    assert mx.array_equal(model(mx.array([[1, 2, 3]])), before)


# The functions of mlx-lm's modules, which are replaced while a model runs packed


@pytest.fixture
def llama_module(monkeypatch):
    """A module of mlx-lm's that no other test has used."""
    name = "mlx_lm.models.llama_of_this_test"
    stock = importlib.util.find_spec("mlx_lm.models.llama")
    spec = importlib.util.spec_from_file_location(name, stock.origin)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    # Models of other tests may be alive.
    stock = inspect.unwrap(module.scaled_dot_product_attention)
    module.scaled_dot_product_attention = stock
    return module


def llama_of(module):
    model = module.Model(module.ModelArgs.from_dict(LLAMA))
    mx.eval(model.parameters())
    return model


def answer(model) -> list[int]:
    """The tokens of a packed model."""
    return answers_of(Engine(model, None, kv_cache_bytes="100blocks"), PROMPTS[:1])[0][0]


def test_the_functions_of_mlx_lm_stay_replaced_while_another_model_needs_them(llama_module):
    stock = llama_module.scaled_dot_product_attention
    one, other = llama_of(llama_module), llama_of(llama_module)
    expected = stock_tokens(other, PROMPTS[0], 12)
    first, second = adapt(one, LLAMA), adapt(other, LLAMA)
    assert llama_module.scaled_dot_product_attention is not stock
    # mlx-lm's own caches get its own attention meanwhile.
    assert stock_tokens(other, PROMPTS[0], 12) == expected
    del first
    gc.collect()
    assert answer(second) == expected
    del second
    gc.collect()
    assert llama_module.scaled_dot_product_attention is stock


def test_the_functions_of_mlx_lm_stay_replaced_while_a_copy_of_a_model_needs_them(llama_module):
    stock = llama_module.scaled_dot_product_attention
    packed = adapt(llama_of(llama_module), LLAMA)
    held = copy.deepcopy(packed._recording.attention)  # as a copy of the model would
    del packed
    gc.collect()
    assert llama_module.scaled_dot_product_attention is not stock
    del held
    gc.collect()
    assert llama_module.scaled_dot_product_attention is stock


def test_a_model_that_can_not_run_packed_is_left_alone(llama_module):
    stock, model = llama_module.scaled_dot_product_attention, make("stablelm")
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(UnsuitableModelError, match="it computes attention in its own way"):
        Trial(model, config_of("stablelm")).run(PackedModel)
    gc.collect()
    assert [type(module) for module in model.modules()] == kinds
    assert llama_module.scaled_dot_product_attention is stock


def test_what_others_put_in_the_place_of_a_function_of_mlx_lm_stays_there(llama_module):
    stock = llama_module.scaled_dot_product_attention
    packed = adapt(llama_of(llama_module), LLAMA)
    llama_module.scaled_dot_product_attention = theirs = lambda *args, **kwargs: stock(
        *args, **kwargs
    )
    del packed
    gc.collect()
    assert llama_module.scaled_dot_product_attention is theirs
    # It is replaced again where a model needs it, and put back.
    model = llama_of(llama_module)
    expected = stock_tokens(model, PROMPTS[0], 12)
    packed = adapt(model, LLAMA)
    assert answer(packed) == expected
    del packed
    gc.collect()
    assert llama_module.scaled_dot_product_attention is theirs
