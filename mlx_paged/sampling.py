"""Samplers: functions from log-probabilities ``[num_seqs, vocab_size]`` to token ids ``[num_seqs]``.

They are mlx-lm's own; here their arguments are checked first, because a sampler accepts any number in silence.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]


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
        top_k: keep so many of the most likely tokens; 0 keeps all.

    Raises:
        ValueError: a value out of its range.
    """
    if not temp >= 0:
        raise ValueError(f"[sampler] temp must be at least 0, got {temp}")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if not 0 <= value <= 1:
            raise ValueError(f"[sampler] {name} must be within 0..1, got {value}")
    if top_k < 0:
        raise ValueError(f"[sampler] top_k must be at least 0, got {top_k}")
    if min_tokens_to_keep < 1:
        raise ValueError(f"[sampler] min_tokens_to_keep must be at least 1, got {min_tokens_to_keep}")
    from mlx_lm.sample_utils import make_sampler as make_mlx_lm_sampler

    return make_mlx_lm_sampler(temp=temp, top_p=top_p, min_p=min_p, min_tokens_to_keep=min_tokens_to_keep, top_k=top_k)
