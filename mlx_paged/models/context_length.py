"""How long a sequence a model was made for, as its configuration says it."""

from __future__ import annotations

from typing import Any

# These kinds of RoPE scaling are counted in max_position_embeddings already; the others multiply it.
_ALREADY_SCALED = ("default", "llama3", "longrope", "su", "mrope")


def context_length(args: Any) -> int:
    """The tokens, prompt and answer together, that a model of this configuration was made for.

    That is ``max_position_embeddings``, with RoPE scaling counted as the configuration means it (the rule is vLLM's):
    YaRN's ``factor`` multiplies ``original_max_position_embeddings``, a linear ``factor`` multiplies
    ``max_position_embeddings``, and Llama 3 and LongRoPE scaling are part of ``max_position_embeddings``.

    Args:
        args: a model's ``ModelArgs``.
    """
    limit = args.max_position_embeddings
    scaling = args.rope_scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind in _ALREADY_SCALED:
        return int(limit)
    if kind == "yarn":
        limit = scaling.get("original_max_position_embeddings", limit)
    return int(limit * scaling.get("factor", 1.0))
