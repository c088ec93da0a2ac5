"""``StructuredOutputsParams``: what an answer has to be. Imports no MLX; the names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json import dumps, loads
from typing import Any, TypeAlias

from mlx_paged.argument_values import as_integer, is_sequence, kind_of
from mlx_paged.errors import ArgumentError, one_line, shown

# Characters. What compiling a grammar takes, in time and in stack, grows with its text.
MAX_GRAMMAR_LEN = 2**18

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What a request's answer has to be: exactly one of ``json``, ``regex``, ``choice``,
    ``grammar`` and ``json_object``. Tokens that would lead away from it are not drawn.

    An answer that ends by itself is complete; one that ``max_tokens``, the context or a stop text
    cuts is the beginning of one that would be.

    Args:
        json: JSON that is valid for this schema, a mapping or its text. ``True`` and ``{}`` are any
            JSON. It stays as text.
        regex: text that matches the whole of this regular expression, in the syntax of Rust's
            ``regex``: no look-around, no back references.
        choice: one of these texts.
        grammar: text of this context-free grammar, in llguidance's variant of Lark; it begins with
            the rule ``start``.
        json_object: any JSON object.
        whitespace_flexible: JSON may have any white space between its tokens. By default it is one
            line, with at most a space after each comma and colon, so that no answer is lost in
            endless white space.
        begin_after: token ids. The answer is free until it has had them in this order, such as the
            end of a model's reasoning, and can't end before; what follows them is structured.
            Empty: from the first token on.
        reasoning_start: token ids that open what is free. An answer that does not begin with them
            is structured from its first token on. Empty: it is free in any case.

    Raises:
        ArgumentError: none of the five or several, or a value that can't be one.
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
        if self.json_object is None:  # vLLM's default
            object.__setattr__(self, "json_object", False)
        for name, is_right, what in _VALUES:
            value = getattr(self, name)
            if not is_right(value):
                raise ArgumentError(
                    f"[structured_outputs] {name} must be {what}, got {shown(value)} "
                    f"({kind_of(value)})",
                    name,
                )
        given = [name for name in KINDS if getattr(self, name) is not _NOT_GIVEN[name]]
        if len(given) != 1:
            raise ArgumentError(
                f"[structured_outputs] give exactly one of {', '.join(KINDS)}, got "
                f"{' and '.join(given) or 'none of them'}",
                given[1] if given else "structured_outputs",
            )
        if self.json is not None:
            object.__setattr__(self, "json", schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
        for name in ("begin_after", "reasoning_start"):
            object.__setattr__(self, name, tuple(map(int, getattr(self, name))))
        if self.reasoning_start and not self.begin_after:
            raise ArgumentError(
                "[structured_outputs] reasoning_start needs begin_after, which ends what it opens",
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
    """A JSON schema as text in one form.

    Raises:
        ArgumentError: text that is no JSON, a mapping that JSON can't have, or no schema.
    """
    try:
        read = loads(schema) if isinstance(schema, str) else schema
        text = dumps(read, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ArgumentError(
            f"[structured_outputs] json is no JSON schema: {one_line(error)}", "json"
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
    """Whether a value is a text that can be written in UTF-8: none with half of a character."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _is_text_or_none(value: object) -> bool:
    return value is None or (_is_unicode(value) and value != "")


def _is_choice(value: object) -> bool:
    if value is None:
        return True
    return (
        is_sequence(value) and len(value) > 0 and all(each and _is_unicode(each) for each in value)
    )


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _are_tokens(value: object) -> bool:
    return is_sequence(value) and all(
        (token := as_integer(each)) is not None and token >= 0 for each in value
    )


# What says that a kind is not given.
_NOT_GIVEN: dict[str, bool | None] = {**dict.fromkeys(KINDS), "json_object": False}
# Name, whether a value is right, and what it must be.
_Rule: TypeAlias = tuple[str, Callable[[object], bool], str]
_VALUES: tuple[_Rule, ...] = (
    (
        "json",
        lambda value: value is None or isinstance(value, str | bool | Mapping),
        "a JSON schema: a mapping, its text, or True",
    ),
    ("regex", _is_text_or_none, "a text that is not empty, or None"),
    ("choice", _is_choice, "texts, at least one and none of them empty, or None"),
    ("grammar", _is_text_or_none, "a text that is not empty, or None"),
    ("json_object", _is_bool, "True or False"),
    ("whitespace_flexible", _is_bool, "True or False"),
    ("begin_after", _are_tokens, "token ids"),
    ("reasoning_start", _are_tokens, "token ids"),
)
