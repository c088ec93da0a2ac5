"""``SamplingParams``: how a request is sampled, when it ends and what its outputs contain. Does not
import MLX; the names are vLLM's, or mlx-lm's if vLLM has none.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_paged.errors import ArgumentError
from mlx_paged.options.argument_values import refused, with_help
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
    "RequestOutputKind",
    "Sampler",
    "SamplingParams",
    "StructuredOutputsParams",
]

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
