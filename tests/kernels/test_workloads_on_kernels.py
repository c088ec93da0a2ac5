"""Random requests of every kind on the emulated kernels, with the answers of plain MLX: models with
latents, with capped scores, with K and V of different widths, and with wide rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.nn as nn
import pytest
from helpers.mlx_lm_models import DEEPSEEK_V3, LLAMA, Config, random_model
from helpers.workloads import Run, Workload, assert_all_same
from helpers.write_rules import slots_of_the_step
from metal_emulator import Checks
from paged_testing.emulated_metal import emulated_metal

from mlx_paged.models.mlx_lm import adapt
from mlx_paged.models.mlx_lm.packed import PackedModel

LATENTS: Config = {**DEEPSEEK_V3, "kv_lora_rank": 256, "qk_rope_head_dim": 64}
MINICPM3: Config = {  # K of 96 and V of 64
    **LLAMA,
    "model_type": "minicpm3",
    "hidden_size": 256,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "scale_depth": 1.4,
    "scale_emb": 2.0,
    "dim_model_base": 256,
    "max_position_embeddings": 1024,
    "rope_scaling": {
        "type": "longrope",
        "long_factor": [1.0] * 16,
        "short_factor": [1.0] * 16,
        "original_max_position_embeddings": 1024,
    },
}
CONFIGS = {
    "latents": LATENTS,
    "two_widths": MINICPM3,
    "rows_of_512": {**LLAMA, "head_dim": 512},
    "capped_scores": LLAMA,
}


class CappedModel(PackedModel):
    """Whose scores are capped, near enough to matter."""

    @property
    def layer_specs(self) -> list[Any]:
        return [replace(spec, softcap=2.0) for spec in super().layer_specs]


def model_of(name: str) -> nn.Module:
    config = CONFIGS[name]
    model = adapt(random_model(config), config)
    if name == "capped_scores":
        model.__class__ = CappedModel
    return model


def both(name: str, seed: int, num_requests: int, **options: Any) -> tuple[Run, Run, set[str]]:
    """Answers on kernels and in plain MLX, and the kernels that were called."""
    workload = Workload(seed, num_requests, 256)
    waiting = workload.run(model_of(name), backend="reference", **options)
    with emulated_metal(Checks.quick(writable=slots_of_the_step)) as trace:
        ahead = workload.run(model_of(name), backend="metal", **options)
    return ahead, waiting, {call.kernel.removeprefix("mlx_paged_") for call in trace}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_requests_of_every_kind_get_the_answers_of_plain_mlx(name, compiler):
    ahead, waiting, called = both(name, seed=1, num_requests=5)
    assert_all_same(ahead, waiting)
    assert {"paged_attention", "gather_blocks"} <= called


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latents", "two_widths"])
def test_quantised_rows_get_the_tokens_of_plain_mlx(name, compiler):
    # A number may lie between two steps, where a rounding decides: tokens alone are compared.
    ahead, waiting, called = both(name, seed=1, num_requests=5, kv_format="K:8,V:4")
    assert ahead.answers == waiting.answers
    assert {"paged_attention_affine", "encode_and_cache", "dequantize_blocks"} <= called
