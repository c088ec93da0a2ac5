"""Request bodies: JSON, parsed strictly and within limits, pydantic models of it, and the messages
of their errors.

Messages are made from the place and the kind of an error; pydantic's own texts are not used.
Everything that reads a body, here and in the protocols, raises an :class:`ApiError` for the first
error: 404 for an unknown model, otherwise 400.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar, get_args, get_origin

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from mlx_paged.errors import one_line, shown
from mlx_paged.options.foreign_arguments import INSTEAD
from mlx_paged.options.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.server.errors import ApiError

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
# Messages of a conversation, parts of a message, tools. Reading one takes about ten microseconds.
MAX_CHILDREN = 2**13
MAX_PLACE = 200  # characters of a field's place in an error

LOG = logging.getLogger("mlx_paged.server")
_MAX_LOGGED = 256  # names of ignored fields
_logged: set[str] = set()
# The prefix of the tags of unions, which appear in pydantic's error locations.
MEMBER = "::"
_OURS = "mlx_paged"  # the type of errors with messages of this package
# What is said of a field, by the type of pydantic's error.
_WORDS = {
    _OURS: "{words}",
    "missing": "is missing",
    "string_too_short": "is empty",
    "too_short": "is empty; give at least one entry",
    "too_long": "has {actual_length:,} entries, but at most {max_length:,} are allowed",
    "none_required": "is not supported, got {input}; leave it out",
    "literal_error": "must be {expected}, got {input}",
    "greater_than_equal": "must be at least {ge}, got {input}",
    "less_than_equal": "must be at most {le}, got {input}",
    "string_pattern_mismatch": "must match {pattern}, got {input}",
    "string_type": "must be a text, got {input}",
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_parsing_size"), "must be a whole number, got {input}"
    ),
    **dict.fromkeys(("float_type", "finite_number"), "must be a number, got {input}"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false, got {input}"),
    "list_type": "must be a list, got {input}",
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type"), "must be an object, got {input}"
    ),
}
# Names of the same field in different protocols: the first one that a body declares is recommended.
# Other names of sampling parameters are in the table of foreign_arguments.
_SYNONYMS = (
    ("messages", "input", "prompt"),
    ("max_tokens", "max_output_tokens", "max_tokens_to_sample", "max_completion_tokens"),
    ("tools", "functions"),
    ("tool_choice", "function_call"),
    ("stop", "stop_sequences"),
    ("response_format", "text.format", "output_config.format"),
    ("reasoning_effort", "reasoning.effort", "output_config.effort"),
)
_ADVICE = {
    "adapters": "start the server with --adapter, and send its name as model",
    "draft_model": "start a server with a draft model",
    "chat_template": "start the server with --chat-template",
    "previous_response_id": "nothing is stored here; send the whole conversation as input",
    "conversation": "nothing is stored here; send the whole conversation as input",
    "container": "containers run on Anthropic's servers; leave it out",
}

MAX_JSON_DEPTH = 64
# Python's parser holds the GIL while it reads a text: half a second for the worst bodies of maximum
# size, about 50 ms within these limits.
MAX_JSON_VALUES = 2**19
MAX_JSON_OBJECTS = 2**16  # including lists
MAX_JSON_NUMBER = 64  # characters
_LONG_NUMBER = re.compile(rb"[0-9+\-.eE]{%d}" % (MAX_JSON_NUMBER + 1))
_CHUNK = 2**17  # bytes that are scanned before another thread may run
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def parse_json(body: bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ApiError: it is invalid, or too expensive to parse; 400.
    """
    check_json(body)
    try:
        value = json.loads(
            body, parse_constant=_refuse_constant, object_pairs_hook=_with_unique_names
        )
        if b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode()  # Fails for lone surrogates.
        return value
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the body contains a lone surrogate, half a character") from None
    except ValueError as error:
        # Also UnicodeDecodeError, whose message would quote the body.
        what = f": {error}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(400, f"the body is not valid JSON{what}") from None


