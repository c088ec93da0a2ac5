"""mlx-lm's own models, split by their own ``shard``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import mlx_lm_models
from helpers.mlx_lm_models import random_model, stock_tokens
from helpers.ranks import run_program

PROMPTS = [[(7 * number + place) % 200 for place in range(5 + 9 * number)] for number in range(3)]


@pytest.mark.slow
def test_models_of_mlx_lm_give_mlx_lms_own_tokens_on_two_ranks(tmp_path: Path):
    ended = run_program(2, "mlx_lm_models", tmp_path)
    assert [(each.status, each.err) for each in ended] == [(0, "")] * 2
    assert ended[0].out == ended[1].out
    told = {}
    for line in ended[0].out.splitlines():
        told |= json.loads(line)
    assert "model type 'gemma3_text' can't be split over 2 ranks" in told.pop("GEMMA3")
    for name, answers in told.items():
        stock = random_model(getattr(mlx_lm_models, name))
        assert answers == [stock_tokens(stock, prompt, 12) for prompt in PROMPTS], name
    assert list(told) == ["LLAMA", "GPT_OSS", "DEEPSEEK_V3"]
