"""Models that ``mlx_lm.load`` returns, given to this package as they are."""

from __future__ import annotations

import mlx.nn as nn
import mlx_lm
import pytest
from helpers.adapted_models import mlx_lm_model
from helpers.mlx_lm_models import stock_tokens

from mlx_paged import LLM, Engine, SamplingParams, demo_model_path, load, make_kv_cache
from mlx_paged.errors import ArgumentError
from mlx_paged.models.language_model import check_model

PROMPT = [5, 9, 2, 7, 11, 3]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def answer(engine: Engine) -> list[int]:
    engine.add_request("a", PROMPT, GREEDY)
    outputs = [output for output in iter(engine.step, []) for output in output]
    return list(outputs[-1].outputs[0].token_ids)


def test_llm_takes_what_mlx_lm_loads():
    model, tokenizer, *_ = mlx_lm.load(str(demo_model_path()))
    found = LLM(model, tokenizer).generate("The code of apple is", GREEDY)[0].outputs[0]
    expected = LLM("demo").generate("The code of apple is", GREEDY)[0].outputs[0]
    assert found.token_ids == expected.token_ids


def test_the_bundled_model_is_the_default():
    assert LLM().engine.model.name == "demo_model"
    assert load("demo")[0].name == "demo_model"


@pytest.mark.parametrize("name", ["lfm2", "llama4"], ids=["with states", "one at a time"])
def test_a_model_of_mlx_lm_is_tried_once_and_stays_as_it_is(name: str):
    model = mlx_lm_model(name)
    before = stock_tokens(model, PROMPT, 12)
    assert answer(Engine(model, None, kv_cache_bytes="1G")) == before
    assert check_model(model) is check_model(model)
    assert answer(Engine(model, None, kv_cache_bytes="1G")) == before
    assert stock_tokens(model, PROMPT, 12) == before
    assert make_kv_cache(model, kv_cache_bytes="1M").config.layers


def test_a_module_that_is_no_language_model_is_refused():
    with pytest.raises(ArgumentError, match=r"that mlx_paged.load or mlx_lm.load returns, got mlx"):
        Engine(nn.Linear(2, 2), None)