def _with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate names: a proxy that inspects the body might use the other value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ApiError(400, f"the body contains the name {shown(name)} twice in an object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not valid JSON: {name} is not allowed")


def check_json(body: bytes) -> None:
    """Raise :class:`ApiError` if a body is not UTF-8 or would be expensive to parse: nested too
    deeply, with too many values, or with overlong numbers. Validity is left to the parser.

    The body is scanned in chunks, so that other threads can run in between.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 at byte {error.start}") from error
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Each value has at most four quotes: those of its name and of its text.
    if unescaped.count(b'"') > 4 * MAX_JSON_VALUES:
        raise _too_many("values", MAX_JSON_VALUES)
    num_commas = num_brackets = depth = 0
    end = b""  # the end of the previous chunks
    for bare in _without_texts(unescaped):
        num_commas += bare.count(b",")
        if num_commas >= MAX_JSON_VALUES:
            raise _too_many("values", MAX_JSON_VALUES)
        if _LONG_NUMBER.search(end + bare):
            raise ApiError(
                400, f"the body has a number with more than {MAX_JSON_NUMBER} characters"
            )
        end = (end + bare)[-MAX_JSON_NUMBER:]
        brackets = bare.translate(None, _NO_BRACKETS)
        deepest, depth = _depths(brackets, depth)
        if deepest > MAX_JSON_DEPTH:
            raise ApiError(400, f"the body is nested deeper than {MAX_JSON_DEPTH} levels")
        num_brackets += len(brackets)
        if num_brackets > 2 * MAX_JSON_OBJECTS:
            raise _too_many("objects and lists", MAX_JSON_OBJECTS)


def _too_many(what: str, limit: int) -> ApiError:
    return ApiError(400, f"the body has more than {limit:,} {what}")


def _without_texts(unescaped: bytes) -> Iterator[bytes]:
    """The chunks of JSON text without escaped quotes, with all strings removed."""
    is_text = 0
    for start in range(0, len(unescaped), _CHUNK):
        parts = unescaped[start : start + _CHUNK].split(b'"')
        yield b"".join(parts[is_text::2])
        is_text ^= (len(parts) - 1) % 2


def _depths(brackets: bytes, depth: int) -> tuple[int, int]:
    """The maximum and the final nesting depth of brackets that begin at ``depth``."""
    if not brackets:
        return depth, depth
    codes = np.frombuffer(brackets, np.uint8)
    opens = (codes == ord("[")) | (codes == ord("{"))
    depths = np.cumsum(np.where(opens, 1, -1))
    return depth + int(depths.max()), depth + int(depths[-1])


class Body(BaseModel):
    """A JSON object in a request. Undeclared fields are refused by name; fields that are ``null``
    are treated as missing.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, defer_build=True, protected_namespaces=()
    )

    # Whether undeclared fields are dropped, and the object's place in a body for the log.
    leaves_out: ClassVar[bool] = False
    place: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any, info: ValidationInfo) -> Any:
        """Remove fields that are ``null``, and unknown fields where they are dropped."""
        if not isinstance(value, dict):
            return value
        kept = {name: each for name, each in value.items() if each is not None}
        if cls.leaves_out or info.context:
            for name in kept.keys() - _names_of(cls):
                if cls.leaves_out or _advice(cls, name) is None:
                    log_left_out(f"{cls.place}.{name}" if cls.place else name)
                    del kept[name]
        return kept

    @classmethod
    def read(cls, value: object, leaves_out: bool = False) -> Self:
        """Validate a body.

        Args:
            leaves_out: drop unknown fields and log each once, except for those with advice in
                their error.

        Raises:
            ApiError: the first error, with its place; 400.
        """
        try:
            return cls.model_validate(value, context=leaves_out or None)
        except ValidationError as error:
            raise _refusal(cls, value, error) from None


