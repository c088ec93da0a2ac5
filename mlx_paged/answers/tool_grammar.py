"""Grammars for answers that call tools, in llguidance's Lark: calls are in the model's own format,
and their arguments conform to the tools' schemas. Pure functions.

After the reasoning, an answer consists of

- with ``ToolGrammar.is_json`` False: text with calls between the model's own marks. What a grammar
  allows is what :mod:`mlx_paged.answers` reads. If a tool must be called, there is no text before
  the first call, and at most a line break between two calls.
- with ``ToolGrammar.is_json`` True: one JSON array, ``[{"name": "f", "arguments": {...}}, ...]``,
  of at least one call, and nothing else. As in vLLM, this replaces formats without a grammar.

A call that has begun is truncated only by ``max_tokens``, the context or a stop text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any, NamedTuple

from mlx_paged.answers.dialect import Dialect, ToolChoice
from mlx_paged.answers.formats import CallFormat, Headed, Tags
from mlx_paged.answers.json_schema import Parameters, constants_of, one_of_as_any_of, target_of
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.options.sampling_declarations import StructuredOutputsParams

# JSON on one line, with an optional space after commas and colons.
_ONE_LINE = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
_MAX_REFERENCES = 20  # one after another
# The names of the two fields of a call in the formats that write them differently.
_JSON_NAMES = {"llama3": ("name", "parameters"), "command": ("tool_name", "parameters")}
# Keywords of a schema that need no rule.
_NOTES = {"type", "description", "title", "default", "examples"}
_OBJECT = {*_NOTES, "properties", "required", "additionalProperties"}
_ARRAY = {*_NOTES, "items", "minItems", "maxItems"}


class _UnsupportedError(Exception):
    """There are no rules for a format, or for the parameters of a function in it."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Args:
        form: in OpenAI's form, as chat templates take it.
        place: the place in the body of the object that has its name.
        schema_field: the field of that object with the JSON schema of its arguments.
    """

    form: Mapping[str, Any]
    place: str
    schema_field: str = "parameters"

    @classmethod
    def of(
        cls,
        place: str,
        name: str,
        description: str | None,
        parameters: Mapping[str, Any],
        strict: bool | None,
        schema_field: str = "parameters",
    ) -> Tool:
        """The tool of these fields."""
        fields = {"name": name, "description": description, "parameters": parameters}
        function = {field: value for field, value in fields.items() if value is not None}
        more = {"strict": True} if strict else {}
        return cls({"type": "function", "function": function | more}, place, schema_field)

    @property
    def name(self) -> str:
        return str(self.form["function"]["name"])

    @property
    def schema_place(self) -> str:
        """The place of the schema in the body."""
        return f"{self.place}.{self.schema_field}"

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments, which are an object.

        Raises:
            ArgumentError: it is not the schema of an object.
        """
        schema = self.form["function"].get("parameters")
        schema = {} if schema is None else schema
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise ArgumentError(
                f"{self.schema_place} must be the JSON schema of an object, got {shown(schema)}",
                self.schema_place,
            )
        return schema

    @property
    def is_strict(self) -> bool:
        """Whether a schema with keywords that can't be enforced is refused, instead of ignoring
        them.
        """
        return self.form["function"].get("strict") is True

    @property
    def arguments(self) -> str:
        """The arguments in Lark, always a JSON object."""
        return self.json({"type": "object", **self.parameters})

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON of a schema in Lark."""
        return _json_rule(schema, lenient=not self.is_strict)

    def value(self, schema: Any) -> str:
        """JSON of the schema of one argument in Lark."""
        schema = dict(schema) if isinstance(schema, Mapping) else {}
        for name in ("$defs", "definitions"):
            if name in self.parameters:
                schema[name] = self.parameters[name]
        return self.json(schema)

    def parts(self, schema: Mapping[str, Any] | None = None) -> list[tuple[str, Any, bool]]:
        """The arguments, or the properties of an object among them: the name, the schema, and
        whether it is required.

        Raises:
            _UnsupportedError: the schema is not one of an object.
        """
        schema = self.parameters if schema is None else schema
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise _UnsupportedError
        return [(str(name), each, name in required) for name, each in properties.items()]

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """A schema, or the one that it refers to."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping):
                break
            if not isinstance(schema.get("$ref"), str):
                return schema
            schema = target_of(self.parameters, schema["$ref"])
        raise _UnsupportedError

    def kind_of(self, schema: Any) -> str:
        """The type of values. One that has texts has nothing else: both are written plainly."""
        kinds = Parameters({**self.parameters, "properties": {"": schema}}).kinds("")
        if not kinds or ("string" in kinds and len(kinds) > 1):
            raise _UnsupportedError
        return next(iter(kinds)) if len(kinds) == 1 else "object"


