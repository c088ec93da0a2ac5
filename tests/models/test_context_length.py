"""The context that a configuration means, for each kind of RoPE scaling."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from helpers.model_zoo import config_of, make_from_config

from mlx_paged import Engine, RequestOutput, SamplingParams
from mlx_paged.errors import ArgumentError, PromptTooLongError
from mlx_paged.models.context_length import context_length
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import adapt


@pytest.mark.parametrize(
    ("max_position_embeddings", "rope_scaling", "expected"),
    [
        (40960, None, 40960),
        (40960, {}, 40960),
        (32768, {"rope_type": "default"}, 32768),
        # Qwen3's model cards: YaRN beside the max_position_embeddings of the model without it.
        (
            40960,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            131072,
        ),
        (32768, {"type": "yarn", "factor": 2.0}, 65536),
        (4096, {"type": "linear", "factor": 2.5}, 10240),
        (
            131072,
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            131072,
        ),
        (131072, {"type": "longrope", "original_max_position_embeddings": 4096}, 131072),
        # Beyond it, keys would depend on how long their sequence is.
        (256, {"type": "dynamic", "factor": 4.0}, 256),
        (32768, {"rope_type": "dynamic", "factor": 2.0}, 32768),
    ],
)
def test_the_context_is_what_the_configuration_means(
    max_position_embeddings, rope_scaling, expected
):
    args = SimpleNamespace(
        max_position_embeddings=max_position_embeddings, rope_scaling=rope_scaling
    )
    assert context_length(args) == expected


DYNAMIC = {
    "max_position_embeddings": 256,
    "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 4.0},
}


@pytest.fixture(scope="module", params=["llama", "internlm2", "internlm3"])
def dynamic(request: pytest.FixtureRequest) -> LanguageModel:
    config = config_of(request.param) | DYNAMIC
    return adapt(make_from_config(config), config)


def test_with_dynamic_scaling_the_context_is_the_unscaled_one_and_a_line_says_so(dynamic):
    with pytest.warns(UserWarning, match="sequences have at most 256 tokens, the context"):
        engine = Engine(dynamic, block_size=8)
    assert engine.max_model_len == 256
    tokens = mx.random.randint(0, 256, (600,), key=mx.random.key(0)).tolist()
    with pytest.raises(PromptTooLongError, match="600"):
        engine.add_request("a", tokens, SamplingParams(max_tokens=2))
    with pytest.raises(ArgumentError, match=r"2..256, .* made for without its dynamic RoPE scalin"):
        Engine(dynamic, block_size=8, max_model_len=600)
    assert Engine(dynamic, block_size=8, max_model_len=200).max_model_len == 200


def test_with_dynamic_scaling_logits_up_to_the_context_are_those_of_mlx_lm_in_any_chunks(dynamic):
    tokens = mx.random.randint(0, 256, (252,), key=mx.random.key(0)).tolist()
    logits = dynamic["inner"](mx.array([tokens]))[0]
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    sizes = {"block_size": 8, "max_num_seqs": 4, "max_model_len": 256}
    for chunk in (32, 100, 252):
        engine = Engine(dynamic, max_num_batched_tokens=chunk, **sizes)
        first = answer(engine, tokens, prompt_logprobs=0)
        for position in range(1, len(tokens)):
            entry = first.prompt_logprobs[position][tokens[position]]
            assert abs(entry.logprob - expected[position - 1, tokens[position]].item()) < 1e-4
        again = answer(engine, tokens, logprobs=0)
        assert again.num_cached_tokens == 248
        ((entry,),) = [step.values() for step in again.outputs[0].logprobs]
        assert abs(entry.logprob - expected[-1].max().item()) < 1e-4


def answer(engine: Engine, tokens: list[int], **options: int) -> RequestOutput:
    engine.add_request("a", tokens, SamplingParams(max_tokens=1, temperature=0, **options))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return outputs[-1]
