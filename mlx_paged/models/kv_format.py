"""The format in which a cache stores a model's K/V, and its effect on the model's predictions.

Some models have channels of K that are far larger than the others and nearly constant, for example
because of a bias (Qwen2). Then 4 bits have few levels left for the differences between tokens.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_paged.cache import KVFormat, LayerSpec
from mlx_paged.config import KVBits
from mlx_paged.models.context_length import context_length
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.run_step import probe_ids, probe_sequences, run_step

# The divergence of 512 tokens is up to three times as large, both with and without such channels
# (docs/internals/measured.md), so these are enough.
NUM_TOKENS = 64
# In nats: exp(divergence) is the factor on the perplexity of the model's own text, so this is a
# tenth more. 4 bits are far below it for even K, and far above it for K with a bias of 20 times its
# spread (docs/internals/measured.md).
MAX_DIVERGENCE = 0.1
# In ascending order of size.
FINER = (KVBits(8, 4), KVBits(8, 8))


def stored_as(bits: KVBits | None, layers: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
    """The layers with K and V in these bits; unchanged for ``None``.

    Raises:
        ArgumentError: a layer's rows can't be stored in these bits.
    """
    if bits is None:
        return layers
    return [
        replace(
            spec,
            format=KVFormat.quantised(bits, spec.key_dim, spec.value_dim, spec.format.key.dtype),
        )
        for spec in layers
    ]


def warn_if_coarse(model: LanguageModel, bits: KVBits) -> None:
    """Warn if this format changes the model's predictions too much, and name a better one. Computed
    once per model and format, since ``generate`` makes a cache for each call.
    """
    if id(model) not in _lines:
        _lines[id(model)] = {}
        weakref.finalize(model, _lines.pop, id(model), None).atexit = False
    lines = _lines[id(model)]
    if bits not in lines:
        lines[bits] = _line_of(model, bits)
    line = lines[bits]
    if line is not None:
        warnings.warn(line, stacklevel=3)


# By the id of a model, for as long as it lives: the warning for each format, if there is one.
_lines: dict[int, dict[KVBits, str | None]] = {}


def _line_of(model: LanguageModel, bits: KVBits) -> str | None:
    """The warning for a format, if one is needed.

    The model generates 64 tokens, and reads them again with K/V in these bits. Random tokens would
    not serve: what a trained model predicts after them is almost random, and changes more than its
    predictions of real text.
    """
    ids, exact = own_text(model, min(NUM_TOKENS, context_length(model.args)))
    found = divergence(exact, log_probabilities(model, bits, ids))
    if found <= MAX_DIVERGENCE:
        return None
    way_out = "leave the format out"
    for finer in FINER:
        if finer.key + finer.value > bits.key + bits.value:
            of_finer = divergence(exact, log_probabilities(model, finer, ids))
            if of_finer <= MAX_DIVERGENCE:
                way_out = f"{finer} changes them by {of_finer:.2g}"
                break
    return (
        f"[kv cache] K/V in {bits} change what this model predicts by {found:.2g} nats per token "
        f"(up to {math.exp(found):.2g} times the perplexity); {way_out}"
    )


def own_text(model: LanguageModel, num_tokens: int) -> tuple[list[int], mx.array]:
    """Tokens that the model samples with fixed seeds, and its log-probabilities after each of them,
    ``[num_tokens, vocab_size]`` float32, with unquantised K/V.
    """
    sequences, ids = probe_sequences(model, num_tokens), probe_ids(model.args.vocab_size, 1)
    rows: list[mx.array] = []
    for index in range(num_tokens):
        rows.append(_log_softmax(run_step(model, sequences, {"a": ids[-1:]}, [1])))
        drawn: int = mx.random.categorical(rows[-1][0], key=mx.random.key(index)).item()  # type: ignore[assignment]
        ids.append(drawn)
    return ids[:-1], mx.concatenate(rows)


def log_probabilities(model: LanguageModel, bits: KVBits | None, ids: Sequence[int]) -> mx.array:
    """Log-probabilities after each token of a prompt, with K/V in these bits,
    ``[num_tokens, vocab_size]`` float32.
    """
    sequences = probe_sequences(model, len(ids), stored_as(bits, model.layer_specs))
    return _log_softmax(run_step(model, sequences, {"a": ids}, [len(ids)]))


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    normalised: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return normalised


def divergence(exact: mx.array, found: mx.array) -> float:
    """The Kullback-Leibler divergence of two results of :func:`log_probabilities`, in nats per
    token.
    """
    per_token = mx.where(exact > -mx.inf, mx.exp(exact) * (exact - found), 0).sum(-1)
    mean: float = per_token.mean().item()  # type: ignore[assignment]
    return mean
