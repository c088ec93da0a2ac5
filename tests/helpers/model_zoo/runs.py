"""How each architecture runs: its row in ``docs/models.md``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from mlx.nn import Module

from helpers.model_zoo.answers import (
    NUM_TOKENS,
    PROMPTS,
    StockAnswers,
    answers_of,
    stock_answers,
)
from helpers.model_zoo.configs import config_of
from helpers.model_zoo.models import make
from helpers.model_zoo.traits import traits_of
from mlx_paged import Engine
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import UnsuitableModelError, adapt

OPTIONS: dict[str, Any] = {
    "block_size": 8,
    "max_num_batched_tokens": 7,
    "max_num_seqs": 4,
    "swap_bytes": 0,
}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        way: "packed", "dense", "dense, with state", or "refused: " and why.
        traits: what it has.
    """

    architecture: str
    way: str
    traits: str

    def __str__(self) -> str:
        return f"| `{self.architecture}` | {self.way} | {self.traits} |"


def run(architecture: str) -> Row:
    """Run an architecture, if it runs.

    Raises:
        AssertionError: tokens differ from mlx-lm's.
    """
    config = config_of(architecture)
    model = make(architecture)
    traits = traits_of(model, config)
    try:
        adapt(model, config)
    except UnsuitableModelError as error:
        return Row(architecture, f"refused: {error}", traits)
    model, expected = with_clear_answers(architecture)
    adapted = adapt(model, config)
    check_answers(adapted, expected)
    return Row(architecture, way_of(adapted), traits)


def way_of(model: LanguageModel) -> str:
    """The way in which a model runs, as its line at start has it."""
    return model.description.split(" of mlx-lm, ")[1]


def with_clear_answers(architecture: str) -> tuple[Module, StockAnswers]:
    """The model of the first seed with which no step of mlx-lm's answers is a near tie, which
    rounding would decide.
    """
    for seed in itertools.count():
        model = make(architecture, seed)
        expected = stock_answers(model)
        if expected.is_clear:
            return model, expected
    raise AssertionError  # count() has no end


def check_answers(model: LanguageModel, expected: StockAnswers) -> None:
    """Three requests at once, in ragged chunks; then the same, which finds their beginnings cached;
    then on a pool so small that requests are preempted.
    """
    engine = Engine(model, kv_cache_bytes="120blocks", **OPTIONS)
    assert answers_of(engine) == expected.tokens, "in chunks"
    num_cached = engine.stats().num_cached_prompt_tokens
    assert answers_of(engine) == expected.tokens, "with a prefix hit"
    assert engine.stats().num_cached_prompt_tokens > num_cached
    longest = max(map(len, PROMPTS)) + NUM_TOKENS
    num_blocks = engine.cache.manager.max_num_held_blocks(longest) + 2
    engine = Engine(model, kv_cache_bytes=f"{num_blocks}blocks", **OPTIONS)
    assert answers_of(engine) == expected.tokens, "with a preemption"
    assert engine.stats().num_preemptions > 0
