"""What an engine does differently for a model with recurrent layers, whose state of a sequence can't
be cut.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from mlx_paged.config import KVBudget, SchedulerConfig
from mlx_paged.errors import ArgumentError
from mlx_paged.models.language_model import LanguageModel, model_type_of


def check_speculation(
    model: LanguageModel, draft_model: LanguageModel | None, num_draft_tokens: int
) -> None:
    """Refuse drafts for a model that can't take back the tokens that were not accepted.

    Raises:
        ArgumentError: the model, or the draft model, has recurrent layers.
    """
    if draft_model is not None and draft_model.state_nbytes:
        raise ArgumentError(
            f"[engine] draft_model can't be a {model_type_of(draft_model)}: its recurrent state "
            "can't take back drafts that are not accepted",
            "draft_model",
        )
    if num_draft_tokens and model.state_nbytes:
        raise ArgumentError(
            f"[engine] num_draft_tokens must be 0 with a {model_type_of(model)}, got "
            f"{num_draft_tokens}: its recurrent state can't take back drafts that are not accepted",
            "draft_model" if draft_model is not None else "num_draft_tokens",
        )


def room_for_states(
    model: LanguageModel, config: SchedulerConfig, budget: KVBudget
) -> tuple[SchedulerConfig, KVBudget]:
    """Take the states of ``max_num_seqs`` sequences, and one more that a step makes, from a budget
    in bytes; fewer sequences run, and a warning says so, where that would be more than half of it.

    A budget in blocks is one of K/V alone, and left as it is.

    Raises:
        ArgumentError: half of the budget does not hold the state of a sequence.
    """
    nbytes = model.state_nbytes
    if not nbytes or budget.nbytes is None:
        return config, budget
    num_seqs = min(config.max_num_seqs, budget.nbytes // 2 // nbytes - 1)
    if num_seqs < 1:
        raise ArgumentError(
            f"[engine] a budget of {budget.nbytes} bytes is too small: a {model_type_of(model)} "
            f"keeps a state of {nbytes} bytes per sequence, and half of the budget holds fewer than "
            f"two; raise kv_cache_bytes to {4 * nbytes}",
            "kv_cache_bytes",
        )
    if num_seqs < config.max_num_seqs:
        warnings.warn(
            f"[engine] {num_seqs} sequences run at once instead of max_num_seqs "
            f"{config.max_num_seqs}: their states of {nbytes} bytes each take half of the budget",
            stacklevel=3,
        )
    return (
        replace(config, max_num_seqs=num_seqs),
        KVBudget(nbytes=budget.nbytes - (num_seqs + 1) * nbytes),
    )