def read_query(cls: type[M], query: Mapping[str, str]) -> M:
    """Validate the parameters of a query as a model.

    Raises:
        ApiError: the first error; 400.
    """
    try:
        return cls.model_validate_strings(dict(query))
    except ValidationError as error:
        raise _refusal(cls, query, error) from None


def read_part(cls: type[M], body: bytes) -> M:
    """Validate the fields of a model in a JSON text, of which nothing else is made a value.

    Raises:
        ApiError: the first error; 400.
    """
    try:
        return cls.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(cls, parse_json(body), error) from None


class Repeated(Body):
    """An object that clients copy from the answer of some server, or that contains hints for other
    servers: undeclared fields are dropped, and each is logged once.
    """

    leaves_out = True


def without_effect(*names: str) -> Any:
    """A base class of bodies whose fields are accepted and have no effect."""
    fields: Any = dict.fromkeys(names, (Any, None))
    return create_model("WithoutEffect", __base__=Body, **fields)


@cache
def _names_of(cls: type[BaseModel]) -> frozenset[str]:
    """The names of the fields in JSON."""
    return frozenset(field.alias or name for name, field in cls.model_fields.items())


def wrong(words: str, code: str | None = None) -> PydanticCustomError:
    """An error for validators to raise.

    Args:
        words: the message after the name of the field.
        code: the code of the :class:`ApiError`.
    """
    return PydanticCustomError(_OURS, "{words}", {"words": words, "code": code})


def refused(place: str, words: str, code: str | None = None) -> ApiError:
    """An error for the field at a place in the body. Clients choose names, and so their lengths."""
    place = one_line(place, MAX_PLACE)
    return ApiError(400, f"{place or 'the body'} {words}", param=place or None, code=code)


def only(*values: object, way_out: str, code: str | None = None) -> AfterValidator:
    """``Annotated[Any, only([], way_out="send none")]``: a field that is accepted only with some
    values, with advice in its error. Others are ``Literal``.

    Args:
        way_out: what to do instead.
        code: the code of the :class:`ApiError`.
    """

    def check(value: Any) -> Any:
        if value in values:
            return value
        raise wrong(f"is not supported, got {shown(value)}; {way_out}", code)

    return AfterValidator(check)


@dataclass(frozen=True)
class OneOf:
    """``Annotated[str | A | B, OneOf("type")]``: a tagged union of texts, lists and objects. The
    field ``type`` of an object selects its class.

    Args:
        name: the name of that field. It is a ``Literal`` in each class, except for a class that
            takes all other objects and reports their errors itself.
        default: the value of the field where it is missing.
    """

    name: str = ""
    default: str | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        choices: dict[Any, CoreSchema] = {}
        for member in get_args(source):
            schema = handler.generate_schema(member)
            choices |= {MEMBER + tag: schema for tag in self._tags_of(member)}

        def tag_of(value: Any) -> str:
            return self._tag_of(value, choices.keys())

        return core_schema.tagged_union_schema(choices, tag_of)

    def _tags_of(self, member: Any) -> list[str]:
        if get_origin(member) is Annotated:
            member = get_args(member)[0]
        if isinstance(member, type) and issubclass(member, Body):
            field = member.model_fields.get(self.name)
            values = () if field is None else get_args(field.annotation)
            return [f"{self.name}={value}" for value in values] or ["an object"]
        if get_origin(member) is list:
            return ["token ids" if get_args(member) == (int,) else "a list"]
        return ["a text"]

    def _tag_of(self, value: Any, tags: Collection[str]) -> str:
        if isinstance(value, str):
            return f"{MEMBER}a text"
        if isinstance(value, list):
            several, one = f"{MEMBER}a list", f"{MEMBER}token ids"
            is_one = value and all(isinstance(each, int) for each in value)
            return one if one in tags and (is_one or several not in tags) else several
        if isinstance(value, Body):  # when it is serialised
            value = vars(value)
        if not isinstance(value, dict):
            return MEMBER
        kind = value.get(self.name)
        tag = f"{MEMBER}{self.name}={self.default if kind is None else kind}"
        other = f"{MEMBER}an object"
        return other if other in tags and tag not in tags else tag


