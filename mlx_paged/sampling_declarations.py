"""The fields of ``SamplingParams``, each declared once. Imports no MLX.

A new parameter is a field here; its use is in the engine. Annotations are evaluated in this module,
so that what is declared can be read.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeGuard

from mlx_paged import flag_values
from mlx_paged.argument_values import is_sequence
from mlx_paged.declarations import Check, Flag, Param, declared

if TYPE_CHECKING:
    import mlx.core as mx

    from mlx_paged.structured_outputs import StructuredOutputsParams

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


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of any type; no bool."""
    # The guard says int: to a type checker, numbers.Integral has no comparison, and a numpy integer
    # is not one.
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number of any type; no bool."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def is_token(value: object) -> TypeGuard[int]:
    """Whether a value can be a token id."""
    return is_whole(value) and value >= 0


def _is_stop(value: object) -> bool:
    """A token id, or some of them."""
    tokens = value if is_sequence(value) else [value]
    return len(tokens) > 0 and all(map(is_token, tokens))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_limit(value: object) -> bool:
    return value is None or (is_whole(value) and (value == -1 or value >= 1))


def _is_allowed(value: object) -> bool:
    return value is None or (
        isinstance(value, tuple) and len(value) > 0 and all(map(is_token, value))
    )


def number_in(low: float, high: float, what: str, *, is_open: bool = False) -> Check:
    """A number within ``low..high``, or above ``low`` where that is open."""

    def is_right(value: object) -> bool:
        return is_number(value) and low <= value <= high and not (is_open and value == low)

    return Check(is_right, what)


def whole_in(low: float, high: float, what: str, *, may_be_none: bool = False) -> Check:
    """An integer within ``low..high``."""

    def is_right(value: object) -> bool:
        return (value is None and may_be_none) or (is_whole(value) and low <= value <= high)

    return Check(is_right, what)


_NUMBER = Check(is_number, "a number")
_SHARE = number_in(0, 1, "a number within 0..1")
_BOOL = Check(lambda value: isinstance(value, bool), "True or False")
_TOKENS = Check(is_token, "token ids")
_TEXTS = Check(_is_text, "texts that are not empty")
_LOGPROBS = whole_in(0, MAX_LOGPROBS, f"within 0..{MAX_LOGPROBS}, or None", may_be_none=True)
_FROM_MODEL = "as the model's generation_config.json says, else"


