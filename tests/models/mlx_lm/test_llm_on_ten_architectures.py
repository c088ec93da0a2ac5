"""``LLM`` on ten architectures of mlx-lm: its tokens, K/V in 8 bits, and windows with sinks."""

from __future__ import annotations

from functools import cache

import pytest
from helpers.mlx_lm_models import stock_tokens
from helpers.model_zoo.configs import config_of
from helpers.model_zoo.models import make_from_config

from mlx_paged import LLM, SamplingParams
from mlx_paged.cache import group_layers
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import adapt

ARCHITECTURES = [
    "cohere2",
    "gemma3_text",
    "glm4",
    "gpt_oss",
    "granite",
    "llama",
    "mixtral",
    "olmo2",
    "qwen2",
    "qwen3_moe",
]
# Heads wide enough for groups of 32 numbers that share a scale.
SIZES = {"hidden_size": 128, "head_dim": 32}
PROMPTS = [[5, 9, 200, 17, 33, 4, 90], [*range(40, 75)], [7, 3, 30, 8] * 6]


def greedy(max_tokens: int, **others) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **others)


@cache
def model_of(architecture: str) -> tuple[LanguageModel, list[list[int]]]:
    """A tiny random model, and mlx-lm's own answers to the prompts."""
    config = {**config_of(architecture), **SIZES}
    model = make_from_config(config)
    expected = [stock_tokens(model, prompt, 10) for prompt in PROMPTS]
    return adapt(model, config), expected


IN_THE_FAST_LANE = {"cohere2", "gemma3_text", "mixtral", "qwen2"}


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in IN_THE_FAST_LANE else pytest.mark.slow)
        for name in ARCHITECTURES
    ]
)
def model_and_expected(request: pytest.FixtureRequest) -> tuple[LanguageModel, list[list[int]]]:
    return model_of(request.param)


def test_tokens_are_those_of_mlx_lm(model_and_expected):
    model, expected = model_and_expected
    llm = LLM(model, kv_cache_bytes="100blocks")
    outputs = llm.generate(PROMPTS, greedy(10))
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_kv_of_8_bits_change_log_probabilities_a_little(model_and_expected):
    model, _ = model_and_expected
    likely = []
    for kv_format in (None, 8):
        llm = LLM(model, kv_cache_bytes="100blocks", kv_format=kv_format)
        (output,) = llm.generate([PROMPTS[1]], greedy(1, prompt_logprobs=0))
        chosen = zip(output.prompt_logprobs[1:], PROMPTS[1][1:], strict=True)
        likely.append([entries[token].logprob for entries, token in chosen])
    differences = [abs(one - other) for one, other in zip(*likely, strict=True)]
    assert max(differences) > 0
    # Rounding may send a token of a mixture to other experts.
    assert sorted(differences)[len(differences) // 2] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != "cohere2"])
def test_a_window_bounds_what_is_held(architecture):
    model, _ = model_of(architecture)
    # All tokens together would need 13 blocks for each group of layers.
    budget = f"{10 * len(group_layers(model.layer_specs, 8))}blocks"
    llm = LLM(model, kv_cache_bytes=budget, block_size=8, window=16, num_sink_tokens=4)
    (streamed,) = llm.generate([PROMPTS[0]], greedy(90))
    (unbounded,) = LLM(model, kv_cache_bytes="100blocks").generate([PROMPTS[0]], greedy(90))
    ours, others = (list(each.outputs[0].token_ids) for each in (streamed, unbounded))
    assert len(ours) == 90
    # As long as all tokens are seen, they are the same.
    assert ours[: 16 - len(PROMPTS[0])] == others[: 16 - len(PROMPTS[0])]
    assert ours != others


def test_a_window_is_refused_where_layers_have_no_positions():
    model, _ = model_of("cohere2")
    with pytest.raises(ValueError, match="cohere2 of mlx-lm, packed, has layers whose"):
        LLM(model, window=16)
