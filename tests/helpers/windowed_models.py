"""Models and engines whose tokens leave a window."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from helpers.engine_runs import CONFIG, livelier_model
from mlx_paged.models import qwen3

# A window with sinks for a model that sees all, one without, layers with windows, and both.
KINDS = {
    "streaming": ({}, {"window": 48, "num_sink_tokens": 8}),
    "no sinks": ({}, {"window": 32, "num_sink_tokens": 0}),
    "layers": ({"num_hidden_layers": 4, "max_window_layers": 2}, {}),
    "all layers": ({"num_hidden_layers": 2, "max_window_layers": 0}, {}),
    "both": (
        {"num_hidden_layers": 3, "max_window_layers": 2},
        {"window": 40, "num_sink_tokens": 3},
    ),
}


def model_and_options(kind: str, **more: Any) -> tuple[qwen3.Model, dict]:
    """A model, which must not be changed, and options of an engine."""
    return _model(kind, **more), {"block_size": 8, "kv_cache_bytes": "100blocks", **KINDS[kind][1]}


def lively_model_and_options(kind: str) -> tuple[qwen3.Model, dict]:
    """The same with a model whose log-probabilities differ a lot from one context to the next."""
    return _lively_model(kind), {"block_size": 8, "kv_cache_bytes": "100blocks", **KINDS[kind][1]}


@cache
def _lively_model(kind: str) -> qwen3.Model:
    return livelier_model(_config(kind))


@cache
def _model(kind: str, **more: Any) -> qwen3.Model:
    mx.random.seed(3)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(_config(kind) | more))
    mx.eval(model.parameters())
    return model


def _config(kind: str) -> dict[str, Any]:
    changes = KINDS[kind][0]
    if changes:
        changes = {**changes, "use_sliding_window": True, "sliding_window": 20}
    return CONFIG | changes
