"""A model whose layers have different KV heads, widths, windows and formats, on both kinds of
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from helpers.cache_helpers import copy_rows

from mlx_paged import make_kv_cache
from mlx_paged.cache import KVCache, LayerKV, LayerSpec, Sequences
from mlx_paged.models.language_model import LanguageModel

HIDDEN, VOCAB = 12, 40
# Query heads and spec of each layer.
LAYERS = [
    (4, LayerSpec(2, 8, 8)),
    (6, LayerSpec(3, 4, 12, window=5)),
    (2, LayerSpec(1, 16, 8, window=19)),
]


@dataclass
class Args:
    vocab_size: int = VOCAB
    max_position_embeddings: int = 1000
    rope_scaling: None = None


class ToyModel(LanguageModel):
    """Attention only, with positions added to the embeddings and sinks in every layer."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.args = Args()
        self.weights = [
            {
                "q": rng.normal(0, 0.2, (HIDDEN, num_heads * spec.key_dim)),
                "k": rng.normal(0, 0.2, (HIDDEN, spec.num_kv_heads * spec.key_dim)),
                "v": rng.normal(0, 0.2, (HIDDEN, spec.num_kv_heads * spec.value_dim)),
                "o": rng.normal(0, 0.1, (num_heads * spec.value_dim, HIDDEN)),
                "sinks": rng.normal(0, 1, num_heads),
            }
            for num_heads, spec in LAYERS
        ]
        self.embeddings = rng.normal(0, 1, (VOCAB, HIDDEN))

    @property
    def dtype(self) -> mx.Dtype:
        return mx.float32

    @property
    def layer_specs(self) -> list[LayerSpec]:
        return [spec for _, spec in LAYERS]

    def __call__(
        self, tokens: mx.array, layers: Sequence[LayerKV], logit_rows: mx.array | None = None
    ) -> mx.array:
        embeddings = mx.array(self.embeddings, dtype=mx.float32)
        h = embeddings[tokens] + mx.cos(layers[0].offset[:, None] * mx.arange(1, HIDDEN + 1))
        for index, (kv, (num_heads, spec)) in enumerate(zip(layers, LAYERS, strict=True)):
            weights = {
                name: mx.array(weight, dtype=mx.float32)
                for name, weight in self.weights[index].items()
            }
            k = (h @ weights["k"]).reshape(len(h), spec.num_kv_heads, -1)
            v = (h @ weights["v"]).reshape(len(h), spec.num_kv_heads, -1)
            if index == len(layers) - 1 and logit_rows is not None:
                h = h[logit_rows]
            q = (h @ weights["q"]).reshape(len(h), num_heads, -1)
            out = kv.update_and_attend(q, k, v, scale=0.5, sinks=weights["sinks"])
            h = h + out.reshape(len(h), -1) @ weights["o"]
        return h @ embeddings.T

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Of every token of one sequence, by the formula in float64."""
        positions = np.arange(len(tokens))
        h = self.embeddings[list(tokens)] + np.cos(
            positions[:, None].astype(np.float64) * np.arange(1, HIDDEN + 1)
        )
        for (num_heads, spec), weights in zip(LAYERS, self.weights, strict=True):
            q, k, v = (h @ weights[name] for name in "qkv")
            q = q.reshape(len(h), num_heads, -1)
            k, v = (
                np.repeat(
                    x.reshape(len(h), spec.num_kv_heads, -1), num_heads // spec.num_kv_heads, 1
                )
                for x in (k, v)
            )
            scores = np.einsum("qhd,khd->hqk", q, k) * 0.5
            distance = positions[:, None] - positions
            seen = (distance >= 0) & (distance < (spec.window or len(tokens)))
            sinks = np.broadcast_to(weights["sinks"][:, None, None], (num_heads, len(h), 1))
            scores = np.concatenate([np.where(seen, scores, -np.inf), sinks], axis=-1)
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            weight = weight[..., :-1] / weight.sum(-1, keepdims=True)
            out = np.einsum("hqk,khd->qhd", weight, v)
            h = h + out.reshape(len(h), -1) @ weights["o"]
        return h @ self.embeddings.T


class Feeder:
    """A toy model on a cache, and the tokens that each sequence has."""

    def __init__(self, kind: str):
        self.model = ToyModel()
        self.cache: KVCache = make_kv_cache(
            self.model, kind, block_size=8, kv_cache_bytes="40blocks", backend="reference"
        )
        self.seqs = Sequences(self.cache)
        self.tokens: dict[str, list[int]] = {}
        self.rng = np.random.default_rng(1)

    def feed(self, counts: dict[str, int], num_logit_rows: dict[str, int] | None = None) -> None:
        """One step of new tokens, whose wanted logits must be those of the formula."""
        new = {seq: self.rng.integers(0, VOCAB, n).tolist() for seq, n in counts.items()}
        for seq, tokens in new.items():
            self.tokens[seq] = self.tokens.get(seq, []) + tokens
        wanted = num_logit_rows or dict.fromkeys(counts, 1)
        packed = mx.array([token for tokens in new.values() for token in tokens])
        with self.seqs.step(counts, [wanted[seq] for seq in counts]) as step:
            logits = self.model(packed, self.cache.layers, step.logit_rows)
            mx.eval(logits, self.cache.arrays)
        expected = [self.model.logits(self.tokens[seq])[-n:] for seq, n in wanted.items() if n]
        if not expected:  # one row is there all the same
            expected = [self.model.logits(self.tokens[list(counts)[-1]])[-1:]]
        np.testing.assert_allclose(np.array(logits), np.concatenate(expected), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_logits_are_those_of_the_formula_over_chunks_forks_and_trims(kind: str):
    feeder = Feeder(kind)
    feeder.feed({"a": 13, "b": 1, "c": 30})
    feeder.feed({"a": 1, "b": 1, "c": 1})
    feeder.feed({"c": 6, "a": 17})
    feeder.seqs.fork("c", "d")
    feeder.tokens["d"] = list(feeder.tokens["c"])
    feeder.feed({"c": 1, "d": 3, "b": 9})
    feeder.seqs.trim("a", 11)
    feeder.tokens["a"] = feeder.tokens["a"][:11]
    feeder.feed({"d": 1, "a": 2, "e": 25})
    copy_rows(feeder.seqs, "a", feeder.seqs, "f")
    feeder.tokens["f"] = list(feeder.tokens["a"])
    feeder.seqs.free("a")
    feeder.feed({seq: 1 for seq in "bcdef"})


@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_any_number_of_rows_of_logits_may_be_wanted_of_each_sequence(kind: str):
    feeder = Feeder(kind)
    feeder.feed({"a": 13, "b": 4, "c": 30}, {"a": 0, "b": 4, "c": 2})
    feeder.feed({"a": 5, "b": 1, "c": 1}, {"a": 5, "b": 1, "c": 1})
    feeder.feed({"a": 5, "b": 3}, {"a": 3, "b": 0})
    feeder.feed({"c": 5, "b": 3}, {"c": 0, "b": 0})
    feeder.feed({"a": 1, "b": 1, "c": 1}, {"a": 0, "b": 1, "c": 0})


def test_the_rows_of_one_kind_go_on_in_the_other():
    one, other = Feeder("paged"), Feeder("basic")
    one.feed({"a": 21})
    copy_rows(one.seqs, "a", other.seqs, "a")
    other.tokens["a"] = list(one.tokens["a"])
    other.feed({"a": 4})


def test_slabs_of_layers_that_differ_grow_and_shrink_together():
    cache = Feeder("paged").cache
    bytes_per_block = [spec.nbytes_per_token * 8 for _, spec in LAYERS]
    assert cache.config.nbytes_per_block == sum(bytes_per_block)
    cache = type(cache)(cache.config, initial_blocks=2)
    for num_blocks in (3, 5, 9):
        assert [layer.kv.nbytes for layer in cache.layers] == [
            n * num_blocks for n in bytes_per_block
        ]
        cache.make_room(cache.pool.num_usable_blocks + 1)
    cache.shrink()
    assert [layer.kv.nbytes for layer in cache.layers] == [n * 3 for n in bytes_per_block]
    assert cache.nbytes_held == 3 * cache.config.nbytes_per_block
