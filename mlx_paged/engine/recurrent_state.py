"""What an engine does differently for a model with recurrent layers, whose state can't be cut."""

from __future__ import annotations

import sys
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


MIN_CHECKPOINTS = 8


class StateRoom(NamedTuple):
    """What the states of a model take of a budget, and what they leave."""

    max_num_seqs: int
    num_checkpoints: int
    kv_cache_bytes: str | int


def room_for_states(model: LanguageModel, config: SchedulerConfig, budget: KVBudget) -> StateRoom:
    """Take states from a budget in bytes: those of ``max_num_seqs`` sequences and one that a step
    makes, a quarter of it at most, and checkpoints, another quarter at most. A warning says so
    where fewer sequences can run for that.

    Each sequence leaves two checkpoints, after its prompt and after its answer, and there are
    ``MIN_CHECKPOINTS`` for the branches of a single conversation.

    A budget in blocks is one of K/V alone, and left as it is.

    Raises:
        ArgumentError: a quarter of the budget holds fewer than two states.
    """
    nbytes, num_seqs = model.state_nbytes, config.max_num_seqs
    most = sys.maxsize if budget.nbytes is None else budget.nbytes // 4 // nbytes
    if most < 2:
        raise ArgumentError(
            f"[engine] kv_cache_bytes of {budget.nbytes} is too small: a {model_type_of(model)} "
            f"keeps a state of {nbytes} bytes per sequence, and a quarter of the budget holds "
            f"fewer than two; raise it to {8 * nbytes}",
            "kv_cache_bytes",
        )
    if num_seqs > most - 1:
        warnings.warn(
            f"[engine] {most - 1} sequences run at once instead of max_num_seqs {num_seqs}: their "
            f"states of {nbytes} bytes each may take a quarter of kv_cache_bytes",
            stacklevel=3,
        )
        num_seqs = most - 1
    num_checkpoints = 0
    if config.enable_prefix_caching:
        num_checkpoints = min(max(2 * num_seqs, MIN_CHECKPOINTS), most)
    if budget.nbytes is None:
        return StateRoom(num_seqs, num_checkpoints, f"{budget.num_blocks}blocks")
    left = budget.nbytes - (num_seqs + 1 + num_checkpoints) * nbytes
    return StateRoom(num_seqs, num_checkpoints, left)