# Reading ends at the first invalid entry.
Children = Annotated[list[T], Field(max_length=MAX_CHILDREN, fail_fast=True)]
SomeChildren = Annotated[Children[T], Field(min_length=1)]
Filled = Annotated[str, Field(min_length=1)]


def short(max_len: int) -> AfterValidator:
    """Limits the total number of characters of a list of texts."""

    def check(values: list[str]) -> list[str]:
        if (length := sum(map(len, values))) > max_len:
            raise wrong(f"has {length:,} characters, but at most {max_len:,} are allowed")
        return values

    return AfterValidator(check)


# A single text is accepted in place of a list of one.
ONE_OR_MORE = BeforeValidator(
    lambda value: [value] if isinstance(value, str) else value,
    json_schema_input_type=str | list[str],
)


# Messages of errors


def _refusal(cls: type[BaseModel], value: object, error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    place = _place_of(first["loc"], value)
    if first["type"] == "union_tag_invalid":
        return _refused_member(place, first)
    return refused(place, _words(cls, first), first.get("ctx", {}).get("code"))


def _place_of(loc: tuple[int | str, ...], value: Any) -> str:
    """A location of pydantic's as a path in the body, without the tags of unions, and without an
    index where a single text was given instead of a list.
    """
    place = ""
    for each in loc:
        if isinstance(each, str):
            if each.startswith(MEMBER):
                continue
            place = f"{place}.{each}" if place else each
            value = value.get(each) if isinstance(value, Mapping) else None
        elif isinstance(value, list):
            place = f"{place}[{each}]"
            value = value[each] if each < len(value) else None
    return place


def _words(cls: type[BaseModel], error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        name, *inside = error["loc"]
        advice = None if inside else _advice(cls, str(name))
        return f"is not supported; {advice or 'leave it out'}"
    expected = context.get("expected", "").replace(", ", " or ")
    if kind == "literal_error" and " or " not in expected:
        kind = "none_required"  # Only the value that describes what happens anyway is accepted.
    words = _WORDS.get(kind, "is invalid")
    return words.format(**{**context, "expected": expected, "input": shown(error["input"])})


def _refused_member(place: str, error: ErrorDetails) -> ApiError:
    """The error of a value that fits no member of a union: a wrong type, or an unknown tag."""
    value = error["input"]
    expected = error.get("ctx", {})["expected_tags"].split(", ")
    tags = [tag.strip("'").removeprefix(MEMBER) for tag in expected]
    named = [tag.partition("=") for tag in tags if "=" in tag]
    if isinstance(value, dict) and named:
        name = named[0][0]
        place = f"{place}.{name}" if place else name
        if value.get(name) is None:
            return refused(place, "is missing")
        kinds = " or ".join(repr(kind) for _, _, kind in named)
        return refused(place, f"must be {kinds}, got {shown(value[name])}")
    plain = [tag for tag in tags if "=" not in tag] + ["an object"] * bool(named)
    return refused(place, f"must be {' or '.join(plain)}, got {shown(value)}")


def _advice(cls: type[BaseModel], name: str) -> str | None:
    """What to send instead of an undeclared field."""
    declared = _names_of(cls)
    for names in _SYNONYMS:
        known = [each for each in names if each.partition(".")[0] in declared]
        if name in names and known:
            return f"send {known[0]}"
    ours = INSTEAD.get(name, "")
    if ours in SAMPLING_PARAMS and ours in declared:
        return f"send {ours}"
    return _ADVICE.get(name)


def log_left_out(place: str) -> None:
    """Log a field that was dropped, by its place in the body: once, and only if its name is a short
    word, since clients choose the names.
    """
    is_word = place.replace("[]", "").replace(".", "_").isidentifier() and len(place) <= 80
    if is_word and place not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(place)
        LOG.info("an unknown field was ignored: %s", place)
