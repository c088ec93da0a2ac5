"""What a sampler returns, checked.

A sampler is a function from log-probabilities ``[num_seqs, vocab_size]`` to token ids
``[num_seqs]``, such as mlx-lm's ``make_sampler`` returns."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlx_paged.argument_values import kind_of

Sampler = Callable[[mx.array], mx.array]

_INTEGER_DTYPES = (mx.uint32, mx.int32, mx.int64, mx.uint64, mx.int16, mx.uint16, mx.int8, mx.uint8)


def check_sampled(sampled: object, num_seqs: int) -> mx.array:
    """What a sampler returned, if it can be token ids ``[num_seqs]``, whatever their values.

    Raises:
        ValueError: it is no array, or has another shape or dtype.
    """
    if not isinstance(sampled, mx.array):
        raise ValueError(
            f"[sampler] a sampler returns an array of token ids, got {kind_of(sampled)}"
        )
    if sampled.shape != (num_seqs,) or sampled.dtype not in _INTEGER_DTYPES:
        raise ValueError(
            f"[sampler] a sampler returns integers of shape ({num_seqs},), got {sampled.dtype} of "
            f"shape {tuple(sampled.shape)}"
        )
    return sampled


def check_sampled_token(token: int, vocab_size: int) -> int:
    """A sampled token, if the model has it; an embedding would look up any number in silence.

    Raises:
        ValueError: the token is outside the vocabulary.
    """
    if not 0 <= token < vocab_size:
        raise ValueError(
            f"[sampler] the sampler chose token {token}, outside the model's vocabulary of "
            f"{vocab_size}"
        )
    return token
