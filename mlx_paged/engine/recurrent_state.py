"""What an engine does differently for a model with recurrent layers, whose state can't be cut."""

from __future__ import annotations

import warnings
from typing import NamedTuple

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


class StateRoom(NamedTuple):
    """What the states of a model take of a budget, and what they leave."""

    max_num_seqs: int
    num_checkpoints: int
    kv_cache_bytes: str | int


def room_for_states(model: LanguageModel, config: SchedulerConfig, budget: KVBudget) -> StateRoom:
    """Take the states of ``max_num_seqs`` sequences from a budget in bytes, one that a step makes,
    and as many checkpoints as sequences where prefixes are shared; fewer sequences run, and a
    warning says so, where that would be more than half of it.

    A budget in blocks is one of K/V alone, and left as it is.

    Raises:
        ArgumentError: half of the budget does not hold what one sequence needs.
    """
    nbytes, num_seqs = model.state_nbytes, config.max_num_seqs
    per_seq = 1 + config.enable_prefix_caching
    if budget.nbytes is None:
        num_checkpoints = num_seqs * config.enable_prefix_caching
        return StateRoom(num_seqs, num_checkpoints, f"{budget.num_blocks}blocks")
    num_seqs = min(num_seqs, (budget.nbytes // 2 // nbytes - 1) // per_seq)
    if num_seqs < 1:
        raise ArgumentError(
            f"[engine] kv_cache_bytes of {budget.nbytes} is too small: a {model_type_of(model)} "
            f"keeps a state of {nbytes} bytes per sequence, and half of the budget holds fewer "
            f"than {per_seq + 1}; raise it to {2 * (per_seq + 1) * nbytes}",
            "kv_cache_bytes",
        )
    if num_seqs < config.max_num_seqs:
        warnings.warn(
            f"[engine] {num_seqs} sequences run at once instead of max_num_seqs "
            f"{config.max_num_seqs}: their states of {nbytes} bytes each take half of the budget",
            stacklevel=3,
        )
    num_checkpoints = num_seqs * config.enable_prefix_caching
    left = budget.nbytes - (num_seqs + num_checkpoints + 1) * nbytes
    return StateRoom(num_seqs, num_checkpoints, left)