@dataclass(frozen=True)
class ToolGrammar:
    """The grammar of an answer that calls tools; see the module's docstring for its format.

    Args:
        tools: those that it may call.
    """

    structured_outputs: StructuredOutputsParams
    is_json: bool
    tools: Sequence[Tool]

    def parts(self) -> dict[str, StructuredOutputsParams]:
        """A grammar for the arguments of each tool alone, by the place of their schema."""
        return {
            each.schema_place: StructuredOutputsParams(grammar=f"start: {each.arguments}")
            for each in self.tools
        }


def grammar_of_calls(
    tools: Sequence[Tool],
    dialect: Dialect,
    tool_choice: ToolChoice = "required",
    parallel_tool_calls: bool = True,
    requested: StructuredOutputsParams | None = None,
) -> ToolGrammar | None:
    """The grammar of an answer that may or must call tools; ``None`` if none is needed.

    - ``"required"`` or the name of a tool: one or more calls, of any tool or of the named one.
    - ``"auto"``: text that may contain calls, each of which is valid once begun, if a tool is
      strict. If a format is requested, the answer is either JSON in that format or calls.

    Args:
        dialect: of the model; JSON is used where it has no format of calls, or the parameters can't
            be written in it.
        parallel_tool_calls: whether there may be several calls.
        requested: the format that the request also asks for.

    Raises:
        ArgumentError: there is no tool, or none with this name; parameters are not the schema of an
            object; there is no grammar for the model's format; or the format can't be combined with
            calls. Its ``argument`` is the place in the body, or the field's name.
    """
    if tool_choice == "none" or (tool_choice == "auto" and not tools):
        return None
    if tool_choice != "auto" and requested is not None:
        raise ArgumentError(
            "tool_choice requires a call, but the request also asks for an answer in a format; "
            "send only one of them",
            "tool_choice",
        )
    for tool in tools:
        _ = tool.parameters  # refused for any tool
    if tool_choice == "auto" and requested is None:
        return _strict_calls(tools, dialect, parallel_tool_calls)
    if tool_choice not in ("auto", "required"):
        tools = [tool for tool in tools if tool.name == tool_choice]
        if not tools:
            words = f"tool_choice names {shown(tool_choice)}, which is not in tools"
            raise ArgumentError(words, "tool_choice")
    if not tools:
        raise ArgumentError("tool_choice requires a call, but there are no tools", "tools")
    calls = _required_calls(tools, dialect, parallel_tool_calls)
    return calls if requested is None else _format_or_calls(requested, calls)


def _required_calls(tools: Sequence[Tool], dialect: Dialect, is_parallel: bool) -> ToolGrammar:
    rules = _call_rules(dialect, tools, is_parallel)
    if rules is None:
        more = ' (", " object)*' if is_parallel else ""
        return _grammar(f'start: "[" object{more} "]"\n{_json_objects(tools)}', tools, is_json=True)
    more = " (separator call)*" if is_parallel and rules.separator is not None else ""
    return _grammar(f"start: call{more}\n{rules.lark}", tools)


