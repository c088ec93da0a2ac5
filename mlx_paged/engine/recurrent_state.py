"""The share of an engine's budget that the states of recurrent layers take."""

from __future__ import annotations

import sys
import warnings
from typing import NamedTuple

from mlx_paged.config import KVBudget, SchedulerConfig
from mlx_paged.core.checkpoints import MANY
from mlx_paged.errors import ArgumentError
from mlx_paged.models.language_model import LanguageModel, model_type_of

# More than one checkpoint per this many tokens of K/V would be of no use.
TOKENS_PER_CHECKPOINT = 128
# Copies of a running sequence's state that exist at once: before and after a step, and one that is
# gathered or computed meanwhile; MLX delays work that would need more.
NUM_COPIES = 3
# One more if the next step is launched while one runs.
NUM_COPIES_AHEAD = 4
# And one more with drafts: some sequences are rolled back to the state before a step.
NUM_COPIES_BEFORE_DRAFTS = 1


class StateRoom(NamedTuple):
    """How a budget is divided between states and K/V."""

    max_num_seqs: int
    num_checkpoints: int
    kv_cache_bytes: str | int


def room_for_states(
    model: LanguageModel, config: SchedulerConfig, budget: KVBudget, runs_ahead: bool
) -> StateRoom:
    """Take states from a budget in bytes: at most a quarter of it for all copies of the states of
    ``max_num_seqs`` sequences, and another quarter for checkpoints. A warning says if fewer
    sequences can run.

    There is one checkpoint for each ``TOKENS_PER_CHECKPOINT`` tokens of K/V, two per sequence, or
    ``MANY``, whichever is most.

    A budget in blocks is for K/V only, and is not changed.

    Args:
        runs_ahead: whether the next step may be launched while one runs.

    Raises:
        ArgumentError: a quarter of the budget does not hold the copies of one state.
    """
    nbytes, num_seqs = model.state_nbytes, config.max_num_seqs
    copies = NUM_COPIES_AHEAD if runs_ahead else NUM_COPIES
    if config.num_draft_tokens:
        copies += NUM_COPIES_BEFORE_DRAFTS
    if config.enable_prefix_caching:
        copies += 1  # at the end of a block, until its tokens are known and name it
    most = sys.maxsize if budget.nbytes is None else budget.nbytes // 4 // nbytes
    if most < copies:
        raise ArgumentError(
            f"[engine] kv_cache_bytes of {budget.nbytes} is too small: a {model_type_of(model)} "
            f"keeps a state of {nbytes} bytes per sequence, with {copies} copies of it at a time, "
            f"and a quarter of the budget holds {most}; raise it to {4 * copies * nbytes}",
            "kv_cache_bytes",
        )
    if num_seqs > most // copies:
        warnings.warn(
            f"[engine] {most // copies} sequences run at once instead of max_num_seqs {num_seqs}: "
            f"{copies} copies of their states of {nbytes} bytes each may take a quarter of "
            "kv_cache_bytes",
            stacklevel=3,
        )
        num_seqs = most // copies
    num_checkpoints = 0
    if config.enable_prefix_caching:
        num_tokens = (budget.nbytes or 0) // sum(
            spec.nbytes_per_token for spec in model.layer_specs
        )
        useful = max(2 * num_seqs, MANY, num_tokens // TOKENS_PER_CHECKPOINT)
        num_checkpoints = min(useful, most)
    if budget.nbytes is None:
        return StateRoom(num_seqs, num_checkpoints, f"{budget.num_blocks}blocks")
    left = budget.nbytes - (copies * num_seqs + num_checkpoints) * nbytes
    return StateRoom(num_seqs, num_checkpoints, left)
