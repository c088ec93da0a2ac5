"""``SamplingParams``: how one request is sampled, when it ends and what is reported of it. Imports
no MLX; the names are vLLM's, or mlx-lm's where vLLM has none.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from mlx_paged.argument_values import is_sequence
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.foreign_arguments import constructor_refuses_unknown_arguments
from mlx_paged.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    import mlx.core as mx

MAX_LOGPROBS = 20
MAX_COMPLETIONS = 16384  # of one request, as in vLLM

# (token ids so far, logits [1, vocab_size]) to logits of the same shape; as in mlx-lm.
LogitsProcessor: TypeAlias = "Callable[[mx.array, mx.array], mx.array]"
# Log-probabilities [1, vocab_size] to a token id [1]; as in mlx-lm.
Sampler: TypeAlias = "Callable[[mx.array], mx.array]"


class RequestOutputKind(Enum):
    """What each output of a request holds; as in vLLM."""

    CUMULATIVE = 0  # the answer so far
    DELTA = 1  # what is new since the output before
    FINAL_ONLY = 2  # the whole answer, once, when it is finished


@constructor_refuses_unknown_arguments("params")
@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. The names are vLLM's, the defaults mlx-lm's:
    greedy, 256 tokens.

    Args:
        n: completions of the prompt, 1 to 16,384; the prompt is computed once, and each completion
            has its own draws.
        temperature: 0 takes the most likely token and ignores top_p, top_k, min_p and XTC.
        top_p: keep the most likely tokens that together reach this probability, above 0; 1 keeps
            all.
        top_k: keep this many of the most likely tokens; 0 and -1 keep all.
        min_p: keep tokens at least this likely, relative to the most likely one; 0 keeps all.
        xtc_probability: how often XTC (exclude top choices, as in mlx-lm) is applied, 0 to 1. It
            removes the tokens whose probability is above ``xtc_threshold``, all but the least
            likely of them. 0 is off.
        xtc_threshold: 0 to 0.5.
        xtc_special_tokens: token ids that XTC never removes, such as the end of sequence.
        seed: the seed of this request's draws, which then do not depend on other requests; ``None``
            takes a fresh one.
        repetition_penalty: above 1, tokens of prompt and answer become less likely (Keskar et al.
            2019); 1 is off.
        presence_penalty: subtracted from the logits of tokens that occur in the answer; 0 is off.
        frequency_penalty: the same, once for each occurrence; 0 is off.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: no other token is drawn; ``None`` allows all.
        bad_words: texts that the answer never has: their last token is not drawn where the answer
            ends with the tokens before it. Each is looked for with and without a space before it.
        stop: end before the first of these texts.
        stop_token_ids: end at the first of these tokens, whose text is left out. An entry may be a
            sequence of token ids, at whose last one the answer ends.
        include_stop_str_in_output: the text keeps what ended it: the stop text, or the text of the
            stop token.
        ignore_eos: continue after the model's end-of-sequence tokens.
        min_tokens: nothing ends the answer among its first tokens, this many: neither the end of
            sequence nor stop tokens are drawn there, and stop texts that end there don't count.
        max_tokens: end after this many tokens; ``None`` and -1 continue until the context or the
            K/V budget is used up.
        logprobs: report the log-probabilities of the sampled token and of this many of the most
            likely ones, 0 to 20. They are those of the model's own logits, before penalties and
            temperature. ``None`` reports none.
        prompt_logprobs: the same for each token of the prompt but the first.
        detokenize: whether the answer has text; without it, decoding costs nothing, and there can
            be no stop texts.
        skip_special_tokens: leave the tokenizer's special tokens out of the text. A stop text that
            is a special token counts all the same.
        logits_processors: as mlx-lm's: each maps (token ids so far ``[num_tokens]``, logits ``[1,
            vocab_size]``) to new logits, after the penalties. One that raises fails its request and
            no other.
        sampler: a function as mlx-lm's, which takes log-probabilities ``[1, vocab_size]`` after the
            processors and returns a token ``[1]``. It replaces temperature, filters and seed.
        structured_outputs: what the answer has to be, such as JSON of a schema; ``None`` is free
            text. It needs the end of sequence, so ``ignore_eos`` does not go with it.
        output_kind: whether each output has the answer so far, only what is new, or whether there
            is but one. An output with what is new has the completions that go on, and the last one
            has all of them. What it costs does not grow with the answer.

    Raises:
        ArgumentError: a value out of its range, named.
    """

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Sequence[int] = ()
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int | Sequence[int]] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 256
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    logits_processors: Sequence[LogitsProcessor] = ()
    sampler: Sampler | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

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
        for name, is_right, what in _VALUES:
            value = getattr(self, name)
            _check(name, value, is_right(value), what)
        for name, is_right, what in _ELEMENTS:
            for value in getattr(self, name):
                _check(name, value, is_right(value), what)
        for token, bias in self.logit_bias.items():
            is_allowed = _is_token(token) and (_is_number(bias) or bias == -math.inf)
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


