"""How an engine speculates, and what its steps cost on this device."""

from __future__ import annotations

from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from mlx_paged.argument_values import kind_of
from mlx_paged.engine.draft_model import DraftModel
from mlx_paged.engine.drafts import PromptLookup
from mlx_paged.engine.speculation import (
    NO_COST,
    NO_SPECULATION,
    WAITING_SHARE,
    DraftGate,
    Speculation,
    StepCost,
)
from mlx_paged.errors import ArgumentError
from mlx_paged.models.language_model import LanguageModel, check_model, model_type_of
from mlx_paged.ops import device


def speculation_of(
    num_draft_tokens: int, model: LanguageModel, drafter: DraftModel | None, run_ahead: bool
) -> Speculation:
    """How an engine speculates.

    Args:
        drafter: a draft model; ``None`` for prompt look-up.

    Raises:
        ArgumentError: there is a draft model, and ``num_draft_tokens`` is 0.
    """
    if num_draft_tokens == 0:
        if drafter is not None:
            raise ArgumentError(
                "[engine] num_draft_tokens must be at least 1 with a draft model, got 0; leave "
                "draft_model out for none",
                "num_draft_tokens",
            )
        return NO_SPECULATION
    gate = DraftGate(
        cost_of(model),
        NO_COST if drafter is None else cost_of(drafter.model),
        WAITING_SHARE if run_ahead else 0.0,
        repeats_runs=model.state_nbytes > 0,
    )
    return Speculation(drafter or PromptLookup(), int(num_draft_tokens), gate)


def check_draft_model(draft_model: object, model: LanguageModel, kv: str) -> LanguageModel | None:
    """Check that ``draft_model``, if there is one, can make drafts for ``model``.

    Raises:
        ArgumentError: it is not a model, its vocabulary differs, it has recurrent layers, or the
            cache is not a paged one.
    """
    if draft_model is None:
        return None
    if not isinstance(draft_model, Module):
        raise ArgumentError(
            f"[engine] draft_model must be one that mlx_paged.load or mlx_lm.load returns, got "
            f"{kind_of(draft_model)}",
            "draft_model",
        )
    draft_model = check_model(draft_model)
    if draft_model.args.vocab_size != model.args.vocab_size:
        raise ArgumentError(
            f"[engine] draft_model has a vocabulary of {draft_model.args.vocab_size} tokens, the "
            f"model one of {model.args.vocab_size}; they must be the same",
            "draft_model",
        )
    if draft_model.state_nbytes:
        raise ArgumentError(
            f"[engine] draft_model can't be a {model_type_of(draft_model)}: its recurrent state "
            "can't be rolled back when drafts are rejected; use a model of attention layers only, "
            "or leave draft_model out: then drafts are looked up in a request's own tokens",
            "draft_model",
        )
    if kv == "basic":
        raise ArgumentError(
            "[engine] draft_model needs kv='paged'; with kv='basic' drafts are looked up in a "
            "request's own tokens: leave draft_model out",
            "draft_model",
        )
    return draft_model


def cost_of(model: LanguageModel) -> StepCost:
    """The cost of a step of a model on the default device."""
    num_parameters = num_parameters_of(model)
    if device.is_cpu():
        return StepCost.on_cpu(num_parameters, model.num_layers)
    nbytes = sum(array.nbytes for array in dict(tree_flatten(model.parameters())).values())
    return StepCost.on_gpu(num_parameters, nbytes)


def num_parameters_of(model: Module) -> int:
    """The number of a model's parameters, counting packed ones individually."""
    return int(get_total_parameters(model))
