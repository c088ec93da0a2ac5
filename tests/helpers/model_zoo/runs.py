"""How each architecture runs: its row in ``docs/guide/models.md``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mlx.nn import Module

from helpers.model_zoo.answers import (
    NUM_TOKENS,
    PROMPTS,
    StockAnswers,
    answers_of,
    stock_answers,
)
from helpers.model_zoo.common import Config
from helpers.model_zoo.configs import config_of
from helpers.model_zoo.models import make, make_from_config
from helpers.model_zoo.traits import traits_of
from mlx_paged import Engine
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import UnsuitableModelError, adapt
from mlx_paged.models.mlx_lm.trial import tried
from mlx_paged.options.engine_options import EngineOptions


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        way: "packed", "packed, with state", "per sequence", or "refused: " and why.
        traits: what it has.
    """

    architecture: str
    way: str
    traits: str

    def __str__(self) -> str:
        return f"| `{self.architecture}` | {self.way} | {self.traits} |"


def run(architecture: str) -> Row:
    """Run an architecture, if it runs: in the way that the trial finds, which the table names.

    Raises:
        AssertionError: tokens or log-probabilities differ from mlx-lm's.
    """
    config = config_of(architecture)
    model = make(architecture)
    traits = traits_of(model, config)
    try:
        way = way_of(tried(model, config))
    except UnsuitableModelError as error:
        return Row(architecture, f"refused: {error}", traits)
    model, expected = with_clear_answers(config)
    adapted = adapt(model, config)
    assert way_of(adapted) == way, "the table says another way than the trial"
    check_answers(adapted, expected)
    return Row(architecture, way, traits)


def way_of(model: LanguageModel) -> str:
    """The way in which a model of mlx-lm runs, as its line at start has it."""
    way = model.description.split(" of mlx-lm, ")[1]
    return way.removesuffix(", its text part only")


def with_clear_answers(
    config: Config, prompts: Sequence[list[int]] = PROMPTS
) -> tuple[Module, StockAnswers]:
    """The model of the first seed with which no step of mlx-lm's answers is a near tie, which
    rounding would decide.
    """
    for seed in itertools.count():
        model = make_from_config(config, seed)
        expected = stock_answers(model, prompts)
        if expected.is_clear:
            return model, expected
    raise AssertionError  # count() has no end


def check_answers(
    model: LanguageModel,
    expected: StockAnswers,
    prompts: Sequence[list[int]] = PROMPTS,
    max_num_batched_tokens: int = 7,
) -> None:
    """All prompts at once, in ragged chunks; then the same, which finds their beginnings cached;
    then all but the first on a pool so small that one is preempted.
    """
    options: EngineOptions = {
        "block_size": 8,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": 4,
        "swap_bytes": 0,
    }
    engine = Engine(model, kv_cache_bytes=f"{sum(map(len, prompts))}blocks", **options)
    expected.check(answers_of(engine, prompts), "in chunks")
    num_cached = engine.stats().num_cached_prompt_tokens
    expected.check(answers_of(engine, prompts), "with a prefix hit")
    assert engine.stats().num_cached_prompt_tokens > num_cached
    # The prompts and the watermark, and no answer beside another; one alone has to fit.
    most_held = engine.manager.block_need.max_num_held_blocks
    num_blocks = max(
        sum(most_held(len(prompt)) for prompt in prompts[1:]) + 1,
        most_held(max(map(len, prompts[1:])) + NUM_TOKENS),
    )
    engine = Engine(model, kv_cache_bytes=f"{num_blocks}blocks", **options)
    expected.check(answers_of(engine, prompts[1:]), "with a preemption", first=1)
    # Where all layers have windows, requests don't grow.
    is_growing = any(spec.window is None for spec in model.layer_specs)
    assert (engine.stats().num_preemptions > 0) == is_growing
