"""Logits of last tokens only: the last layer leaves out what was not asked for, and nothing else
changes.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import demo_model_path, load, make_kv_cache
from mlx_paged.cache import Sequences

PACKAGE = Path(mlx_paged.__file__).parent
PROMPTS = {"long": list(range(1, 41)), "short": [7], "middle": list(range(100, 117))}
CHUNK = {"long": [5, 6, 7], "short": [8], "middle": [9, 10]}


@pytest.fixture(scope="module")
def model():
    return load(demo_model_path())[0]


def run(model, kind: str, only_last: bool) -> tuple[list[mx.array], list[mx.array]]:
    """Logits of the last rows of two ragged steps, and the K/V they left."""
    seqs = Sequences(make_kv_cache(model, kind, kv_cache_bytes="64blocks"))
    logits = []
    for batch in (PROMPTS, CHUNK):
        tokens = mx.array([token for tokens in batch.values() for token in tokens])
        with seqs.step({seq: len(tokens) for seq, tokens in batch.items()}) as step:
            if only_last:
                logits.append(model(tokens, seqs.cache.layers, step.logit_rows))
            else:
                logits.append(model(tokens, seqs.cache.layers)[step.logit_rows])
            mx.eval(logits, seqs.cache.arrays)
    return logits, [
        seqs.materialize(seq, layer)[0] for seq in batch for layer in range(len(seqs.cache.layers))
    ]


@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_the_logits_of_last_tokens_are_those_of_a_full_forward(model, kind: str):
    (logits, keys), (expected, expected_keys) = run(model, kind, True), run(model, kind, False)
    for got, want in zip(logits, expected, strict=True):
        assert got.shape == (3, model.args.vocab_size)
        assert mx.allclose(got, want, rtol=1e-5, atol=1e-5)
    assert all(mx.array_equal(got, want) for got, want in zip(keys, expected_keys, strict=True))


def test_the_last_layer_computes_no_queries_but_those_of_last_tokens(model, monkeypatch):
    num_rows = []
    mlp = type(model.layers[-1].mlp)
    monkeypatch.setattr(
        mlp,
        "__call__",
        lambda self, x, call=mlp.__call__: num_rows.append(x.shape[0]) or call(self, x),
    )
    run(model, "paged", True)
    num_layers = len(model.layers)
    assert num_rows == [58] * (num_layers - 1) + [3] + [6] * (num_layers - 1) + [3]


def test_two_frames_of_ours_lie_between_the_call_of_a_model_and_a_layer_of_the_cache(model):
    seqs = Sequences(make_kv_cache(model, kv_cache_bytes="64blocks"))
    layer = seqs.cache.layers[0]
    stacks = []

    def recording(*args: mx.array, **kwargs: float) -> mx.array:
        frames = inspect.stack(0)[1:]
        stacks.append([f.function for f in frames if Path(f.filename).is_relative_to(PACKAGE)])
        return type(layer).update_and_attend(layer, *args, **kwargs)

    layer.update_and_attend = recording
    with seqs.step({"a": 3}) as step:
        mx.eval(model(mx.array([1, 2, 3]), seqs.cache.layers, step.logit_rows), seqs.cache.arrays)
    assert stacks == [["__call__"] * 2]  # Attention, Model
