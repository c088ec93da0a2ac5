"""How long a sequence a model was made for, as its configuration says it."""

from __future__ import annotations

from mlx_paged.argument_values import as_integer
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.models.language_model import ModelArgs

# These kinds of RoPE scaling are counted in max_position_embeddings already; the others multiply
# it.
_ALREADY_SCALED = ("default", "llama3", "longrope", "su", "mrope")


def context_length(args: ModelArgs) -> int:
    """The tokens, prompt and answer together, that a model of this configuration was made for.

    That is ``max_position_embeddings``, with RoPE scaling counted as the configuration means it
    (the rule is vLLM's): YaRN's ``factor`` multiplies ``original_max_position_embeddings``, a
    linear ``factor`` multiplies ``max_position_embeddings``, and Llama 3 and LongRoPE scaling are
    part of ``max_position_embeddings``.

    Args:
        args: the model's configuration.
    """
    limit = args.max_position_embeddings
    scaling = args.rope_scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind in _ALREADY_SCALED:
        return int(limit)
    if kind == "yarn":
        limit = scaling.get("original_max_position_embeddings", limit)
    return int(limit * scaling.get("factor", 1.0))


def context_limit(
    args: ModelArgs, max_model_len: int | None, window: int | None = None
) -> int | None:
    """The most tokens that a prompt and its answer have together: ``max_model_len``, or what the
    model was made for; ``None`` where only a window of them is seen at a time.

    Raises:
        ArgumentError: it is no whole number, below 2, or more than the model was made for.
    """
    limit = context_length(args)
    if max_model_len is None:
        return None if window is not None else limit
    length = as_integer(max_model_len)
    if window is not None and length is not None and length >= 2:
        return length
    if length is None or not 2 <= length <= limit:
        raise ArgumentError(
            f"[context] max_model_len must be a whole number within 2..{limit}, the context that "
            f"the model was made for, got {shown(max_model_len)}",
            "max_model_len",
        )
    return length
