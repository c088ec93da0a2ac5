"""``SamplingParams``: how one request is sampled, when it ends and what is reported of it. Imports
no MLX; the names are vLLM's, or mlx-lm's where vLLM has none.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_paged.argument_values import is_sequence
from mlx_paged.declarations import with_help
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.foreign_arguments import constructor_refuses_unknown_arguments
from mlx_paged.sampling_declarations import (
    MAX_COMPLETIONS,
    MAX_LOGPROBS,
    SAMPLING_PARAMS,
    DeclaredSamplingParams,
    LogitsProcessor,
    RequestOutputKind,
    Sampler,
    is_number,
    is_token,
)
from mlx_paged.structured_outputs import StructuredOutputsParams

__all__ = [
    "MAX_COMPLETIONS",
    "MAX_LOGPROBS",
    "LogitsProcessor",
    "RequestOutputKind",
    "Sampler",
    "SamplingParams",
    "StructuredOutputsParams",
]

# Not where the class is: the advice is made from the declared parameters, one of which is of it.
constructor_refuses_unknown_arguments("params")(StructuredOutputsParams)

_CHECKS = [(name, each.check) for name, each in SAMPLING_PARAMS.items() if each.check]
_CHECKS_OF_ELEMENTS = [(name, each.each) for name, each in SAMPLING_PARAMS.items() if each.each]


@constructor_refuses_unknown_arguments("params")
@dataclass(frozen=True)
class SamplingParams(DeclaredSamplingParams):
    """How one request is sampled and when it ends. The names are vLLM's, the defaults mlx-lm's:
    greedy, 256 tokens.

    Args:

    Raises:
        ArgumentError: a value out of its range, named.
    """

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            # A string is one text, not a sequence of letters.
            self._normalise(name, tuple, (value,) if isinstance(value, str) else value)
        for name in ("xtc_special_tokens", "stop_token_ids", "logits_processors"):
            self._normalise(name, tuple, getattr(self, name))
        if self.allowed_token_ids is not None:
            self._normalise("allowed_token_ids", tuple, self.allowed_token_ids)
        self._normalise("logit_bias", dict, self.logit_bias)
        for name, check in _CHECKS:
            value = getattr(self, name)
            _check(name, value, check.is_right(value), check.what)
        for name, check in _CHECKS_OF_ELEMENTS:
            for value in getattr(self, name):
                _check(name, value, check.is_right(value), check.what)
        structure = self.structured_outputs
        is_right = structure is None or isinstance(structure, StructuredOutputsParams)
        _check("structured_outputs", structure, is_right, "StructuredOutputsParams or None")
        for token, bias in self.logit_bias.items():
            is_allowed = is_token(token) and (is_number(bias) or bias == -math.inf)
            what = "a mapping of token ids to numbers, or -inf"
            _check("logit_bias", {token: bias}, is_allowed, what)
        stops = [_as_stop(stop) for stop in self.stop_token_ids]
        object.__setattr__(self, "stop_token_ids", tuple(stops))
        self._check_together()

    def _check_together(self) -> None:
        has_limit = self.max_tokens is not None and self.max_tokens != -1
        _check(
            "min_tokens",
            self.min_tokens,
            not has_limit or self.min_tokens <= (self.max_tokens or 0),
            f"at most max_tokens={self.max_tokens}",
        )
        if self.stop and not self.detokenize:
            raise ArgumentError(
                "[sampling_params] stop is looked for in the text, and detokenize=False has none; "
                "give stop_token_ids",
                "stop",
            )
        if self.structured_outputs is not None and self.ignore_eos:
            raise ArgumentError(
                "[sampling_params] ignore_eos does not go with structured_outputs: what has the "
                "structure ends with the end of sequence",
                "ignore_eos",
            )

    def _normalise(self, name: str, kind: type, value: object) -> None:
        try:
            value = kind(() if value is None else value)
        except Exception:
            # A value of any type may come in, and its __iter__ may raise anything.
            _check(name, value, False, "a mapping" if kind is dict else "a sequence")
        object.__setattr__(self, name, value)

    @property
    def is_slow_to_prepare(self) -> bool:
        """Whether there are words to encode or a grammar to compile before a request begins."""
        return bool(self.bad_words) or self.structured_outputs is not None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

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


def _as_stop(stop: Any) -> int | tuple[int, ...]:
    """A stop token, or a sequence of two tokens and more."""
    tokens = [int(token) for token in (stop if is_sequence(stop) else [stop])]
    return tuple(tokens) if len(tokens) > 1 else tokens[0]


def _check(name: str, value: object, is_right: bool, what: str) -> None:
    if not is_right:
        raise ArgumentError(f"[sampling_params] {name} must be {what}, got {shown(value)}", name)


SamplingParams.__doc__ = with_help(SamplingParams.__doc__, SAMPLING_PARAMS)
