"""mlx-lm's own models, split by their own ``shard``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.model_zoo.answers import PROMPTS, stock_answers
from helpers.model_zoo.models import make
from helpers.ranks import run_program

# A plain one, sinks and windows with experts, latents, and recurrent states.
SPLIT = ["llama", "gpt_oss", "deepseek_v3", "qwen3_5"]


@pytest.mark.slow
def test_models_of_mlx_lm_give_mlx_lms_own_tokens_on_two_ranks(tmp_path: Path):
    ended = run_program(2, "mlx_lm_models", tmp_path, *SPLIT, "gemma3_text")
    assert [each.status for each in ended] == [0, 0], ended
    assert ended[0].out == ended[1].out
    told = {}
    for line in ended[0].out.splitlines():
        told |= json.loads(line)
    assert "model type 'gemma3_text' can't be split over 2 ranks" in told.pop("gemma3_text")
    assert list(told) == SPLIT
    for name, answers in told.items():
        assert answers == stock_answers(make(name), PROMPTS).tokens, name
