"""A model's context length, read from its configuration."""

from __future__ import annotations

import warnings

from mlx_paged.errors import ArgumentError, shown
from mlx_paged.models.language_model import ModelConfig
from mlx_paged.options.argument_values import as_integer

# With these kinds of RoPE scaling, max_position_embeddings is the scaled length; the others
# multiply it.
_ALREADY_SCALED = ("default", "llama3", "longrope", "su", "mrope")
# Its frequencies depend on the length of the sequence, so beyond the original context mlx-lm's own
# logits depend on how a prompt is cut, and cached keys do not fit later queries.
_UNCACHEABLE = "dynamic"


def context_length(args: ModelConfig) -> int:
    """The context length in tokens, prompt and answer together.

    It is ``max_position_embeddings``, adjusted for RoPE scaling as in vLLM: YaRN's ``factor``
    multiplies ``original_max_position_embeddings``, a linear ``factor`` multiplies
    ``max_position_embeddings``, and the scaling of Llama 3 and LongRoPE is already included.
    Dynamic scaling is not counted, because K/V can't be cached beyond the original context.

    Args:
        args: the model's configuration.
    """
    limit, kind = args.max_position_embeddings, _scaling_kind(args)
    if kind in (*_ALREADY_SCALED, _UNCACHEABLE):
        return int(limit)
    scaling = args.rope_scaling or {}
    if kind == "yarn":
        limit = scaling.get("original_max_position_embeddings", limit)
    return int(limit * scaling.get("factor", 1.0))


def _scaling_kind(args: ModelConfig) -> str:
    scaling = args.rope_scaling or {}
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def context_limit(
    args: ModelConfig, max_model_len: int | None, window: int | None = None
) -> int | None:
    """The most tokens of a prompt and its answer together: ``max_model_len``, by default the
    model's context length; ``None`` for no limit, with a streaming window.

    Raises:
        ArgumentError: ``max_model_len`` is not a whole number, is below 2, or exceeds the model's
            context length.
    """
    limit, why = context_length(args), ""
    if _scaling_kind(args) == _UNCACHEABLE and (args.rope_scaling or {}).get("factor", 1) > 1:
        why = (
            "without its dynamic RoPE scaling, which changes all keys as a sequence grows beyond "
            "that, so that none can be kept"
        )
    if max_model_len is None:
        if why and window is None:
            warnings.warn(
                f"[context] sequences have at most {limit:,} tokens, the context that the model "
                f"was made for {why}",
                stacklevel=3,
            )
        return None if window is not None else limit
    length = as_integer(max_model_len)
    if window is not None and length is not None and length >= 2:
        return length
    if length is None or not 2 <= length <= limit:
        raise ArgumentError(
            f"[context] max_model_len must be a whole number within 2..{limit}, the context that "
            f"the model was made for{why and ' ' + why}, got {shown(max_model_len)}",
            "max_model_len",
        )
    return length