@dataclass(frozen=True)
class DeclaredSamplingParams:
    """The fields of :class:`SamplingParams`."""

    n: Annotated[
        int,
        Param(
            "completions of the prompt, 1 to 16,384; the prompt is computed once, and each "
            "completion has its own draws.",
            elsewhere="num_return_sequences best_of",
            check=whole_in(1, MAX_COMPLETIONS, f"within 1..{MAX_COMPLETIONS}"),
            per_row=True,
            wire="integer",
        ),
    ] = 1
    temperature: Annotated[
        float,
        Param(
            "of sampling; 0 takes the most likely token and ignores top_p, top_k, min_p and XTC.",
            Flag(read=flag_values.at_least_0, name="--temp", says=f"{_FROM_MODEL} 0"),
            elsewhere="temp",
            check=number_in(0, math.inf, "a number, at least 0"),
            per_row=True,
            wire="number",
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        Param(
            "keep the most likely tokens that together reach this probability, above 0; 1 keeps "
            "all.",
            Flag(read=flag_values.probability_or_off, says=f"{_FROM_MODEL} 1"),
            check=number_in(0, 1, "a number above 0, at most 1", is_open=True),
            per_row=True,
            wire="number",
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Param(
            "keep this many of the most likely tokens; 0 and -1 keep all.",
            Flag(
                read=flag_values.whole,
                help="keep this many of the most likely tokens; 0 keeps all",
                says=f"{_FROM_MODEL} 0",
            ),
            check=whole_in(-1, math.inf, "a whole number, at least 1, or 0 or -1 for all"),
            per_row=True,
            wire="integer",
        ),
    ] = 0
    min_p: Annotated[
        float,
        Param(
            "keep tokens at least this likely, relative to the most likely one; 0 keeps all.",
            Flag(read=flag_values.probability, says=f"{_FROM_MODEL} 0"),
            check=_SHARE,
            per_row=True,
            wire="number",
        ),
    ] = 0.0
    xtc_probability: Annotated[
        float,
        Param(
            "how often XTC (exclude top choices, as in mlx-lm) is applied, 0 to 1. It removes the "
            "tokens whose probability is above ``xtc_threshold``, all but the least likely of "
            "them. 0 is off.",
            Flag(read=flag_values.probability, programs=("chat",)),
            check=_SHARE,
            per_row=True,
            wire="number",
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        Param(
            "tokens above this probability are removed, all but the least likely of them; 0 to "
            "0.5.",
            Flag(read=flag_values.up_to_a_half, programs=("chat",)),
            check=number_in(0, 0.5, "a number within 0..0.5"),
            per_row=True,
            wire="number",
        ),
    ] = 0.1
    xtc_special_tokens: Annotated[
        Sequence[int],
        Param(
            "token ids that XTC never removes, such as the end of sequence.",
            each=_TOKENS,
            per_row=True,
            wire="tokens",
        ),
    ] = ()
    seed: Annotated[
        int | None,
        Param(
            "the seed of this request's draws, which then do not depend on other requests; "
            "``None`` takes a fresh one.",
            elsewhere="random_seed",
            check=whole_in(-math.inf, math.inf, "a whole number or None", may_be_none=True),
            per_row=True,
            wire="integer",
        ),
    ] = None
    repetition_penalty: Annotated[
        float,
        Param(
            "above 1, tokens of prompt and answer become less likely (Keskar et al. 2019); 1 is "
            "off.",
            elsewhere="repeat_penalty repetition_context_size",
            check=number_in(0, math.inf, "a number above 0", is_open=True),
            wire="number",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Param(
            "subtracted from the logits of tokens that occur in the answer; 0 is off.",
            check=_NUMBER,
            wire="number",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Param("the same, once for each occurrence; 0 is off.", check=_NUMBER, wire="number"),
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float],
        Param("added to the logits of these token ids; -inf is never drawn.", per_row=True),
    ] = field(default_factory=dict)
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        Param(
            "no other token is drawn; ``None`` allows all.",
            check=Check(_is_allowed, "token ids, at least one, or None"),
            wire="tokens",
        ),
    ] = None
    bad_words: Annotated[
        str | Sequence[str],
        Param(
            "texts that the answer never has: their last token is not drawn where the answer ends "
            "with the tokens before it. Each is looked for with and without a space before it.",
            elsewhere="bad_words_ids no_bad_words",
            each=_TEXTS,
        ),
    ] = ()
    stop: Annotated[
        str | Sequence[str],
        Param(
            "end before the first of these texts.",
            elsewhere="stop_strings stop_words stop_sequences",
            each=_TEXTS,
            per_row=True,
        ),
    ] = ()
    stop_token_ids: Annotated[
        Sequence[int | Sequence[int]],
        Param(
            "end at the first of these tokens, whose text is left out. An entry may be a sequence "
            "of token ids, at whose last one the answer ends.",
            elsewhere="eos_token_id eos_token_ids stop_tokens",
            each=Check(_is_stop, "token ids, or sequences of token ids"),
            per_row=True,
            wire="tokens",
        ),
    ] = ()
    include_stop_str_in_output: Annotated[
        bool,
        Param(
            "the text keeps what ended it: the stop text, or the text of the stop token.",
            elsewhere="no_stop_trim",
            check=_BOOL,
            per_row=True,
            wire="boolean",
        ),
    ] = False
    ignore_eos: Annotated[
        bool,
        Param(
            "continue after the model's end-of-sequence tokens.",
            per_row=True,
            wire="boolean",
        ),
    ] = False
    min_tokens: Annotated[
        int,
        Param(
            "nothing ends the answer among its first tokens, this many: neither the end of "
            "sequence nor stop tokens are drawn there, and stop texts that end there don't count.",
            elsewhere="min_new_tokens min_length",
            check=whole_in(0, math.inf, "a whole number, at least 0"),
            wire="integer",
        ),
    ] = 0
    max_tokens: Annotated[
        int | None,
        Param(
            "end after this many tokens; ``None`` and -1 continue until the context or the K/V "
            "budget is used up.",
            Flag(
                read=flag_values.max_tokens,
                also=("-m",),
                default=-1,
                help="tokens per answer",
                says="-1, as many as the context holds",
            ),
            elsewhere="max_new_tokens max_gen_tokens max_completion_tokens n_predict",
            check=Check(_is_limit, "at least 1, or -1 for no limit"),
            per_row=True,
        ),
    ] = 256
    logprobs: Annotated[
        int | None,
        Param(
            "report the log-probabilities of the sampled token and of this many of the most likely "
            "ones, 0 to 20. They are those of the model's own logits, before penalties and "
            "temperature. ``None`` reports none.",
            check=_LOGPROBS,
            per_row=True,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Param(
            "the same for each token of the prompt but the first.",
            check=_LOGPROBS,
            per_row=True,
            wire="integer",
        ),
    ] = None
    detokenize: Annotated[
        bool,
        Param(
            "whether the answer has text; without it, decoding costs nothing, and there can be no "
            "stop texts.",
            check=_BOOL,
            per_row=True,
        ),
    ] = True
    skip_special_tokens: Annotated[
        bool,
        Param(
            "leave the tokenizer's special tokens out of the text. A stop text that is a special "
            "token counts all the same.",
            check=_BOOL,
            per_row=True,
            wire="boolean",
        ),
    ] = True
    logits_processors: Annotated[
        Sequence["LogitsProcessor"],
        Param(
            "as mlx-lm's: each maps (token ids so far ``[num_tokens]``, logits ``[1, "
            "vocab_size]``) to new logits, after the penalties. One that raises fails its request "
            "and no other.",
            each=Check(callable, "functions"),
        ),
    ] = ()
    sampler: Annotated[
        "Sampler | None",
        Param(
            "a function as mlx-lm's, which takes log-probabilities ``[1, vocab_size]`` after the "
            "processors and returns a token ``[1]``. It replaces temperature, filters and seed.",
            check=Check(
                lambda value: value is None or callable(value),
                "a function, such as make_sampler(...), or None",
            ),
        ),
    ] = None
    structured_outputs: Annotated[
        "StructuredOutputsParams | None",
        Param(
            "what the answer has to be, such as JSON of a schema; ``None`` is free text. It needs "
            "the end of sequence, so ``ignore_eos`` does not go with it.",
            elsewhere="guided_decoding response_format grammar guided_json guided_regex "
            "guided_choice guided_grammar json_schema",
            notation=", a StructuredOutputsParams",
        ),
    ] = None
    output_kind: Annotated[
        RequestOutputKind,
        Param(
            "whether each output has the answer so far, only what is new, or whether there is but "
            "one. An output with what is new has the completions that go on, and the last one has "
            "all of them. What it costs does not grow with the answer.",
            check=Check(
                lambda value: isinstance(value, RequestOutputKind),
                "a RequestOutputKind: CUMULATIVE, DELTA or FINAL_ONLY",
            ),
            per_row=True,
        ),
    ] = RequestOutputKind.CUMULATIVE


SAMPLING_PARAMS = declared(Param, DeclaredSamplingParams.__annotations__)
