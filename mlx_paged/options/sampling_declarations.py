"""The fields of ``SamplingParams``, each declared once, and ``StructuredOutputsParams``, the value
of one of them. Does not import MLX.

A new parameter is declared here, and used in the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from json import dumps, loads
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from mlx_paged.errors import ArgumentError, one_line, shown
from mlx_paged.options.argument_values import (
    AT_LEAST_0,
    BOOL,
    SHARE,
    TEXT,
    TOKEN,
    Domain,
    Flag,
    Param,
    Several,
    declared,
    is_number,
    is_sequence,
    matching,
    number,
    or_none,
    refused,
    whole,
)

if TYPE_CHECKING:
    import mlx.core as mx

MAX_LOGPROBS = 20
MAX_COMPLETIONS = 16384  # of one request, as in vLLM

# (token ids so far, logits [1, vocab_size]) to logits of the same shape; as in mlx-lm.
LogitsProcessor: TypeAlias = Callable[["mx.array", "mx.array"], "mx.array"]
# Log-probabilities [1, vocab_size] to a token id [1]; as in mlx-lm.
Sampler: TypeAlias = Callable[["mx.array"], "mx.array"]


class RequestOutputKind(Enum):
    """What each output of a request holds; as in vLLM."""

    CUMULATIVE = 0  # the answer so far
    DELTA = 1  # what is new since the previous output
    FINAL_ONLY = 2  # the whole answer, once it is finished


def _read_stop(value: object) -> int | tuple[int, ...] | None:
    """A stop token, or a sequence of two or more tokens."""
    tokens = [TOKEN.read(each) for each in (value if is_sequence(value) else [value])]
    if not tokens or None in tokens:
        return None
    return tokens[0] if len(tokens) == 1 else tuple(tokens)  # type: ignore[arg-type]


class _Biases(Domain[Any]):
    """Numbers, or -inf, by token id; ``None`` is empty."""

    def check(self, part: str, name: str, value: Any) -> dict[int, float]:
        try:
            biases = dict(() if value is None else value)
        except Exception:
            # A value of any type may come in, and its __iter__ may raise anything.
            raise refused(part, name, "a mapping", value) from None
        for token, bias in biases.items():
            if TOKEN.read(token) is None or not (is_number(bias) or bias == -math.inf):
                raise refused(part, name, self.what, {token: bias})
        return biases


_NUMBER = matching("a number", is_number, parse=float)
_TEXTS = Several("texts that are not empty", TEXT.read)
_TOKENS = Several("token ids", TOKEN.read)
_LOGPROBS = or_none(whole(0, MAX_LOGPROBS, f"within 0..{MAX_LOGPROBS}"))
_LIMIT = Domain(
    "at least 1, or -1 for no limit",
    lambda value: whole(-1).read(value) or None,
    int,
    "a whole number, at least 1, or -1",
)
_FROM_MODEL = "as the model's generation_config.json says, else"


@dataclass(frozen=True)
class DeclaredSamplingParams:
    """The fields of :class:`SamplingParams`."""

    n: Annotated[
        int,
        Param(
            "completions of the prompt, 1 to 16,384; the prompt is computed once, and each "
            "completion has its own draws.",
            whole(1, MAX_COMPLETIONS, f"within 1..{MAX_COMPLETIONS}"),
            per_row=True,
        ),
    ] = 1
    temperature: Annotated[
        float,
        Param(
            "sampling temperature; 0 takes the most likely token and ignores top_p, top_k, min_p "
            "and XTC.",
            number(0, math.inf, "a number, at least 0"),
            Flag(name="--temp", default_text=f"{_FROM_MODEL} 0"),
            per_row=True,
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        Param(
            "keep the most likely tokens that together reach this probability; 1 keeps all, and 0 "
            "only the most likely one.",
            SHARE,
            Flag(default_text=f"{_FROM_MODEL} 1"),
            per_row=True,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Param(
            "keep this many of the most likely tokens; 0 and -1 keep all.",
            whole(-1, what="a whole number, at least 1, or 0 or -1 for all"),
            Flag(
                domain=AT_LEAST_0,
                help="keep this many of the most likely tokens; 0 keeps all",
                default_text=f"{_FROM_MODEL} 0",
            ),
            per_row=True,
        ),
    ] = 0
    min_p: Annotated[
        float,
        Param(
            "keep tokens at least this likely, relative to the most likely one; 0 keeps all.",
            SHARE,
            Flag(default_text=f"{_FROM_MODEL} 0"),
            per_row=True,
        ),
    ] = 0.0
    xtc_probability: Annotated[
        float,
        Param(
            "how often XTC (exclude top choices, as in mlx-lm) is applied, 0 to 1. It removes the "
            "tokens whose probability is above ``xtc_threshold``, all but the least likely of "
            "them. 0 is off.",
            SHARE,
            Flag(("chat",)),
            per_row=True,
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        Param(
            "tokens above this probability are removed, all but the least likely of them; 0 to "
            "0.5.",
            number(0, 0.5, "a number within 0..0.5", "within 0..0.5"),
            Flag(("chat",)),
            per_row=True,
        ),
    ] = 0.1
    xtc_special_tokens: Annotated[
        Sequence[int],
        Param(
            "token ids that XTC never removes, such as the end of sequence.", _TOKENS, per_row=True
        ),
    ] = ()
    seed: Annotated[
        int | None,
        Param(
            "the random seed of this request, whose draws then do not depend on other requests; "
            "``None`` takes a random one.",
            or_none(whole()),
            per_row=True,
        ),
    ] = None
    repetition_penalty: Annotated[
        float,
        Param(
            "above 1, tokens of prompt and answer become less likely (Keskar et al. 2019); 1 is "
            "off.",
            number(0, math.inf, "a number above 0", is_open=True),
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Param("subtracted from the logits of tokens that occur in the answer; 0 is off.", _NUMBER),
    ] = 0.0
    frequency_penalty: Annotated[
        float, Param("the same for each occurrence; 0 is off.", _NUMBER)
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float],
        Param(
            "added to the logits of these token ids; -inf is never drawn.",
            _Biases("a mapping of token ids to numbers, or -inf", lambda biases: biases),
            per_row=True,
        ),
    ] = field(default_factory=dict)
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        Param(
            "the only tokens that may be drawn; ``None`` allows all.",
            or_none(Several("token ids, at least one", TOKEN.read, min_length=1)),
        ),
    ] = None
    bad_words: Annotated[
        str | Sequence[str],
        Param(
            "texts that must not occur in the answer: the last token of each is not drawn after "
            "its other tokens. Each is matched with and without a space before it.",
            _TEXTS,
        ),
    ] = ()
    stop: Annotated[
        str | Sequence[str], Param("end before the first of these texts.", _TEXTS, per_row=True)
    ] = ()
    stop_token_ids: Annotated[
        Sequence[int | Sequence[int]],
        Param(
            "end at the first of these tokens, whose text is left out. An entry may be a sequence "
            "of token ids, and the answer ends with its last one.",
            Several("token ids, or sequences of token ids", _read_stop),
            per_row=True,
        ),
    ] = ()
    include_stop_str_in_output: Annotated[
        bool,
        Param(
            "keep the stop text, or the text of the stop token, at the end of the answer.",
            BOOL,
            per_row=True,
        ),
    ] = False
    ignore_eos: Annotated[
        bool, Param("continue after the model's end-of-sequence tokens.", BOOL, per_row=True)
    ] = False
    min_tokens: Annotated[
        int,
        Param(
            "the least tokens of the answer: among them, neither the end of sequence nor stop "
            "tokens are drawn, and stop texts that end there are ignored.",
            whole(0),
        ),
    ] = 0
    max_tokens: Annotated[
        int | None,
        Param(
            "end after this many tokens; ``None`` and -1 continue until the context or the K/V "
            "budget is used up.",
            or_none(_LIMIT, _LIMIT.what),
            Flag(
                also=("-m",),
                default=-1,
                help="tokens per answer",
                default_text="-1, up to the context limit",
            ),
            per_row=True,
            wire=False,
        ),
    ] = 256
    logprobs: Annotated[
        int | None,
        Param(
            "report the log-probabilities of the sampled token and of this many of the most likely "
            "ones, 0 to 20. They are those of the model's own logits, before penalties and "
            "temperature. ``None`` reports none.",
            _LOGPROBS,
            per_row=True,
            wire=False,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Param("the same for each token of the prompt but the first.", _LOGPROBS, per_row=True),
    ] = None
    detokenize: Annotated[
        bool,
        Param(
            "decode the answer to text. Without it there can be no stop texts, and decoding costs "
            "nothing.",
            BOOL,
            per_row=True,
            wire=False,
        ),
    ] = True
    skip_special_tokens: Annotated[
        bool,
        Param(
            "leave the tokenizer's special tokens out of the text. A stop text that is a special "
            "token still ends the answer.",
            BOOL,
            per_row=True,
        ),
    ] = True
    logits_processors: Annotated[
        Sequence[LogitsProcessor],
        Param(
            "as mlx-lm's: each maps (token ids so far ``[num_tokens]``, logits ``[1, "
            "vocab_size]``) to new logits, after the penalties. If one raises, only its request "
            "fails.",
            Several("functions", matching("functions", callable).read),
            wire=False,
        ),
    ] = ()
    sampler: Annotated[
        Sampler | None,
        Param(
            "a function as mlx-lm's, which takes log-probabilities ``[1, vocab_size]`` after the "
            "processors and returns a token ``[1]``. It replaces temperature, filters and seed.",
            or_none(matching("a function, such as make_sampler(...)", callable)),
            wire=False,
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None,
        Param(
            "the structure of the answer, such as JSON of a schema; ``None`` is free text. It "
            "can't be combined with ``ignore_eos``.",
            or_none(
                matching(
                    "StructuredOutputsParams",
                    lambda value: isinstance(value, StructuredOutputsParams),
                ),
                "StructuredOutputsParams or None",
            ),
            wire=False,
        ),
    ] = None
    thinking_token_budget: Annotated[
        int | None,
        Param(
            "end the model's reasoning after this many tokens, by forcing the mark that closes it. "
            "``None`` is no limit. It has no effect on models whose tokenizer has no reasoning "
            "marks.",
            or_none(whole(0)),
        ),
    ] = None
    output_kind: Annotated[
        RequestOutputKind,
        Param(
            "whether each output has the answer so far or only what is new, or there is only one. "
            "An output with what is new has the completions that continue, and the last one has "
            "all of them; its cost does not grow with the answer.",
            matching(
                "a RequestOutputKind: CUMULATIVE, DELTA or FINAL_ONLY",
                lambda value: isinstance(value, RequestOutputKind),
            ),
            per_row=True,
            wire=False,
        ),
    ] = RequestOutputKind.CUMULATIVE


# Characters. The time and the stack that compiling a grammar takes grow with its text.
MAX_GRAMMAR_LEN = 2**18

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The structure of a request's answer: exactly one of ``json``, ``regex``, ``choice``,
    ``grammar`` and ``json_object``. Tokens that violate it are not drawn.

    An answer that ends by itself is complete; one that is cut by ``max_tokens``, the context or a
    stop text is the beginning of a complete one.

    Args:
        json: JSON that is valid for this schema, a mapping or its text. ``True`` and ``{}`` allow
            any JSON. It is stored as text.
        regex: text that matches the whole of this regular expression, in the syntax of Rust's
            ``regex``: no look-around, no back references.
        choice: one of these texts.
        grammar: text of this context-free grammar, in llguidance's variant of Lark; it begins with
            the rule ``start``.
        json_object: any JSON object.
        whitespace_flexible: allow any white space between the tokens of JSON. By default it is one
            line, with at most a space after each comma and colon, so that a model can't generate
            endless white space.
        begin_after: a sequence of token ids, such as the end of a model's reasoning. The answer is
            unconstrained, and can't end, until they have occurred; then the structure begins.
            Empty: it begins with the first token.
        reasoning_start: token ids that open the unconstrained part. An answer that does not begin
            with them is structured from its first token on. Empty: it always has such a part.

    Raises:
        ArgumentError: not exactly one of the five is given, or a value is invalid.
    """

    json: str | bool | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    whitespace_flexible: bool = False
    begin_after: Sequence[int] = ()
    reasoning_start: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, domain in _DOMAINS.items():
            value = domain.check("structured_outputs", name, getattr(self, name))
            object.__setattr__(self, name, value)
        given = self._given
        if len(given) != 1:
            raise ArgumentError(
                f"[structured_outputs] give exactly one of {', '.join(KINDS)}, got "
                f"{' and '.join(given) or 'none of them'}",
                given[1] if given else "structured_outputs",
            )
        if self.json is not None:
            object.__setattr__(self, "json", schema_text(self.json))
        if self.reasoning_start and not self.begin_after:
            raise ArgumentError(
                "[structured_outputs] reasoning_start needs begin_after, the end of what it opens",
                "reasoning_start",
            )
        value = getattr(self, self.kind)
        length = sum(map(len, value)) if self.kind == "choice" else len(str(value))
        if length > MAX_GRAMMAR_LEN:
            raise ArgumentError(
                f"[structured_outputs] {self.kind} has {length:,} characters, {MAX_GRAMMAR_LEN:,} "
                "are allowed",
                self.kind,
            )

    @property
    def kind(self) -> str:
        """The first of the five that is given."""
        return self._given[0]

    @property
    def _given(self) -> list[str]:
        # What is not given is None, or False for json_object.
        absent = {**dict.fromkeys(KINDS), "json_object": False}
        return [name for name in KINDS if getattr(self, name) is not absent[name]]


