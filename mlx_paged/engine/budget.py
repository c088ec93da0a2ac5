"""How the states of recurrent layers share an engine's budget with K/V, and whether a model and its
context fit into the memory of this machine.
"""

from __future__ import annotations

import sys
import warnings

from mlx_paged.cache import KVCache
from mlx_paged.config import KVBudget, SchedulerConfig
from mlx_paged.core import BudgetSizes, KVCacheManager
from mlx_paged.core.checkpoints import MANY
from mlx_paged.memory import format_nbytes, why_too_large
from mlx_paged.models.language_model import LanguageModel

# More than one checkpoint per this many tokens of K/V would be of no use.
TOKENS_PER_CHECKPOINT = 128
# Copies of a running sequence's state that exist at once: before and after a step, and one that is
# gathered or computed meanwhile; MLX delays work that would need more.
NUM_COPIES = 3
# One more if the next step is launched while one runs.
NUM_COPIES_AHEAD = 4
# And one more with drafts: some sequences are rolled back to the state before a step.
NUM_COPIES_BEFORE_DRAFTS = 1


def num_state_copies(model: LanguageModel, config: SchedulerConfig, runs_ahead: bool) -> int:
    """Copies of a running sequence's recurrent state that exist at once; 0 without states.

    Args:
        runs_ahead: whether the next step may be launched while one runs.
    """
    if not model.state_nbytes:
        return 0
    copies = NUM_COPIES_AHEAD if runs_ahead else NUM_COPIES
    return copies + (NUM_COPIES_BEFORE_DRAFTS if config.num_draft_tokens else 0)


def most_checkpoints(
    model: LanguageModel, config: SchedulerConfig, budget: KVBudget, num_copies: int
) -> int:
    """The most checkpoints that are of use and that a budget holds beside one sequence: one for
    each ``TOKENS_PER_CHECKPOINT`` tokens of K/V, two per sequence, or ``MANY``, whichever is most.
    A budget in blocks is for K/V only.
    """
    if not config.enable_prefix_caching:
        return 0
    nbytes, num_held = budget.nbytes or 0, sys.maxsize
    if budget.nbytes is not None:
        num_held = max(1, nbytes // model.state_nbytes - num_copies)
    num_tokens = nbytes // sum(spec.nbytes_per_token for spec in model.layer_specs)
    useful = max(2 * config.max_num_seqs, MANY, num_tokens // TOKENS_PER_CHECKPOINT)
    return min(useful, num_held)


def sizes_of(cache: KVCache, budget: int, num_copies: int) -> BudgetSizes:
    """The sizes of what shares a budget in bytes with the blocks of a cache."""
    config = cache.config
    return BudgetSizes(budget, config.nbytes_per_block, config.state_nbytes, num_copies)


def warn_if_fewer_run(sizes: BudgetSizes, max_num_seqs: int) -> None:
    """Warn if the budget holds the states of fewer sequences than may run at once."""
    most = next(n for n in range(max_num_seqs, 0, -1) if n == 1 or sizes.max_num_blocks(n) >= n)
    if most < max_num_seqs:
        warnings.warn(
            f"[engine] at most {most} sequences run at once instead of max_num_seqs "
            f"{max_num_seqs}: kv_cache_bytes of {sizes.budget:,} holds no more than {most} times "
            f"{sizes.num_copies} copies of a state of {sizes.state:,} bytes",
            stacklevel=3,
        )


REMEDIES = (
    "a smaller model or one of fewer bits, kv_format (--kv-bits) 8 or 4, a smaller max_model_len "
    "(--max-model-len), or a kv_cache_bytes (--kv-cache-bytes) of your own"
)


def num_tokens_held(cache: KVCache, manager: KVCacheManager) -> int:
    """The most tokens of a single sequence in the budget; ``sys.maxsize`` if it is unlimited."""
    return manager.block_need.max_num_tokens(cache.config.num_blocks)


def warn_unless_it_fits(
    weight_nbytes: int,
    cache: KVCache,
    manager: KVCacheManager,
    max_model_len: int | None,
    activation_nbytes: int | None,
) -> None:
    """Warn, with the numbers, if the weights leave too little of this machine's memory for K/V.

    Args:
        activation_nbytes: of the largest step; ``None`` if the budget is of the user's choice.
    """
    reason = why_too_large(weight_nbytes, activation_nbytes)
    if reason is None:
        return
    held = _context_held(num_tokens_held(cache, manager), max_model_len)
    warnings.warn(
        f"[engine] the model does not fit into this machine: its weights take "
        f"{format_nbytes(weight_nbytes)}, and {reason}; the K/V budget is "
        f"{format_nbytes(cache.config.nbytes)} and holds {held}. "
        f"What you can do: {REMEDIES}",
        stacklevel=3,
    )


def _context_held(num_held: int, max_model_len: int | None) -> str:
    if max_model_len is None:
        return "an unlimited context" if num_held == sys.maxsize else f"{num_held:,} tokens"
    if num_held < max_model_len:
        return f"{num_held:,} of its {max_model_len:,} tokens of context"
    return f"its {max_model_len:,} tokens of context"
