"""The fields of ``config.json`` that are read for any model of mlx-lm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_paged.options.argument_values import is_plain_integer

_CONTEXT_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_context_length",
    "n_ctx",
    "seq_length",
    "model_max_length",
)
# Names for the number of experts per token.
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
# For configurations that give none, such as those of recurrent models.
UNKNOWN_CONTEXT_LENGTH = 2**20
# Parts of a configuration that describe modules which are not run here.
OTHER_PARTS = ("vision_config", "audio_config")


def describe(config: dict[str, Any], way: str) -> str:
    """A model's type and how it runs, in words."""
    is_part = any(config.get(name) for name in OTHER_PARTS)
    return f"{config.get('model_type')} of mlx-lm, {way}{', its text part only' if is_part else ''}"


@dataclass
class MlxLmArgs:
    """The fields of a configuration that are read outside of the model."""

    vocab_size: int
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None

    @classmethod
    def read(cls, config: dict[str, Any], vocab_size: int) -> MlxLmArgs:
        """Read them from ``config.json``, and from its ``text_config`` if there is one."""
        text = config.get("text_config")
        sources = [config, text] if isinstance(text, dict) else [config]
        found = [source.get(name) for name in _CONTEXT_LENGTHS for source in sources]
        lengths = [length for length in found if is_plain_integer(length, 1)]
        scaling = next(filter(None, map(_rope_scaling, sources)), None)
        # Gemma 3's context length already includes the scaling (as in vLLM).
        if str(config.get("model_type")).startswith("gemma3"):
            scaling = None
        length = lengths[0] if lengths else UNKNOWN_CONTEXT_LENGTH
        return cls(vocab_size, length, scaling)


def _rope_scaling(config: dict[str, Any]) -> dict[str, Any] | None:
    """The scaling of all layers; ``None`` where each kind of layer has its own."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = config.get(name)
        if isinstance(scaling, dict) and isinstance(
            scaling.get("rope_type") or scaling.get("type"), str
        ):
            return scaling
    return None
