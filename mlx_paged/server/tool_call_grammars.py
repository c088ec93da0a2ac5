"""Grammar rules for tool calls in the formats of models, in llguidance's Lark. Pure functions.

For each shape of calls there is a function that writes the rules ``call``, ``rest_of_call``, which
is a call without its start mark, and ``separator``. Where several calls stand between one pair of
marks, ``call`` is all of them. What the rules allow is what :mod:`mlx_paged.answers` reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from json import dumps
from typing import Any, NamedTuple, TypeAlias

from mlx_paged.answers.dialect import Dialect
from mlx_paged.answers.formats import CallFormat, Headed, Tags
from mlx_paged.answers.json_schema import Parameters, one_of_as_any_of

# JSON on one line, with an optional space after commas and colons.
_ONE_LINE = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}

_MAX_REFERENCES = 20  # one after another


class CallRules(NamedTuple):
    """Rules in Lark.

    Args:
        is_group: whether ``call`` is all calls of an answer.
    """

    lark: str
    is_group: bool


class UnsupportedError(Exception):
    """There are no rules for a format, or for the parameters of a function in it."""


@dataclass(frozen=True)
class Function:
    """A function that a model may call.

    Args:
        path: its place in the request.
        parameters: the JSON schema of its arguments, which are an object.
        is_strict: whether a schema with keywords that can't be enforced is refused, instead of
            ignoring them.
    """

    path: str
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False

    @property
    def arguments(self) -> str:
        """The arguments in Lark, always a JSON object."""
        return self.json({"type": "object", **self.parameters})

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON of a schema in Lark."""
        return json_rule(schema, lenient=not self.is_strict)

    def value(self, schema: Any) -> str:
        """JSON of the schema of one argument in Lark."""
        schema = schema if isinstance(schema, Mapping) else {}
        definitions = {
            name: self.parameters[name] for name in ("$defs", "definitions")
            if name in self.parameters
        }  # fmt: skip
        return self.json({**schema, **definitions})

    def parts(self, schema: Mapping[str, Any] | None = None) -> list[tuple[str, Any, bool]]:
        """The arguments, or the properties of an object among them: the name, the schema, and
        whether it is required.

        Raises:
            UnsupportedError: the schema is not one of an object.
        """
        schema = self.parameters if schema is None else schema
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise UnsupportedError
        return [(str(name), each, name in required) for name, each in properties.items()]

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """A schema, or the one that it refers to."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping):
                raise UnsupportedError
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            found: Any = self.parameters
            for step in reference.removeprefix("#").strip("/").split("/"):
                found = found.get(step) if isinstance(found, Mapping) else None
            schema = found
        raise UnsupportedError

    def kind_of(self, schema: Any) -> str:
        """The type of values. One that has texts has nothing else: both are written plainly."""
        kinds = Parameters({**self.parameters, "properties": {"": schema}}).kinds("")
        if not kinds or ("string" in kinds and len(kinds) > 1):
            raise UnsupportedError
        return next(iter(kinds)) if len(kinds) == 1 else "object"


def json_rule(schema: Mapping[str, Any], **options: Any) -> str:
    """JSON of a schema in Lark, on one line."""
    guidance = {**_ONE_LINE, **options}
    return "%json " + dumps({**one_of_as_any_of(schema), "x-guidance": guidance})


def call_rules(
    dialect: Dialect, functions: Sequence[Function], may_be_several: bool
) -> CallRules | None:
    """The rules ``call``, ``rest_of_call`` and ``separator`` (between two calls); ``None`` if the
    format or the parameters are not supported.
    """
    if dialect.calls is None:
        return None
    try:
        return _GrammarWriter(dialect, dialect.calls, may_be_several).rules(functions)
    except UnsupportedError:
        return None


def json_objects(functions: Sequence[Function]) -> str:
    """The rule ``object``: the name and the arguments of a call as JSON, formatted as by Python."""
    return _objects(functions, '{"name": ', ', "arguments": ')


def _objects(functions: Sequence[Function], name: str, arguments: str) -> str:
    rules = [_alternatives("object", len(functions))]
    for index, function in enumerate(functions):
        begin = dumps(f"{name}{dumps(function.name, ensure_ascii=False)}{arguments}")
        rules.append(f'object_{index}: {begin} {function.arguments} "}}"')
    return "\n".join(rules) + "\n"


def _alternatives(rule: str, count: int) -> str:
    return f"{rule}: {' | '.join(f'{rule}_{index}' for index in range(count))}"


# Keywords of a schema that need no rule.
_NOTES = {"type", "description", "title", "default", "examples"}
_OBJECT = {*_NOTES, "properties", "required", "additionalProperties"}
_ARRAY = {*_NOTES, "items", "minItems", "maxItems"}

# The rest of a call after its start mark, what stands between two calls (``None`` if a call is all
# of them), and further rules.
_Rules: TypeAlias = "tuple[str, str | None, str]"


class _GrammarWriter:
    """Writes the rules of one format."""

    def __init__(self, dialect: Dialect, calls: CallFormat, may_be_several: bool):
        self._marks = dialect.marks
        self._calls = calls
        self._may_be_several = may_be_several
        self._texts: dict[str, str] = {}  # rules of texts, by what ends them

    def rules(self, functions: Sequence[Function]) -> CallRules:
        shape = self._calls.shape
        if self._calls.engine == "harmony":
            rest, separator, rules = self._harmony(functions)
        elif isinstance(shape, Tags):
            rest, separator, rules = self._tags(shape, functions)
        elif isinstance(shape, Headed):
            rest, separator, rules = self._headed(shape, functions)
        else:
            write = {"json": self._json, "python": self._python, "gemma": self._gemma}[shape]
            rest, separator, rules = write(functions)
        start = self._term(self._start)
        texts = "".join(self._texts.values())
        lark = (
            f"call: {start} rest_of_call\nrest_of_call: {rest}\n"
            f"separator: {dumps(separator or '')}\n{rules}{texts}"
        )
        return CallRules(lark, separator is None)

    @property
    def _start(self) -> str:
        # An answer that begins as a call is one.
        return "" if self._calls.is_bare else self._calls.start

    def _term(self, text: str) -> str:
        """A text, in which there may be marks, in Lark."""
        parts = self._marks.split(text)
        terms = [dumps(each, ensure_ascii=False) if isinstance(each, str) else f"<[{each}]>"
                 for each in parts]  # fmt: skip
        return " ".join(terms) or '""'

    def _numbered(self, text: str) -> str:
        """The same with any number for ``{number}``."""
        first, number, last = text.partition("{number}")
        return f"{self._term(first)} /[0-9]+/ {self._term(last)}" if number else self._term(text)

    def _several(self, rule: str, separator: str) -> str:
        return f"{rule} ({dumps(separator)} {rule})*" if self._may_be_several else rule

    # The shapes.

    def _json(self, functions: Sequence[Function]) -> _Rules:
        """Hermes and Qwen write an object between marks, others a list."""
        end = self._term(self._calls.end)
        if self._calls.name == "json_tools":
            return f'"\\n" object "\\n" {end}', "\n", json_objects(functions)
        if self._calls.name == "llama3":
            return "object", "; ", _objects(functions, '{"name": ', ', "parameters": ')
        objects = json_objects(functions)
        if self._calls.name == "command":
            objects = _objects(functions, '{"tool_name": ', ', "parameters": ')
        return f'"[" {self._several("object", ", ")} "]" {end}', None, objects

    def _headed(self, shape: Headed, functions: Sequence[Function]) -> _Rules:
        """A name, a mark and an object."""
        if self._calls.name == "mistral" and self._marks.encode("[ARGS]") == "[ARGS]":
            objects = json_objects(functions)  # older models
            return f'"[" {self._several("object", ", ")} "]"', None, objects
        is_mistral = shape.is_repeated
        head, _, middle = shape.head[1 if is_mistral else 0].partition("{name}")
        rules = [_alternatives("one", len(functions))]
        for index, function in enumerate(functions):
            name, number = function.name, ""
            if self._calls.name == "kimi_k2":
                name, number = f"functions.{name}:", "/[0-9]+/ "
            after = middle.replace(" ```json", "\n```json\n").replace(" ", "")
            rules.append(
                f"one_{index}: {self._term(head.replace(' ', '') + name)} {number}"
                f"{self._term(after)} {function.arguments} {self._headed_end(shape)}"
            )
        lines = "\n".join(rules) + "\n"
        if not self._calls.is_section:
            return "one", "", lines
        separator = "\n" if "```" in (shape.end or ("",))[0] else ""
        return f"{self._several('one', separator)} {self._term(self._calls.end)}", None, lines

    def _headed_end(self, shape: Headed) -> str:
        if not shape.end:
            return ""
        return self._term(shape.end[0].replace("``` ", "\n```"))

    def _python(self, functions: Sequence[Function]) -> _Rules:
        """A list of calls with keywords, whose values are JSON."""
        rules = [_alternatives("one", len(functions))]
        for index, function in enumerate(functions):
            pairs = [
                (f"{dumps(f'{key}=')} {function.value(schema)}", is_required)
                for key, schema, is_required in function.parts()
            ]
            if any(letter in '()=,"' for letter in function.name):
                raise UnsupportedError
            rules.append(f'one_{index}: {dumps(function.name + "(")} {_joined(pairs, ", ")} ")"')
        end = "" if self._calls.is_bare else self._term(self._calls.end)
        return f'"[" {self._several("one", ", ")} "]" {end}', None, "\n".join(rules) + "\n"

    def _gemma(self, functions: Sequence[Function]) -> _Rules:
        """A name and an object whose texts are between marks."""
        rules = [_alternatives("one", len(functions))]
        for index, function in enumerate(functions):
            fields = self._gemma_fields(function, function.parameters)
            rules.append(f'one_{index}: {dumps(f"call:{function.name}" + "{")} {fields} "}}"')
        return f"one {self._term(self._calls.end)}", "", "\n".join(rules) + "\n"

    def _gemma_fields(self, function: Function, schema: Mapping[str, Any]) -> str:
        if any(letter in ':{}[],"' for key in schema.get("properties", {}) for letter in key):
            raise UnsupportedError
        return _joined(
            [
                (f"{dumps(f'{key}:')} {self._gemma_value(function, each)}", is_required)
                for key, each, is_required in function.parts(schema)
            ],
            ",",
        )

    def _gemma_value(self, function: Function, schema: Any) -> str:
        schema = function.resolved(schema)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return f"({' | '.join(self._gemma_constant(value) for value in values)})"
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list) and schema[keyword]:
                parts = (self._gemma_value(function, each) for each in schema[keyword])
                return f"({' | '.join(parts)})"
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            parts = (self._gemma_value(function, {**schema, "type": kind}) for kind in kinds)
            return f"({' | '.join(parts)})"
        return self._gemma_typed(function, schema, kinds)

    def _gemma_typed(self, function: Function, schema: Mapping[str, Any], kind: Any) -> str:
        if kind == "object" and schema.keys() <= _OBJECT:
            return f'"{{" ({self._gemma_fields(function, schema)}) "}}"'
        if kind == "array" and schema.keys() <= _ARRAY:
            item = self._gemma_value(function, schema.get("items", {"type": "string"}))
            min_items, max_items = schema.get("minItems", 0), schema.get("maxItems")
            if max_items == 0:
                return '"[]"'
            times = f"{{{max(0, min_items - 1)},{'' if max_items is None else max_items - 1}}}"
            return f'"[" ({item} ("," {item}){times}){"" if min_items else "?"} "]"'
        if kind == "string" and schema.keys() <= _NOTES:
            return f"{self._term(self._calls.quote)} {self._text_before(self._calls.quote)}"
        if kind in ("integer", "number", "boolean", "null"):
            return f"({function.json(schema)})"
        raise UnsupportedError

    def _gemma_constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._term(f"{self._calls.quote}{value}{self._calls.quote}")
        if isinstance(value, list | dict):
            raise UnsupportedError
        return dumps(dumps(value))

    def _tags(self, tags: Tags, functions: Sequence[Function]) -> _Rules:
        """A tag for each argument, around plain text or JSON."""
        rules = [_alternatives("function", len(functions))]
        for index, function in enumerate(functions):
            if not _is_tag_name(function.name):
                raise UnsupportedError
            call = tags.call.replace("{name}", function.name)
            begin, _, last = call.rpartition("{any}")
            call = f"{begin}{tags.attributes}{last}".replace("{any}", "")
            parts = [
                self._tagged(tags, function, key, schema, is_required)
                for key, schema, is_required in function.parts()
            ]
            rules.append(
                f"function_{index}: {self._numbered(call + tags.between)} {' '.join(parts)} "
                f"{self._term(tags.call_end)}"
            )
        end, lines = self._term(self._calls.end), "\n".join(rules) + "\n"
        if not self._calls.start:
            return "function", tags.between, lines
        if self._calls.is_section:
            inner = self._several("function", tags.between)
            between = dumps(tags.between)
            return f"{between} {inner} {between} {end}", None, lines
        if tags.call_end:
            return f'"\\n" function "\\n" {end}', "\n", lines
        return f"function {end}", "", lines

    def _tagged(
        self, tags: Tags, function: Function, key: str, schema: Any, is_required: bool
    ) -> str:
        if not _is_tag_name(key):
            raise UnsupportedError
        kind = function.kind_of(schema)
        has_text, line = kind == "string", "\n" if tags.newline else ""
        begin = tags.argument.replace("{key}", key).replace("{any}", "").replace("> <", "><")
        if "{type}" in begin:
            begin = begin.replace("{type}", _type_of(tags, kind))
        end = line + tags.argument_end
        if has_text:
            value = self._tagged_text(function.resolved(schema), end, tags)
        else:
            value = f"({function.value(schema)}) {self._term(end)}"
        part = f"{self._term(begin + line)} {value} {dumps(tags.between)}"
        return part if is_required else f"({part})?"

    def _tagged_text(self, schema: Mapping[str, Any], end: str, tags: Tags) -> str:
        if schema.keys() <= _NOTES:
            return self._text_before(end)
        words = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(words, list) or not schema.keys() <= _NOTES | {"enum", "const"}:
            raise UnsupportedError
        if not words or not all(isinstance(word, str) for word in words):
            raise UnsupportedError
        return f"({' | '.join(self._term(word) for word in words)}) {self._term(end)}"

    def _harmony(self, functions: Sequence[Function]) -> _Rules:
        """A message to the function. The token that ends it ends the answer."""
        rules = [_alternatives("one", len(functions))]
        for index, function in enumerate(functions):
            head = (
                f"<|channel|>commentary to=functions.{function.name} <|constrain|>json<|message|>"
            )
            rules.append(f"one_{index}: {self._term(head)} {function.arguments}")
        opening = f"({self._term('<|start|>assistant')})?"
        return f"{opening} one", None, "\n".join(rules) + "\n"

    def _text_before(self, end: str) -> str:
        """Any text up to an end, and the end. A text contains no control token."""
        if end not in self._texts:
            parts = self._marks.split(end)
            place = next((i for i, each in enumerate(parts) if isinstance(each, int)), None)
            before = "".join(str(each) for each in parts[:place]) if place is not None else end
            pattern = re.escape(before).replace("/", "\\/").replace("\\\n", "\\n")
            is_lazy = place is None
            rest = [] if place is None else parts[place:]
            terms = [f"<[{each}]>" if isinstance(each, int) else dumps(each, ensure_ascii=False)
                     for each in rest]  # fmt: skip
            number = len(self._texts)
            text = f"text_{number}" if is_lazy else f"TEXT_{number}"
            self._texts[end] = (
                f"value_{number}: {text} {' '.join(terms)}\n"
                f"{text}{'[lazy]' if is_lazy else ''}: /(.|\\n)*{pattern}/\n"
            )
        return f"value_{list(self._texts).index(end)}"


def _joined(parts: Iterable[tuple[str, bool]], separator: str) -> str:
    """Parts, of which some are required, with separators between those that there are."""
    ordered = sorted(parts, key=lambda part: not part[1])
    required = [part for part, is_required in ordered if is_required]
    optional = [part for part, is_required in ordered if not is_required]
    comma = dumps(separator)
    first = f" {comma} ".join(required)
    if required:
        return " ".join([first, *(f"({comma} {part})?" for part in optional)])
    tails = [
        " ".join([part, *(f"({comma} {other})?" for other in optional[index + 1 :])])
        for index, part in enumerate(optional)
    ]
    return f"({' | '.join(tails)})?" if tails else ""


def _type_of(tags: Tags, kind: str) -> str:
    """What a tag says of the type of its value."""
    if kind == "string":
        return tags.typed_as_text
    if tags.typed_as_text == "true":
        return "false"
    return "number" if kind == "integer" else kind


def _is_tag_name(name: str) -> bool:
    return bool(name) and not any(letter.isspace() or letter in '<>"&' for letter in name)
