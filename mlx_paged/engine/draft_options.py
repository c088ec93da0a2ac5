"""What an engine's arguments say about drafts: who makes them, and what steps cost on this device."""

from __future__ import annotations

from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from mlx_paged.argument_values import check_integer
from mlx_paged.engine.draft_gate import WAITING_SHARE, DraftGate, StepCost
from mlx_paged.engine.drafts import MAX_DRAFT_TOKENS, PromptLookup
from mlx_paged.engine.speculation import NO_SPECULATION, Speculation
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.ops import device


def speculation_of(num_draft_tokens: int, model: LanguageModel, run_ahead: bool) -> Speculation:
    """How an engine speculates.

    Raises:
        ArgumentError: ``num_draft_tokens`` is not within 0..7.
    """
    num_draft_tokens = check_integer("engine", "num_draft_tokens", num_draft_tokens, 0)
    if num_draft_tokens > MAX_DRAFT_TOKENS:
        raise ArgumentError(
            f"[engine] num_draft_tokens must be within 0..{MAX_DRAFT_TOKENS}, got "
            f"{shown(num_draft_tokens)}: attention has kernels for runs of up to "
            f"{MAX_DRAFT_TOKENS + 1} tokens",
            "num_draft_tokens",
        )
    if num_draft_tokens == 0:
        return NO_SPECULATION
    gate = DraftGate(cost_of(model), waiting_share=WAITING_SHARE if run_ahead else 0.0)
    return Speculation(PromptLookup(), num_draft_tokens, gate)


def cost_of(model: LanguageModel) -> StepCost:
    """What a step of a model costs on the device that is used."""
    num_parameters = num_parameters_of(model)
    if device.is_cpu():
        return StepCost.on_cpu(num_parameters, len(model.layer_specs))
    nbytes = sum(array.nbytes for array in dict(tree_flatten(model.parameters())).values())
    return StepCost.on_gpu(num_parameters, nbytes)


def num_parameters_of(model: Module) -> int:
    """Parameters of a model; quantised ones count as what they stand for."""
    return int(get_total_parameters(model))
