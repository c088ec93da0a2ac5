"""The RoPE scaling of a GGUF file."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_paged.errors import shown
from mlx_paged.loading.folder import LoadError
from mlx_paged.loading.gguf.files import GGUFFile

FACTORS = "rope_freqs.weight"
# The other fields of Llama 3's scaling, equal in all of its models; the file has only factors.
_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Factors of YaRN that the configurations of these models do not support.
_NEUTRAL_AT_1 = ("attn_factor", "yarn_ext_factor", "yarn_attn_factor")


def rope_scaling(
    file: GGUFFile, architecture: str, config: dict[str, Any]
) -> dict[str, Any] | None:
    """The ``rope_scaling`` of ``config.json``; ``None`` for unscaled RoPE.

    Raises:
        LoadError: the kind of scaling is not supported.
    """
    metadata, prefix = file.metadata, f"{architecture}.rope.scaling"
    kind = metadata.text(f"{prefix}.type", "none")
    if FACTORS in file.tensors:
        if kind != "none":
            raise LoadError(
                f"[load] {file.path} has both {FACTORS} and {prefix}.type {shown(kind)}; only one "
                "of them is supported"
            )
        return _scaling_by_factors(file, config)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise LoadError(
            f"[load] {file.path}: {prefix}.type {shown(kind)} is not supported; linear and yarn are"
        )
    for name in _NEUTRAL_AT_1:
        if metadata.values.get(f"{prefix}.{name}", 1.0) != 1.0:
            raise LoadError(
                f"[load] {file.path}: {prefix}.{name} other than 1 is not supported, got "
                f"{shown(metadata.values[f'{prefix}.{name}'])}"
            )
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": metadata.number(f"{prefix}.factor"),
    }
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.integer(
            f"{prefix}.original_context_length", low=1
        )
        for name in ("beta_fast", "beta_slow"):
            if f"{prefix}.yarn_{name}" in metadata:
                scaling[name] = metadata.number(f"{prefix}.yarn_{name}")
    return scaling


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