def _strict_calls(tools: Sequence[Tool], dialect: Dialect, is_parallel: bool) -> ToolGrammar | None:
    strict = next((each for each in tools if each.is_strict), None)
    if strict is None:
        return None
    calls, rules = dialect.calls, _call_rules(dialect, tools, is_parallel)
    if calls is None or rules is None or not calls.start or calls.is_bare:
        how = "that calls no tools" if calls is None else f"that writes {calls.name}"
        raise ArgumentError(
            f"{strict.place}.strict can't be enforced with tool_choice 'auto', these parameters "
            f"and a model {how}; send tool_choice 'required', or leave strict out",
            f"{strict.place}.strict",
        )
    times = "*" if is_parallel else "?"
    if isinstance(dialect.marks.split(calls.start)[0], int):
        # Text contains no special tokens, so the mark always begins a call.
        group = f"(call TEXT){times}" if calls.end else f"call{times}"
        return _grammar(f"start: TEXT {group}\nTEXT: /(.|\\n)*/\n{rules.lark}", tools)
    mark = re.escape(calls.start).replace("/", "\\/")
    group = f"(text_and_mark rest_of_call){times}"
    start = f"start: {group} text\ntext_and_mark[lazy]: /(.|\\n)*{mark}/\n"
    return _grammar(f"{start}text: /(.|\\n)*/\n{rules.lark}", tools)


def _format_or_calls(requested: StructuredOutputsParams, calls: ToolGrammar) -> ToolGrammar:
    if requested.kind not in ("json", "json_object") or calls.is_json:
        raise ArgumentError(
            "tools can't be combined with this format of the answer, or for this model with any; "
            "send tool_choice 'none', or leave one of them out",
            "tools",
        )
    schema = {"type": "object"} if requested.json is None else json.loads(str(requested.json))
    rule = _json_rule(schema if isinstance(schema, dict) else {})
    lark = str(calls.structured_outputs.grammar).replace("start: ", "calls: ", 1)
    return _grammar(f"start: calls | formatted\nformatted: {rule}\n{lark}", calls.tools)


def reasoning_before(
    dialect: Dialect, prompt: str, calls: ToolGrammar | None = None
) -> dict[str, Any]:
    """``reasoning_start`` and ``begin_after`` of :class:`StructuredOutputsParams` for the answer to
    a prompt: the mark that opens the model's reasoning, unless the prompt has opened it, and the
    mark that closes it. Both are empty if the model has no marks or the prompt has closed it.

    Args:
        calls: the grammar, if it is one of calls.
    """
    if dialect.is_harmony:
        # A call follows reasoning; a text begins after the header of its message.
        is_own = calls is not None and not calls.is_json
        end = dialect.message_end if is_own else dialect.text_header
        return {"reasoning_start": dialect.reasoning_start if is_own else (), "begin_after": end}
    if not dialect.reasoning_end or dialect.closes_reasoning(prompt):
        return {"reasoning_start": (), "begin_after": ()}
    start = () if dialect.opens_reasoning(prompt) else dialect.reasoning_start
    return {"reasoning_start": start, "begin_after": dialect.reasoning_end}


def _grammar(lark: str, tools: Sequence[Tool], is_json: bool = False) -> ToolGrammar:
    return ToolGrammar(StructuredOutputsParams(grammar=lark), is_json, tools)


# Calls in the formats of models


class _CallRules(NamedTuple):
    """The rules of calls in a format.

    Args:
        rest: a call after its start mark.
        separator: what stands between two calls; ``None`` if a call is all calls of an answer.
        lark: further rules.
    """

    rest: str
    separator: str | None
    lark: str


def _call_rules(dialect: Dialect, tools: Sequence[Tool], may_be_several: bool) -> _CallRules | None:
    """The rules, which define ``call``, ``rest_of_call`` and ``separator``; ``None`` if the format
    or the parameters are not supported.
    """
    if dialect.calls is None:
        return None
    try:
        return _CallWriter(dialect, dialect.calls, tools, may_be_several).rules()
    except (_UnsupportedError, RecursionError):  # Only JSON can hold what refers to itself.
        return None


