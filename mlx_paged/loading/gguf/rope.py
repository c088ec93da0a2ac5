"""The RoPE scaling of a GGUF file."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_paged.errors import shown
from mlx_paged.loading.folder import LoadError
from mlx_paged.loading.gguf.files import GGUFFile
from mlx_paged.loading.gguf.metadata import Metadata

FACTORS = "rope_freqs.weight"
# The other fields of Llama 3's scaling, equal in all of its models; the file has only factors.
_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# What is read of the keys under ``<architecture>.rope``.
ROPE_KEYS = (
    "scaling.type", "scaling.factor", "scaling.original_context_length", "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow", "scaling.yarn_ext_factor", "scale_linear",
)  # fmt: skip


def rope_scaling(
    file: GGUFFile, architecture: str, config: dict[str, Any]
) -> dict[str, Any] | None:
    """The ``rope_scaling`` of ``config.json``; ``None`` for unscaled RoPE.

    As in llama.cpp, a file that names no kind of scaling means linear, ``rope.scale_linear`` is the
    old name of the factor, and a linear factor of 0, or none at all, scales nothing.

    Raises:
        LoadError: the kind of scaling is not supported.
    """
    metadata, prefix = file.metadata, f"{architecture}.rope"
    kind = _kind(metadata, prefix)
    factor = 1.0 if kind == "none" else _factor(metadata, prefix, required=kind == "yarn")
    if FACTORS in file.tensors:
        if factor != 1:
            raise LoadError(
                f"[load] {file.path} has both {FACTORS} and {kind} scaling of RoPE by {factor:g}; "
                "only one of them is supported"
            )
        return _scaling_by_factors(file, config)
    if factor == 1:
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.integer(
            f"{prefix}.scaling.original_context_length", config["max_position_embeddings"], low=1
        )
        for name in ("beta_fast", "beta_slow"):
            if f"{prefix}.scaling.yarn_{name}" in metadata:
                scaling[name] = metadata.number(f"{prefix}.scaling.yarn_{name}")
    return scaling


def _kind(metadata: Metadata, prefix: str) -> str:
    kind = metadata.text(f"{prefix}.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise LoadError(
            f"[load] {metadata.file}: {prefix}.scaling.type {shown(kind)} is not supported; "
            "linear and yarn are"
        )
    # Of YaRN's corrected frequencies: all of them, or none; negative for what the kind implies.
    share = metadata.values.get(f"{prefix}.scaling.yarn_ext_factor", -1)
    if share not in (-1, 1 if kind == "yarn" else 0):
        raise LoadError(
            f"[load] {metadata.file}: {prefix}.scaling.yarn_ext_factor is {shown(share)}, which is "
            f"not supported with {prefix}.scaling.type {kind}"
        )
    return kind


def _factor(metadata: Metadata, prefix: str, *, required: bool) -> float:
    """What divides the positions; 1 if nothing does."""
    key, old_key = f"{prefix}.scaling.factor", f"{prefix}.scale_linear"
    if key not in metadata and old_key in metadata:
        key = old_key
    return metadata.number(key, None if required else 0.0, or_zero=True) or 1.0


def _scaling_by_factors(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """The scaling for a file with factors that divide the frequencies.

    That is Llama 3's if its formula gives these factors. Others become LongRoPE with an unextended
    context, which computes the same with one more operation.
    """
    factors = _read_factors(file, config["head_dim"] // 2)
    llama_3 = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA_3}
    plain = config["rope_theta"] ** (
        mx.arange(0, config["head_dim"], 2, dtype=mx.float32) / config["head_dim"]
    )
    rope = Llama3RoPE(config["head_dim"], base=config["rope_theta"], scaling_config=llama_3)
    if np.allclose(np.array(rope._freqs / plain), factors, rtol=1e-5, atol=0):
        return llama_3
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": config["max_position_embeddings"],
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
    }


def _read_factors(file: GGUFFile, expected: int) -> np.ndarray[Any, Any]:
    info = file.tensors[FACTORS]
    if info.type_name != "F32" or info.shape != (expected,):
        raise LoadError(
            f"[load] {file.path}: {FACTORS} must be {expected} numbers of F32, and is "
            f"{info.type_name} of the shape {list(info.shape)}"
        )
    factors = file.read(FACTORS).view(np.float32).reshape(-1)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise LoadError(
            f"[load] {file.path}: {FACTORS} has numbers that are not finite and positive"
        )
    return factors
