"""``SamplingParams``: how a request is sampled, when it ends and what its outputs contain; and
``PoolingParams``: what a request is answered with instead. Does not import MLX; the names are
vLLM's, or mlx-lm's if vLLM has none.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from mlx_paged.errors import ArgumentError
from mlx_paged.options.argument_values import (
    AT_LEAST_0,
    BOOL,
    TOKEN,
    Domain,
    Several,
    one_of,
    or_none,
    refused,
    whole,
    with_help,
)
from mlx_paged.options.foreign_arguments import constructor_refuses_unknown
from mlx_paged.options.sampling_declarations import (
    MAX_COMPLETIONS,
    MAX_LOGPROBS,
    SAMPLING_PARAMS,
    DeclaredSamplingParams,
    LogitsProcessor,
    RequestOutputKind,
    Sampler,
    StructuredOutputsParams,
)

__all__ = [
    "MAX_COMPLETIONS",
    "MAX_LOGPROBS",
    "LogitsProcessor",
    "PoolingParams",
    "RequestOutputKind",
    "Sampler",
    "SamplingParams",
    "StructuredOutputsParams",
]

# What a model is for, where its files do not say so.
Task: TypeAlias = Literal["embed", "score"]
TASK = or_none(one_of("embed", "score"))

# Not where the class is defined: the advice needs the declared parameters, which need the class.
constructor_refuses_unknown(StructuredOutputsParams)


@constructor_refuses_unknown
@dataclass(frozen=True)
class SamplingParams(DeclaredSamplingParams):
    """How a request is sampled and when it ends. The names are vLLM's, the defaults mlx-lm's:
    greedy, 256 tokens.

    Args:

    Raises:
        ArgumentError: a value is out of range.
    """

    def __post_init__(self) -> None:
        for name, param in SAMPLING_PARAMS.items():
            given = getattr(self, name)
            if (value := param.domain.check("sampling_params", name, given)) is not given:
                object.__setattr__(self, name, value)
        limit = self.max_tokens
        if limit is not None and limit != -1 and self.min_tokens > limit:
            what = f"at most max_tokens={limit}"
            raise refused("sampling_params", "min_tokens", what, self.min_tokens)
        if self.stop and not self.detokenize:
            raise ArgumentError(
                "[sampling_params] stop is looked for in the text, and detokenize=False has none; "
                "give stop_token_ids",
                "stop",
            )
        if self.structured_outputs is not None and self.ignore_eos:
            raise ArgumentError(
                "[sampling_params] ignore_eos can't be combined with structured_outputs: a "
                "structured answer ends with the end of sequence",
                "ignore_eos",
            )

    @property
    def is_slow_to_prepare(self) -> bool:
        """Whether words must be encoded, or a grammar compiled, before a request begins."""
        return bool(self.bad_words) or self.structured_outputs is not None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0 or self.top_p == 0

    @cached_property
    def stop_sequences(self) -> tuple[tuple[int, ...], ...]:
        """The entries of ``stop_token_ids`` that have several tokens, the longest first."""
        sequences = [stop for stop in self.stop_token_ids if isinstance(stop, tuple)]
        return tuple(sorted(sequences, key=len, reverse=True))

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy, with other values for some parameters. Functions are shared, not copied.

        Raises:
            ArgumentError: as the constructor.
        """
        return dataclasses.replace(self, **changes)


SamplingParams.__doc__ = with_help(SamplingParams.__doc__, SAMPLING_PARAMS)


@constructor_refuses_unknown
@dataclass(frozen=True)
class PoolingParams:
    """What a request is answered with instead of generated tokens: the embedding of its prompt, or
    logits. Both are of the prompt's last token, and no K/V are kept of the prompt.

    Args:
        dimensions: the length of the embedding: its first numbers, as Matryoshka models are trained
            for. ``None`` for all.
        normalize: whether the embedding, after it is cut, is divided by its length.
        token_ids: give the logits of these tokens, in this order, instead of an embedding.
        num_shared_tokens: how many of the prompt's first tokens other prompts begin with, too: the
            K/V of their whole blocks stay in the prefix cache.

    Raises:
        ArgumentError: a value is out of range.
    """

    dimensions: int | None = None
    normalize: bool = True
    token_ids: tuple[int, ...] = ()
    num_shared_tokens: int = 0

    @property
    def is_embedding(self) -> bool:
        """Whether the answer is an embedding, not logits."""
        return not self.token_ids

    def __post_init__(self) -> None:
        for name, domain in _POOLING_PARAMS.items():
            value = domain.check("pooling_params", name, getattr(self, name))
            object.__setattr__(self, name, value)


_POOLING_PARAMS: dict[str, Domain[Any]] = {
    "dimensions": or_none(whole(1)),
    "normalize": BOOL,
    "token_ids": Several("token ids", TOKEN.read),
    "num_shared_tokens": AT_LEAST_0,
}
