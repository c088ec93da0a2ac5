"""The format in which a cache stores a model's K/V, and what it does to the model's predictions.

Some models have channels of K that are far larger than the others and hardly change, as where a
bias is added to them (Qwen2). Then few steps of 4 bits are left for what sets tokens apart.
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

# Enough to tell: the divergence of 512 tokens is up to three times as large, with and without such
# channels (docs/internals/measured.md).
NUM_TOKENS = 64
# In nats: exp(divergence) is the factor on the perplexity of what the model itself would write, so
# this is a tenth more. 4 bits stay far below it where K is even, and are far above it where K has a
# bias of 20 times its spread (docs/internals/measured.md).
MAX_DIVERGENCE = 0.1
# From the one that takes the fewest bytes.
FINER = (KVBits(8, 4), KVBits(8, 8))


def stored_as(bits: KVBits | None, layers: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
    """The layers with K and V in these bits; as they are for ``None``.

    Raises:
        ArgumentError: a layer's rows can't be stored so.
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
    """Say in a line that the model's predictions suffer in this format, and which one is better. It
    is found out once for a model: ``generate`` makes a cache for each call.
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


# By the id of a model, for as long as it lives: what is said of each format, if anything is.
_lines: dict[int, dict[KVBits, str | None]] = {}


def _line_of(model: LanguageModel, bits: KVBits) -> str | None:
    """What is to be said of a format.

    The model writes 64 tokens of its own, and reads them again with K/V in these bits. Tokens of no
    meaning would not do: what a trained model predicts after them is as good as random, and
    changes by more than what it predicts of a text.
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
    """Tokens that the model draws one by one, the same each time, and its log-probabilities of
    what follows each of them, ``[num_tokens, vocab_size]`` float32, with K/V as they are.
    """
    sequences, ids = probe_sequences(model, num_tokens), probe_ids(model.args.vocab_size, 1)
    rows: list[mx.array] = []
    for index in range(num_tokens):
        rows.append(_log_softmax(run_step(model, sequences, {"a": ids[-1:]}, [1])))
        drawn: int = mx.random.categorical(rows[-1][0], key=mx.random.key(index)).item()  # type: ignore[assignment]
        ids.append(drawn)
    return ids[:-1], mx.concatenate(rows)


def log_probabilities(model: LanguageModel, bits: KVBits | None, ids: Sequence[int]) -> mx.array:
    """Of what follows each token of a prompt, with K/V in these bits, ``[num_tokens, vocab_size]``
    float32.
    """
    sequences = probe_sequences(model, len(ids), stored_as(bits, model.layer_specs))
    return _log_softmax(run_step(model, sequences, {"a": ids}, [len(ids)]))


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    normalised: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return normalised


def divergence(exact: mx.array, found: mx.array) -> float:
    """Kullback and Leibler's, in nats per token, of two answers of :func:`log_probabilities`."""
    per_token = mx.where(exact > -mx.inf, mx.exp(exact) * (exact - found), 0).sum(-1)
    mean: float = per_token.mean().item()  # type: ignore[assignment]
    return mean