def schema_text(schema: str | bool | Mapping[str, Any]) -> str:
    """A JSON schema as normalised text.

    Raises:
        ArgumentError: text that is not JSON, a mapping that can't be JSON, or not a schema.
    """
    try:
        read = loads(schema) if isinstance(schema, str) else schema
        text = dumps(read, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ArgumentError(
            f"[structured_outputs] json is not a JSON schema: {one_line(error)}", "json"
        ) from error
    if not isinstance(read, Mapping | bool):
        raise ArgumentError(
            f"[structured_outputs] json must be a JSON schema, which is an object or true, got "
            f"{shown(read)}",
            "json",
        )
    if read is False:
        raise ArgumentError(
            "[structured_outputs] json must be a schema that something is valid for, got false",
            "json",
        )
    return text


def _is_unicode(value: object) -> bool:
    """Whether a value is text that can be encoded in UTF-8, without lone surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _read_choice(value: object) -> tuple[str, ...] | None:
    is_valid = is_sequence(value) and all(each and _is_unicode(each) for each in value)
    return tuple(value) or None if is_valid else None  # type: ignore[arg-type]


_TEXT = or_none(matching("a text that is not empty", lambda text: _is_unicode(text) and text != ""))
_DOMAINS: dict[str, Domain[Any]] = {
    "json": or_none(
        matching(
            "a JSON schema: a mapping, its text, or True",
            lambda value: isinstance(value, str | bool | Mapping),
        )
    ),
    "regex": _TEXT,
    "choice": or_none(Domain("texts, at least one and none of them empty", _read_choice)),
    "grammar": _TEXT,
    # None is vLLM's default.
    "json_object": Domain(BOOL.what, lambda value: value is not None and BOOL.read(value)),
    "whitespace_flexible": BOOL,
    "begin_after": _TOKENS,
    "reasoning_start": _TOKENS,
}


SAMPLING_PARAMS: dict[str, Param] = declared(DeclaredSamplingParams)