def _json_rule(schema: Mapping[str, Any], **options: Any) -> str:
    """JSON of a schema in Lark, on one line."""
    guidance = {**_ONE_LINE, **options}
    return "%json " + dumps({**one_of_as_any_of(schema), "x-guidance": guidance})


def _json_objects(tools: Sequence[Tool], name: str = "name", arguments: str = "arguments") -> str:
    """The rule ``object``: the name and the arguments of a call as JSON, formatted as by Python."""
    heads = [
        f'{{"{name}": {dumps(each.name, ensure_ascii=False)}, "{arguments}": ' for each in tools
    ]
    pairs = zip(heads, tools, strict=True)
    return _choice("object", [f'{dumps(head)} {each.arguments} "}}"' for head, each in pairs])


def _choice(rule: str, alternatives: Sequence[str]) -> str:
    """A rule that is one of several, and the rules of these."""
    names = " | ".join(f"{rule}_{index}" for index in range(len(alternatives)))
    lines = [f"{rule}_{index}: {each}" for index, each in enumerate(alternatives)]
    return "\n".join([f"{rule}: {names}", *lines]) + "\n"


class _CallWriter:
    """Writes the rules of one format."""

    def __init__(
        self,
        dialect: Dialect,
        calls: CallFormat,
        tools: Sequence[Tool],
        may_be_several: bool,
    ):
        self._marks = dialect.marks
        self._calls = calls
        self._tools = tools
        self._may_be_several = may_be_several
        self._texts: dict[str, str] = {}  # rules of texts, by what ends them

    def rules(self) -> _CallRules:
        shape, calls = self._calls.shape, self._calls
        if calls.engine == "harmony":
            found = self._harmony()
        elif isinstance(shape, Tags):
            found = self._tags(shape)
        elif isinstance(shape, Headed):
            found = self._headed(shape)
        else:
            found = {"json": self._json, "python": self._python, "gemma": self._gemma}[shape]()
        # An answer that begins as a call is one.
        start = self._term("" if calls.is_bare else calls.start)
        lark = (
            f"call: {start} rest_of_call\nrest_of_call: {found.rest}\n"
            f"separator: {dumps(found.separator or '')}\n{found.lark}"
        )
        return found._replace(lark=lark + "".join(self._texts.values()))

    def _term(self, text: str) -> str:
        """A text, in which there may be marks, in Lark."""
        return _terms(self._marks.split(text)) or '""'

    def _numbered(self, text: str) -> str:
        """The same with any number for ``{number}``."""
        first, number, last = text.partition("{number}")
        return f"{self._term(first)} /[0-9]+/ {self._term(last)}" if number else self._term(text)

    def _several(self, rule: str, separator: str) -> str:
        return f"{rule} ({dumps(separator)} {rule})*" if self._may_be_several else rule

    # The shapes.

    def _json(self) -> _CallRules:
        """Hermes and Qwen write an object between marks, others a list."""
        end, name = self._term(self._calls.end), self._calls.name
        objects = _json_objects(self._tools, *_JSON_NAMES.get(name, ()))
        if name == "json_tools":
            return _CallRules(f'"\\n" object "\\n" {end}', "\n", objects)
        if name == "llama3":
            return _CallRules("object", "; ", objects)
        return _CallRules(f'"[" {self._several("object", ", ")} "]" {end}', None, objects)

    def _headed(self, shape: Headed) -> _CallRules:
        """A name, a mark and an object."""
        if self._calls.name == "mistral" and self._marks.encode("[ARGS]") == "[ARGS]":
            return self._json()  # older models
        head, _, middle = shape.head[1 if shape.is_repeated else 0].partition("{name}")
        after = self._term(middle.replace(" ```json", "\n```json\n").replace(" ", ""))
        end = self._term(shape.end[0].replace("``` ", "\n```")) if shape.end else ""
        is_numbered = self._calls.name == "kimi_k2"
        written = []
        for tool in self._tools:
            name = f"functions.{tool.name}:" if is_numbered else tool.name
            begin = self._term(head.replace(" ", "") + name) + " /[0-9]+/" * is_numbered
            written.append(f"{begin} {after} {tool.arguments} {end}")
        rules = _choice("one", written)
        if not self._calls.is_section:
            return _CallRules("one", "", rules)
        separator = "\n" if "```" in end else ""
        return _CallRules(
            f"{self._several('one', separator)} {self._term(self._calls.end)}", None, rules
        )

    def _python(self) -> _CallRules:
        """A list of calls with keywords, whose values are JSON."""
        calls = []
        for tool in self._tools:
            if any(letter in '()=,"' for letter in tool.name):
                raise _UnsupportedError
            pairs = [
                (f"{dumps(f'{key}=')} {tool.value(schema)}", is_required)
                for key, schema, is_required in tool.parts()
            ]
            calls.append(f'{dumps(tool.name + "(")} {_joined(pairs, ", ")} ")"')
        end = "" if self._calls.is_bare else self._term(self._calls.end)
        return _CallRules(
            f'"[" {self._several("one", ", ")} "]" {end}', None, _choice("one", calls)
        )

    def _gemma(self) -> _CallRules:
        """A name and an object whose texts are between marks."""
        calls = [
            f'{dumps(f"call:{tool.name}" + "{")} {self._gemma_fields(tool, tool.parameters)} "}}"'
            for tool in self._tools
        ]
        return _CallRules(f"one {self._term(self._calls.end)}", "", _choice("one", calls))

    def _gemma_fields(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        if any(letter in ':{}[],"' for key in schema.get("properties", {}) for letter in key):
            raise _UnsupportedError
        return _joined(
            [
                (f"{dumps(f'{key}:')} {self._gemma_value(tool, each)}", is_required)
                for key, each, is_required in tool.parts(schema)
            ],
            ",",
        )

    def _gemma_value(self, tool: Tool, schema: Any) -> str:
        schema = tool.resolved(schema)
        kinds, branches = schema.get("type"), [schema.get("anyOf"), schema.get("oneOf")]
        if isinstance(kinds, list):
            branches.append([{**schema, "type": kind} for kind in kinds])
        alternatives = [self._gemma_constant(value) for value in constants_of(schema) or ()]
        if not alternatives:
            several = next((each for each in branches if each and isinstance(each, list)), ())
            alternatives = [self._gemma_value(tool, each) for each in several]
        if alternatives:
            return f"({' | '.join(alternatives)})"
        return self._gemma_typed(tool, schema, kinds)

    def _gemma_typed(self, tool: Tool, schema: Mapping[str, Any], kind: Any) -> str:
        if kind == "object" and schema.keys() <= _OBJECT:
            return f'"{{" ({self._gemma_fields(tool, schema)}) "}}"'
        if kind == "array" and schema.keys() <= _ARRAY:
            item = self._gemma_value(tool, schema.get("items", {"type": "string"}))
            min_items, max_items = schema.get("minItems", 0), schema.get("maxItems")
            if max_items == 0:
                return '"[]"'
            times = f"{{{max(0, min_items - 1)},{'' if max_items is None else max_items - 1}}}"
            return f'"[" ({item} ("," {item}){times}){"" if min_items else "?"} "]"'
        if kind == "string" and schema.keys() <= _NOTES:
            return f"{self._term(self._calls.quote)} {self._text_before(self._calls.quote)}"
        if kind in ("integer", "number", "boolean", "null"):
            return f"({tool.json(schema)})"
        raise _UnsupportedError

    def _gemma_constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._term(f"{self._calls.quote}{value}{self._calls.quote}")
        if isinstance(value, list | dict):
            raise _UnsupportedError
        return dumps(dumps(value))

    def _tags(self, tags: Tags) -> _CallRules:
        """A tag for each argument, around plain text or JSON."""
        begin, _, last = tags.call.rpartition("{any}")
        opening = f"{begin}{tags.attributes}{last}".replace("{any}", "") + tags.between
        calls = []
        for tool in self._tools:
            if not _is_tag_name(tool.name):
                raise _UnsupportedError
            parts = [self._tagged(tags, tool, *part) for part in tool.parts()]
            start = self._numbered(opening.replace("{name}", tool.name))
            calls.append(f"{start} {' '.join(parts)} {self._term(tags.call_end)}")
        end, rules = self._term(self._calls.end), _choice("function", calls)
        if not self._calls.start:
            return _CallRules("function", tags.between, rules)
        if self._calls.is_section:
            inner, between = self._several("function", tags.between), dumps(tags.between)
            return _CallRules(f"{between} {inner} {between} {end}", None, rules)
        if tags.call_end:
            return _CallRules(f'"\\n" function "\\n" {end}', "\n", rules)
        return _CallRules(f"function {end}", "", rules)

    def _tagged(self, tags: Tags, tool: Tool, key: str, schema: Any, is_required: bool) -> str:
        if not _is_tag_name(key):
            raise _UnsupportedError
        kind = tool.kind_of(schema)
        has_text, line = kind == "string", "\n" if tags.newline else ""
        begin = tags.argument.replace("{key}", key).replace("{any}", "").replace("> <", "><")
        if "{type}" in begin:
            begin = begin.replace("{type}", _type_of(tags, kind))
        end = line + tags.argument_end
        if has_text:
            value = self._tagged_text(tool.resolved(schema), end, tags)
        else:
            value = f"({tool.value(schema)}) {self._term(end)}"
        part = f"{self._term(begin + line)} {value} {dumps(tags.between)}"
        return part if is_required else f"({part})?"

    def _tagged_text(self, schema: Mapping[str, Any], end: str, tags: Tags) -> str:
        if schema.keys() <= _NOTES:
            return self._text_before(end)
        words = constants_of(schema)
        if not words or not schema.keys() <= _NOTES | {"enum", "const"}:
            raise _UnsupportedError
        if not all(isinstance(word, str) for word in words):
            raise _UnsupportedError
        return f"({' | '.join(self._term(word) for word in words)}) {self._term(end)}"

    def _harmony(self) -> _CallRules:
        """A message to the tool. The token that ends it ends the answer."""
        calls = []
        for tool in self._tools:
            head = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
            calls.append(f"{self._term(head)} {tool.arguments}")
        opening = f"({self._term('<|start|>assistant')})?"
        return _CallRules(f"{opening} one", None, _choice("one", calls))

    def _text_before(self, end: str) -> str:
        """Any text up to an end, and the end. A text contains no control token."""
        if end not in self._texts:
            parts = self._marks.split(end)
            place = next((i for i, each in enumerate(parts) if isinstance(each, int)), len(parts))
            pattern = re.escape("".join(map(str, parts[:place])))
            pattern = pattern.replace("/", "\\/").replace("\\\n", "\\n")
            number, is_lazy = len(self._texts), place == len(parts)
            text = f"text_{number}" if is_lazy else f"TEXT_{number}"
            self._texts[end] = (
                f"value_{number}: {text} {_terms(parts[place:])}\n"
                f"{text}{'[lazy]' if is_lazy else ''}: /(.|\\n)*{pattern}/\n"
            )
        return f"value_{list(self._texts).index(end)}"


def _terms(parts: Iterable[str | int]) -> str:
    """Texts, and marks as token ids, in Lark."""
    return " ".join(
        dumps(each, ensure_ascii=False) if isinstance(each, str) else f"<[{each}]>"
        for each in parts
    )


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
