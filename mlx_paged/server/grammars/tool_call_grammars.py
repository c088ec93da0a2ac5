"""Grammar rules for tool calls in the formats of models, in llguidance's Lark. Pure functions.

For each format there is a function that writes the rules ``call``, ``rest_of_call``, which is a
call without its start mark, and ``separator``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from json import dumps
from typing import Any, TypeAlias

from mlx_paged.engine.one_of import one_of_as_any_of
from mlx_paged.model_dialect import ToolFormat

# JSON on one line, with an optional space after commas and colons.
_ONE_LINE = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}


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


def json_rule(schema: Mapping[str, Any], **options: Any) -> str:
    """JSON of a schema in Lark, on one line."""
    guidance = {**_ONE_LINE, **options}
    return "%json " + dumps({**one_of_as_any_of(schema), "x-guidance": guidance})


def call_rules(
    call_format: ToolFormat, functions: Sequence[Function], may_be_several: bool
) -> str | None:
    """The rules ``call``, ``rest_of_call`` and ``separator`` (between two calls); ``None`` if the
    format or the parameters are not supported.
    """
    write = _WRITERS.get(call_format.name)
    return None if write is None else write(call_format, functions, may_be_several)


def _mark(call_format: ToolFormat, text: str) -> str:
    """A mark in Lark."""
    token = call_format.token_ids.get(text)
    return dumps(text) if token is None else f"<[{token}]>"


_Writer: TypeAlias = Callable[[ToolFormat, Sequence[Function], bool], str | None]


def json_objects(functions: Sequence[Function]) -> str:
    """The rule ``object``: the name and the arguments of a call as JSON, formatted as by Python."""
    rules = [_alternatives("object", len(functions))]
    for index, function in enumerate(functions):
        begin = dumps(f'{{"name": {dumps(function.name)}, "arguments": ')
        rules.append(f'object_{index}: {begin} {function.arguments} "}}"')
    return "\n".join(rules) + "\n"


def _alternatives(rule: str, count: int) -> str:
    return f"{rule}: {' | '.join(f'{rule}_{index}' for index in range(count))}"


def _write_json_tools(
    call_format: ToolFormat, functions: Sequence[Function], may_be_several: bool
) -> str:
    """Qwen 2.5 and 3, Hermes."""
    return (
        f"call: {_mark(call_format, call_format.start)} rest_of_call\n"
        f'rest_of_call: "\\n" object "\\n" {_mark(call_format, call_format.end)}\n'
        'separator: "\\n"\n' + json_objects(functions)
    )


def _write_mistral(
    call_format: ToolFormat, functions: Sequence[Function], may_be_several: bool
) -> str:
    """Mistral: a name and its arguments in newer formats, which have a mark for the arguments; a
    list of calls in older ones.
    """
    call = f"call: {_mark(call_format, call_format.start)} rest_of_call\n"
    if not call_format.arguments:
        more = ' (", " object)*' if may_be_several else ""
        rest = f'rest_of_call: "[" object{more} "]"\n'
        return call + rest + 'separator: ""\n' + json_objects(functions)
    mark = _mark(call_format, call_format.arguments)
    rules = [_alternatives("rest_of_call", len(functions)), 'separator: ""']
    for index, function in enumerate(functions):
        rules.append(f"rest_of_call_{index}: {dumps(function.name)} {mark} {function.arguments}")
    return call + "\n".join(rules) + "\n"


def _write_qwen3_coder(
    call_format: ToolFormat, functions: Sequence[Function], may_be_several: bool
) -> str | None:
    """Qwen3 Coder: a tag for each parameter, around plain text or JSON."""
    rules = [_alternatives("function", len(functions))]
    for index, function in enumerate(functions):
        parameters = _tagged_parameters(function)
        if parameters is None or not _is_tag_name(function.name):
            return None
        begin = dumps(f"<function={function.name}>\n")
        rules.append(f'function_{index}: {begin} {parameters} "</function>"')
    return (
        f"call: {_mark(call_format, call_format.start)} rest_of_call\n"
        f'rest_of_call: "\\n" function "\\n" {_mark(call_format, call_format.end)}\n'
        'separator: "\\n"\n'
        "text_value[lazy]: /(.|\\n)*<\\/parameter>/\n" + "\n".join(rules) + "\n"
    )


def _tagged_parameters(function: Function) -> str | None:
    schema, parts = function.parameters, []
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return None
    for name, each in properties.items():
        value = _tagged_value(function, each, schema.get("$defs", {}))
        if value is None or not _is_tag_name(name):
            return None
        part = f"{dumps(f'<parameter={name}>' + chr(10))} {value} {dumps(chr(10))}"
        parts.append(part if name in required else f"({part})?")
    return " ".join(parts)


def _is_tag_name(name: str) -> bool:
    return not any(letter.isspace() or letter in "<>" for letter in name)


# Keywords of a schema that need no rule.
_NOTES = {"type", "description", "title", "default", "examples"}
# At most 15 digits, since mlx-lm's parser reads numbers as floats.
_PLAIN = {
    "string": None,
    "integer": "/-?(0|[1-9][0-9]{0,14})/",
    "number": "/-?(0|[1-9][0-9]{0,14})(\\.[0-9]{1,15})?/",
    "boolean": '("true" | "false")',
}


def _tagged_value(function: Function, schema: Any, definitions: Any) -> str | None:
    """A value and its closing tag. mlx-lm's parser of the format reads a value by its type, so the
    schema must have exactly one.
    """
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    end = dumps("\n</parameter>")
    if not isinstance(kind, str):
        return None
    if kind in ("object", "array"):
        return f"{function.json({**schema, '$defs': definitions})} {end}"
    if kind not in _PLAIN:
        return None
    if schema.keys() <= _NOTES:
        return "text_value" if kind == "string" else f"{_PLAIN[kind]} {end}"
    if kind != "string":
        return f"{function.json(schema)} {end}"
    words = schema.get("enum")
    if not isinstance(words, list) or not schema.keys() <= _NOTES | {"enum"}:
        return None
    is_plain = all(isinstance(word, str) and word.strip() and word != "null" for word in words)
    return f"({' | '.join(map(dumps, words))}) {end}" if words and is_plain else None


_WRITERS: dict[str, _Writer] = {
    "json_tools": _write_json_tools,
    "mistral": _write_mistral,
    "qwen3_coder": _write_qwen3_coder,
}