def _is_whole(value: object) -> TypeGuard[int]:
    # The guard says int: to a type checker, numbers.Integral has no comparison, and a numpy integer
    # is not one.
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _is_token(value: object) -> TypeGuard[int]:
    return _is_whole(value) and value >= 0


def _is_stop(value: object) -> bool:
    """A token id, or some of them."""
    tokens = value if is_sequence(value) else [value]
    return len(tokens) > 0 and all(map(_is_token, tokens))


def _as_stop(stop: Any) -> int | tuple[int, ...]:
    """A stop token, or a sequence of two tokens and more."""
    tokens = [int(token) for token in (stop if is_sequence(stop) else [stop])]
    return tuple(tokens) if len(tokens) > 1 else tokens[0]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_limit(value: object) -> bool:
    return value is None or (_is_whole(value) and (value == -1 or value >= 1))


def _is_allowed(value: object) -> bool:
    return value is None or (
        isinstance(value, tuple) and len(value) > 0 and all(map(_is_token, value))
    )


def _number_in(low: float, high: float, *, is_open: bool = False) -> Callable[[object], bool]:
    """Whether a value is a number within ``low..high``, or above ``low`` where that is open."""

    def is_right(value: object) -> bool:
        return _is_number(value) and low <= value <= high and not (is_open and value == low)

    return is_right


def _whole_in(low: float, high: float, *, may_be_none: bool = False) -> Callable[[object], bool]:
    def is_right(value: object) -> bool:
        return (value is None and may_be_none) or (_is_whole(value) and low <= value <= high)

    return is_right


# Name, whether a value is right, and what it must be.
_Rule: TypeAlias = tuple[str, Callable[[object], bool], str]
_VALUES: tuple[_Rule, ...] = (
    ("n", _whole_in(1, MAX_COMPLETIONS), f"within 1..{MAX_COMPLETIONS}"),
    ("temperature", _number_in(0, math.inf), "a number, at least 0"),
    ("top_p", _number_in(0, 1, is_open=True), "a number above 0, at most 1"),
    ("top_k", _whole_in(-1, math.inf), "a whole number, at least 1, or 0 or -1 for all"),
    ("min_p", _number_in(0, 1), "a number within 0..1"),
    ("xtc_probability", _number_in(0, 1), "a number within 0..1"),
    ("xtc_threshold", _number_in(0, 0.5), "a number within 0..0.5"),
    ("seed", _whole_in(-math.inf, math.inf, may_be_none=True), "a whole number or None"),
    ("repetition_penalty", _number_in(0, math.inf, is_open=True), "a number above 0"),
    ("presence_penalty", _is_number, "a number"),
    ("frequency_penalty", _is_number, "a number"),
    ("allowed_token_ids", _is_allowed, "token ids, at least one, or None"),
    ("include_stop_str_in_output", _is_bool, "True or False"),
    ("min_tokens", _whole_in(0, math.inf), "a whole number, at least 0"),
    ("max_tokens", _is_limit, "at least 1, or -1 for no limit"),
    (
        "logprobs",
        _whole_in(0, MAX_LOGPROBS, may_be_none=True),
        f"within 0..{MAX_LOGPROBS}, or None",
    ),
    (
        "prompt_logprobs",
        _whole_in(0, MAX_LOGPROBS, may_be_none=True),
        f"within 0..{MAX_LOGPROBS}, or None",
    ),
    ("detokenize", _is_bool, "True or False"),
    ("skip_special_tokens", _is_bool, "True or False"),
    (
        "sampler",
        lambda value: value is None or callable(value),
        "a function, such as make_sampler(...), or None",
    ),
    (
        "structured_outputs",
        lambda value: value is None or isinstance(value, StructuredOutputsParams),
        "StructuredOutputsParams or None",
    ),
    (
        "output_kind",
        lambda value: isinstance(value, RequestOutputKind),
        "a RequestOutputKind: CUMULATIVE, DELTA or FINAL_ONLY",
    ),
)
_ELEMENTS: tuple[_Rule, ...] = (
    ("xtc_special_tokens", _is_token, "token ids"),
    ("bad_words", _is_text, "texts that are not empty"),
    ("stop", _is_text, "texts that are not empty"),
    ("stop_token_ids", _is_stop, "token ids, or sequences of token ids"),
    ("logits_processors", callable, "functions"),
)


def _check(name: str, value: object, is_right: bool, what: str) -> None:
    if not is_right:
        raise ArgumentError(f"[sampling_params] {name} must be {what}, got {shown(value)}", name)
