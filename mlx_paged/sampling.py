"""Samplers: functions from log-probabilities ``[num_seqs, vocab_size]`` to token ids
``[num_seqs]``.

They are mlx-lm's own; here their arguments are checked first. mlx-lm takes any number in silence,
and where it does raise, it is inside a function that MLX compiles, which fails from then on for
every sampler of the process."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlx_paged.argument_values import check_integer, check_number, kind_of
from mlx_paged.foreign_arguments import refuses_unknown_arguments

Sampler = Callable[[mx.array], mx.array]

_INTEGER_DTYPES = (mx.uint32, mx.int32, mx.int64, mx.uint64, mx.int16, mx.uint16, mx.int8, mx.uint8)


@refuses_unknown_arguments("sampler")
def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
) -> Sampler:
    """A sampler as ``mlx_lm.sample_utils.make_sampler`` makes it; seed it with ``mx.random.seed``.

    Args:
        temp: temperature; 0 takes the most likely token and ignores the rest.
        top_p: keep the most likely tokens that together reach this probability; 0 and 1 keep all.
        min_p: keep tokens at least this likely, relative to the most likely one.
        min_tokens_to_keep: as many survive ``min_p`` in any case.
        top_k: keep so many of the most likely tokens; 0, and as many as there are or more, keep
            all.

    Raises:
        ValueError: a value of another type, or out of its range.
    """
    temp = check_number("sampler", "temp", temp, 0)
    top_p = check_number("sampler", "top_p", top_p, 0, 1, "within 0..1")
    min_p = check_number("sampler", "min_p", min_p, 0, 1, "within 0..1")
    top_k = check_integer("sampler", "top_k", top_k, 0)
    min_tokens_to_keep = check_integer("sampler", "min_tokens_to_keep", min_tokens_to_keep, 1)
    from mlx_lm.sample_utils import make_sampler as make_mlx_lm_sampler

    def make(vocab_size: float) -> Sampler:
        # Of as many tokens as there are, or more, mlx-lm's filters can't choose; they would keep
        # them all.
        return make_mlx_lm_sampler(
            temp=temp,
            top_p=top_p,
            min_p=min_p if min_tokens_to_keep < vocab_size else 0.0,
            min_tokens_to_keep=min_tokens_to_keep,
            top_k=top_k if top_k < vocab_size else 0,
        )

    largest = max(top_k, min_tokens_to_keep)
    sampler = make(largest + 1)

    def sample(logprobs: mx.array) -> mx.array:
        vocab_size = logprobs.shape[-1]
        return sampler(logprobs) if largest < vocab_size else make(vocab_size)(logprobs)

    return sample


def check_sampled(sampled: object, num_seqs: int) -> mx.array:
    """What a sampler returned, if it can be token ids ``[num_seqs]``; their values are not looked
    at.

    Raises:
        ValueError: no array, or one of another shape or dtype.
    """
    if not isinstance(sampled, mx.array):
        raise ValueError(
            f"[sampler] a sampler returns an array of token ids, got {kind_of(sampled)}"
        )
    if sampled.shape != (num_seqs,) or sampled.dtype not in _INTEGER_DTYPES:
        raise ValueError(
            f"[sampler] a sampler returns integers of shape ({num_seqs},), got {sampled.dtype} of shape "
            f"{tuple(sampled.shape)}"
        )
    return sampled


def check_sampled_token(token: int, vocab_size: int) -> int:
    """A sampled token, if the model has it; an embedding looks up any number in silence.

    Raises:
        ValueError: it is outside the vocabulary.
    """
    if not 0 <= token < vocab_size:
        raise ValueError(
            f"[sampler] the sampler chose token {token}, outside the model's vocabulary of {vocab_size}"
        )
    return token
