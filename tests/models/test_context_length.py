"""The context that a configuration means, for each kind of RoPE scaling."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlx_paged.models.context_length import context_length


@pytest.mark.parametrize(
    ("max_position_embeddings", "rope_scaling", "expected"),
    [
        (40960, None, 40960),
        (40960, {}, 40960),
        (32768, {"rope_type": "default"}, 32768),
        # Qwen3's model cards: YaRN beside the max_position_embeddings of the model without it.
        (
            40960,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            131072,
        ),
        (32768, {"type": "yarn", "factor": 2.0}, 65536),
        (4096, {"type": "linear", "factor": 2.5}, 10240),
        (
            131072,
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            131072,
        ),
        (131072, {"type": "longrope", "original_max_position_embeddings": 4096}, 131072),
    ],
)
def test_the_context_is_what_the_configuration_means(
    max_position_embeddings, rope_scaling, expected
):
    args = SimpleNamespace(
        max_position_embeddings=max_position_embeddings, rope_scaling=rope_scaling
    )
    assert context_length(args) == expected
