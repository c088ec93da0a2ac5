"""Answers drawn at random from a grammar, without a model."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import numpy as np

from helpers.completions import new_completion
from mlx_paged.engine.request import TokenRules
from mlx_paged.engine.sampling.grammar import GrammarCompiler
from mlx_paged.engine.sampling.sampling_state import GrammarState, fill_masks
from mlx_paged.options.sampling_declarations import StructuredOutputsParams


def random_answer(
    compiler: GrammarCompiler,
    tokenizer: Any,
    params: StructuredOutputsParams,
    rng: random.Random,
    preferred: Collection[int] = (),
) -> str:
    """The text of an answer whose tokens are drawn from what the grammar allows.

    Args:
        preferred: tokens that are drawn in half of the places where they may come.
    """
    grammar = compiler.compile(params)
    rules = TokenRules(grammar=grammar)
    request, state = new_completion("r", [1], token_rules=rules), GrammarState(grammar)
    while request.num_output_tokens < 2000:
        allowed, failed = fill_masks([state], [request])
        assert not failed, failed
        token_ids = np.flatnonzero(allowed[0]).tolist()
        wanted = [token for token in token_ids if token in preferred]
        token = rng.choice(wanted if wanted and rng.random() < 0.5 else token_ids)
        if token in tokenizer.eos_token_ids:
            return str(tokenizer.decode(request.output_token_ids))
        request.token_ids.append(token)
    raise AssertionError("the answer has no end")
