"""mlx-lm's models, unmodified, on packed input."""

from __future__ import annotations

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

from mlx_paged import Engine, SamplingParams
from mlx_paged.cache import group_layers
from mlx_paged.models.mlx_lm import adapt

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


@mostly_slow("model_and_config", CONFIGS, indirect=True)
def test_kv_of_8_bits_stay_near(model_and_config):
    model, config = model_and_config
    adapted = adapt(model, config)
    plain, quantised = (Engine(adapted, block_size=8, kv_format=bits) for bits in (None, 8))
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=5)
    assert answers_of(quantised, PROMPTS, params) == answers_of(plain, PROMPTS, params)


def test_weights_and_stock_logits_are_untouched():
    model = random_model(LLAMA)
    before = model(mx.array([[1, 2, 3]]))
    adapt(model, LLAMA)
    assert mx.array_equal(model(mx.array([[1, 2, 3]])), before)
