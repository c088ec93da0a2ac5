"""``StructuredOutputsParams``: the structure of an answer. The names are vLLM's. Imports no MLX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import dumps, loads
from typing import Any

from mlx_paged.argument_values import BOOL, TOKEN, Domain, Several, is_sequence, or_none, such
from mlx_paged.errors import ArgumentError, one_line, shown

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
        given = [name for name in KINDS if getattr(self, name) is not _NOT_GIVEN[name]]
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
        self._check_length(given[0])

    @property
    def kind(self) -> str:
        """Which of the five is given."""
        return next(name for name in KINDS if getattr(self, name) is not _NOT_GIVEN[name])

    def _check_length(self, name: str) -> None:
        value = getattr(self, name)
        length = sum(map(len, value)) if name == "choice" else len(str(value))
        if length > MAX_GRAMMAR_LEN:
            raise ArgumentError(
                f"[structured_outputs] {name} has {length:,} characters, {MAX_GRAMMAR_LEN:,} are "
                "allowed",
                name,
            )


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
    is_right = is_sequence(value) and all(each and _is_unicode(each) for each in value)
    return tuple(value) or None if is_right else None  # type: ignore[arg-type]


# The value of a kind that is not given.
_NOT_GIVEN: dict[str, bool | None] = {**dict.fromkeys(KINDS), "json_object": False}
_TEXT = or_none(such("a text that is not empty", lambda text: _is_unicode(text) and text != ""))
_TOKENS = Several("token ids", TOKEN.read)
_DOMAINS: dict[str, Domain[Any]] = {
    "json": or_none(
        such(
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
