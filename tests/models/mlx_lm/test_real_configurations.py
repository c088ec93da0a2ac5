"""Popular models with heads, windows and experts as they really are, two layers each: their tokens
are those of mlx-lm.
"""

from __future__ import annotations

import pytest
from helpers.model_zoo.answers import make_prompts
from helpers.model_zoo.page import check_answers, way_of, with_clear_answers
from helpers.model_zoo.published import FAMILIES, family_config

from mlx_paged.models.mlx_lm import adapt

WAYS = dict.fromkeys(FAMILIES, "packed") | {"Qwen3-Next-80B-A3B": "packed, with state"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_mlx_lm(name: str):
    config = family_config(name)
    window = config.get("sliding_window", 0)
    prompts = make_prompts(window + 20)
    model, expected = with_clear_answers(config, prompts)
    adapted = adapt(model, config)
    assert way_of(adapted) == WAYS[name]
    check_answers(adapted, expected, prompts, max_num_batched_tokens=7 + window // 4)
