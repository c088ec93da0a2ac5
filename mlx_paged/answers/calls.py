"""``CallParser``: reads calls of tools in the formats of the table."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import regex

from mlx_paged.answers.cursor import Cursor, NotACallError, Steps, TruncatedError
from mlx_paged.answers.formats import CallFormat, Headed, Tags
from mlx_paged.answers.json_schema import Parameters
from mlx_paged.answers.literals import (
    PYTHON,
    Literals,
    Style,
    as_json,
    fields_of,
    json_end,
    json_text,
    object_end,
    object_text,
)
from mlx_paged.answers.marks import Marks
from mlx_paged.answers.patterns import TagPatterns, any_end, begin_of, ends_of, escaped, source_of

_AROUND_JSON = " \t\r\n],;}"
_MAX_NOISE = 200  # characters before the first call of a section
_NAME_KEYS = ("name", "tool_name", "function_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_JSON_BEGIN = regex.compile(r"[\s\[,;]*+\{")
_JSON_HEAD = regex.compile(
    r"""\{\s*["'](?:name|tool_name|function_name|arguments|parameters|args|type|id|tool_call_id|"""
    r"""function|index|reason)["']\s*:"""
)
_JSON_END = regex.compile(r"[\s\],;}]*+(?=[^\s\],;}])")
_LIST_BEGIN = regex.compile(r"\s*\[")
_PYTHON_NAME = regex.compile(r"""\s*(?P<name>[^\s\[\](){},="'<>]+)\s*\(""")
_GEMMA_NAME = regex.compile(r"\s*call:\s*(?P<name>[^\s{}:,]+)\s*\{")
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


class Call(NamedTuple):
    """A call that was read.

    Args:
        arguments: a JSON object.
        call_id: the id that the model has given it, if any.
    """

    name: str
    arguments: str
    call_id: str | None = None


Found: TypeAlias = Generator[Call | None, None, None]
"""A parser that yields calls, and ``None`` while it needs more text. It ends after the end mark, or
raises :class:`NotACallError`.
"""


class CallParser:
    """Reads calls from a cursor.

    Args:
        call_format: how they are written.
        marks: its control tokens.
        tools: the tools that may be called, in the form of OpenAI's ``tools``.

    Attributes:
        starts: texts that may begin calls, in the characters of ``marks``.
        begins_answers: whether an answer that begins with a bracket may be a call.
    """

    def __init__(self, call_format: CallFormat, marks: Marks, tools: Sequence[Mapping[str, Any]]):
        self._format = call_format
        self._marks = marks
        self._bare_start: str | None = None  # of calls without a start mark
        functions = [each.get("function") for each in tools]
        self._parameters = {
            str(each.get("name")): Parameters(each.get("parameters"))
            for each in functions
            if isinstance(each, Mapping)
        }
        shape = call_format.shape
        starts = [call_format.start, *call_format.other_starts]
        if isinstance(shape, Tags):
            self._tags = TagPatterns(call_format, shape, marks, list(self._parameters))
            if call_format.starts_bare or not call_format.start:
                self._bare_start = marks.encode(shape.call.partition("{")[0])
                starts.append(self._bare_start)
        if isinstance(shape, Headed):
            self._heads = [
                regex.compile(rf"\s*{source_of(head, marks)}\s*(?=\{{)") for head in shape.head
            ]
            end = "|".join(source_of(end, marks) for end in shape.end)
            self._head_end = regex.compile(rf"\s*(?:{end})") if end else None
            self._head_begins = [begin_of(head, marks) for head in shape.head]
        self.starts = [marks.encode(start) for start in starts if start]
        self.begins_answers = call_format.is_bare
        # An answer that is JSON may have a name, too.
        names = "|".join(regex.escape(json_text(name)) for name in self._parameters) or "(?!)"
        self._bare_head = regex.compile(
            rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?:{names})\s*[,}}]'
        )
        names = "|".join(map(regex.escape, self._parameters)) or "(?!)"
        self._bare_name = regex.compile(rf"\s*(?P<name>{names})\s*\(")
        self._end = regex.compile(rf"\s*{any_end(call_format, marks)}")
        self._start = regex.compile(r"\s*" + escaped(call_format.start, marks))
        self._object_end = object_end(ends_of(call_format, marks))

    def parse(self, cursor: Cursor, start: str) -> Found:
        """Read calls from where ``start`` was found, one of :attr:`starts`; it is empty for an
        answer that begins as a call.
        """
        shape = self._format.shape
        is_bare = not start
        if isinstance(shape, Tags):
            is_bare = start == self._bare_start
            if not is_bare:
                cursor.place += len(start)
            is_json = not (is_bare or self._format.is_section)
            if is_json and (yield from self._is_next(cursor, "{")):
                yield from self._read_json(cursor, start, is_bare=False)  # as other models do
            else:
                yield from self._read_tags(cursor, is_bare)
            return
        cursor.place += len(start)
        if shape == "python":
            yield from self._read_python(cursor, is_bare)
        elif shape == "gemma":
            yield from self._read_gemma(cursor)
        elif shape == "json":
            yield from self._read_json(cursor, start, is_bare)
        else:
            yield from self._read_headed(cursor, start, shape)

    # One function for each shape.

    def _read_json(self, cursor: Cursor, start: str, is_bare: bool) -> Found:
        if is_bare:
            yield from self._read_bare_json(cursor)
            return
        num_calls = 0
        while (yield from _optional(cursor, _JSON_BEGIN)) is not None:
            call = yield from self._json_call(cursor, _JSON_HEAD)
            num_calls += 1
            if self._format.end and start == self.starts[0]:
                yield from self._check_end(cursor)
            yield call
        if not num_calls:
            raise NotACallError
        yield from self._skip_end(cursor)

    def _read_bare_json(self, cursor: Cursor) -> Found:
        """Calls that are the whole answer."""
        calls: list[Call] = []
        try:
            while (yield from _optional(cursor, _JSON_BEGIN)) is not None:
                calls.append((yield from self._json_call(cursor, self._bare_head)))
            yield from self._check_nothing_else(cursor)
        except TruncatedError:
            yield from calls
            raise
        if not calls:
            raise NotACallError
        yield from calls

    def _json_call(self, cursor: Cursor, head: Any) -> Steps[Call]:
        """A call whose first bracket was read."""
        cursor.place -= 1
        begin = cursor.place
        yield from cursor.match(head)
        cursor.place = begin
        return self._call_of((yield from json_end(cursor, self._object_end)))

    def _call_of(self, text: str) -> Call:
        """The call that a JSON object is."""
        text = self._marks.decode_json(text)
        valid = as_json(text)
        fields = None if valid is None else fields_of(valid)
        if fields is None:
            raise NotACallError
        function = fields.get("function", "")
        inner = fields_of(function) if function.startswith("{") else None
        if inner is not None:
            fields = {**fields, **inner}
        name = next((fields[key] for key in _NAME_KEYS if key in fields), function)
        name = json.loads(name) if name.startswith('"') else ""
        if not name:
            raise NotACallError
        arguments = next((fields[key] for key in _ARGUMENT_KEYS if key in fields), "{}")
        if arguments.startswith('"'):  # JSON as a text
            arguments = as_json(json.loads(arguments, strict=False) or "{}") or ""
        arguments = "{}" if arguments == "null" else arguments
        if not arguments.startswith("{"):
            raise NotACallError
        call_id = fields.get("id", "null")
        return Call(name, arguments, json.loads(call_id) or None if call_id[0] == '"' else None)

    def _read_headed(self, cursor: Cursor, start: str, shape: Headed) -> Found:
        if self._format.is_section:
            yield from self._skip_noise(cursor, self._head_begins, _MAX_NOISE)
        elif (yield from self._is_next(cursor, "[{")):
            yield from self._read_json(cursor, start, is_bare=False)
            return
        is_first = True
        while True:
            found = yield from self._find_head(cursor, shape, is_first)
            if found is None:
                break
            is_first = False
            arguments = self._object((yield from json_end(cursor)))
            if self._head_end is not None and not (yield from self._ends(cursor, self._head_end)):
                raise NotACallError
            name, call_id = self._name_of(found)
            yield Call(name, arguments, call_id)
            if self._format.is_section:
                yield from self._skip_noise(cursor, self._head_begins)
        if is_first:
            if self._format.is_section and (yield from cursor.find(self._end)) is not None:
                return
            raise NotACallError
        if self._format.is_section:
            yield from _optional(cursor, self._end)

    def _find_head(self, cursor: Cursor, shape: Headed, is_first: bool) -> Steps[Any]:
        """The next head: any of them for the first call, else one with a mark."""
        heads = self._heads if is_first or not shape.is_repeated else self._heads[:-1]
        if not is_first and not self._format.is_section and not shape.is_repeated:
            return None
        for head in heads:
            begin = cursor.place
            found = yield from _optional(cursor, head)
            if found is not None:
                return found
            cursor.place = begin
        return None

    def _name_of(self, found: Any) -> tuple[str, str | None]:
        text = self._marks.decode(found["name"]).strip()
        if self._format.name != "kimi_k2":
            return text, found.groupdict().get("id")
        name = _KIMI_ID.fullmatch(text)
        return name[1] if name else text, text if ":" in text else None

    def _read_python(self, cursor: Cursor, is_bare: bool) -> Found:
        is_list = (yield from cursor.find(_LIST_BEGIN)) is not None
        calls: list[Call] = []
        while True:
            if is_list and calls and (yield from self._is_next(cursor, "]")):
                break
            pattern = self._bare_name if is_bare else _PYTHON_NAME
            name = str((yield from cursor.match(pattern))["name"])
            values = Literals(cursor, PYTHON, self._convert_for(name))
            arguments = yield from values.fields(")", key_ends_with="=")
            calls.append(Call(name, self._marks.decode_json(self._named(name, arguments))))
            yield from _optional(cursor, _SEPARATOR)
            if not is_list and not (yield from self._is_name_next(cursor)):
                break
        if is_list:
            yield from cursor.match(_LIST_END)
        if is_bare:
            yield from self._check_nothing_else(cursor)
        elif self._format.end:
            yield from self._check_end(cursor)
        yield from calls
        if not is_bare:
            yield from self._skip_end(cursor)

    def _is_name_next(self, cursor: Cursor) -> Steps[bool]:
        begin = cursor.place
        found = yield from _optional(cursor, _PYTHON_NAME)
        cursor.place = begin
        return found is not None

    def _named(self, name: str, arguments: dict[str, str]) -> str:
        """Arguments with the names of those that are given by their places."""
        names = self._parameters[name].names if name in self._parameters else []
        named: dict[str, str] = {}
        for key, value in arguments.items():
            if key.startswith("\0"):
                place = int(key[1:])
                if place >= len(names):
                    raise NotACallError
                key = names[place]
            named[key] = value
        return object_text(named)

    def _read_gemma(self, cursor: Cursor) -> Found:
        quote = self._marks.encode(self._format.quote)
        style = Style((quote,), has_escapes=False, has_plain_keys=True)
        num_calls = 0
        while (found := (yield from _optional(cursor, _GEMMA_NAME))) is not None:
            name = str(found["name"])
            arguments = yield from Literals(cursor, style, self._convert_for(name)).fields("}")
            call = Call(name, self._marks.decode_json(object_text(arguments)))
            begin = cursor.place
            if (yield from _optional(cursor, _GEMMA_NAME)) is None:
                yield from self._check_end(cursor)
            cursor.place = begin
            num_calls += 1
            yield call
        if not num_calls:
            raise NotACallError
        yield from self._skip_end(cursor)

    def _convert_for(self, name: str) -> Callable[[str, str], str]:
        parameters = self._parameters.get(name) or Parameters(None)
        return lambda text, key: parameters.convert(key, text)

    def _read_tags(self, cursor: Cursor, is_bare: bool) -> Found:
        tags, is_first = self._tags, True
        if self._format.is_section:
            yield from self._skip_noise(cursor, [tags.begin], _MAX_NOISE)
        while True:
            begin = cursor.place
            found = yield from _optional(cursor, tags.call)
            if found is None:
                break
            name = self._entities(found["name"])
            if name not in self._parameters and (
                is_bare or not (yield from self._may_be_unknown(cursor))
            ):
                cursor.place = begin
                break
            call = yield from self._read_tagged_call(cursor, name, found[0])
            is_first = False
            yield call
            if not tags.call_end:  # The end of the call is that of the format.
                return
            if self._format.is_section:
                yield from self._skip_noise(cursor, [tags.begin])
        if is_first:
            if self._format.is_section and (yield from cursor.find(self._end)) is not None:
                return
            raise NotACallError
        if self._format.end:
            yield from _optional(cursor, self._end)

    def _may_be_unknown(self, cursor: Cursor) -> Steps[bool]:
        """Whether what was read calls a tool even if there is none of this name: a plain name does
        if an argument follows.
        """
        if self._tags.is_plain_name:
            begin = cursor.place
            found = yield from _optional(cursor, self._tags.argument)
            cursor.place = begin
            return found is not None
        return self._tags.is_marked

    def _read_tagged_call(self, cursor: Cursor, name: str, head: str) -> Steps[Call]:
        tags, values = self._tags, dict[str, str]()
        texts: dict[str, tuple[str, str | None]] = {}
        if head.rstrip(">").endswith("/"):  # <invoke name="f"/>
            return Call(name, "{}")
        while True:
            if tags.json is not None and (yield from cursor.find(tags.json[0])) is not None:
                yield from cursor.match(_OBJECT_FOLLOWS)
                arguments = self._object((yield from json_end(cursor)))
                yield from cursor.match(tags.json[1])
                yield from cursor.match(tags.close)
                return Call(name, arguments)
            if (yield from cursor.find(tags.close)) is not None:
                break
            found = yield from cursor.match(tags.argument)
            begin = cursor.place
            end = yield from cursor.search(tags.value_end)
            text, key = cursor.text[begin : end.start()], self._entities(found["key"])
            texts.pop(key, None)
            texts[key] = text, found.groupdict().get("type")
            if end["close"] is None:  # The closing tag of the value was left out.
                cursor.place = end.start()
                yield from cursor.match(tags.close)
                break
        for key, text, kind in self._parts(name, texts):
            values[key] = self._value(name, key, self._marks.decode(text), kind)
        return Call(name, object_text(values))

    def _parts(
        self, name: str, texts: Mapping[str, tuple[str, str | None]]
    ) -> list[tuple[str, str, str | None]]:
        """The arguments, also those before which the closing tag of another one was left out."""
        known = set(self._parameters[name].names) if name in self._parameters else set()
        parts: list[tuple[str, str, str | None]] = []
        for key, (text, kind) in texts.items():
            begin = 0
            for found in self._tags.next_argument.finditer(text):
                other = self._entities(found["key"])
                if other not in known or other in texts or other == key:
                    continue
                parts.append((key, text[begin : found.start()] + "\n", kind))
                key, kind, begin = other, found.groupdict().get("type"), found.end()
            parts.append((key, text[begin:], kind))
        return parts

    def _value(self, name: str, key: str, text: str, kind: str | None) -> str:
        shape = self._format.shape
        assert isinstance(shape, Tags)
        if shape.newline:
            text = text.removeprefix("\n")
            text = text.removesuffix("\n")
        if kind is not None and shape.typed_as_text:
            if kind == shape.typed_as_text:
                return json_text(text)
            value = as_json(text)
            if value is not None:
                return value
        parameters = self._parameters.get(name) or Parameters(None)
        return parameters.convert(key, text)

    # Parts of several formats.

    def _object(self, text: str) -> str:
        """A JSON object that was read; raises ``NotACallError`` if it is none."""
        valid = as_json(self._marks.decode_json(text))
        if valid is None or not valid.startswith("{"):
            raise NotACallError
        return valid

    def _entities(self, text: str) -> str:
        text = self._marks.decode(text).strip()
        shape = self._format.shape
        return html.unescape(text) if isinstance(shape, Tags) and shape.has_entities else text

    def _is_next(self, cursor: Cursor, characters: str) -> Steps[bool]:
        """Whether one of the characters comes next, after white space."""
        begin = cursor.place
        try:
            yield from cursor.find(_SPACE)
        except TruncatedError:
            cursor.place = begin
            return False
        character = yield from cursor.peek()
        cursor.place = begin
        return bool(character) and character in characters

    def _skip_noise(
        self, cursor: Cursor, begins: list[Any], limit: int | None = None
    ) -> Steps[None]:
        """Read up to the next call of a section, or to its end. Only control tokens differ from
        noise.
        """
        begin = cursor.place
        if limit is not None and not self._marks.token_ids:
            return
        pattern = regex.compile("|".join([*(each.pattern for each in begins), self._end.pattern]))
        while True:
            found = pattern.search(cursor.text, begin, partial=not cursor.is_complete)
            place = len(cursor.text) if found is None else found.start()
            if limit is not None and place - begin > limit:
                raise NotACallError
            if found is not None and not found.partial:
                cursor.place = place
                return
            if cursor.is_complete:
                raise TruncatedError
            yield

    def _ends(self, cursor: Cursor, end: Any) -> Steps[bool]:
        """Read an end mark that may be left out where the model has ended the answer."""
        try:
            if (yield from cursor.find(end)) is not None:
                return True
        except TruncatedError:
            if cursor.is_cut:
                raise
            return True
        if cursor.is_complete and not cursor.text[cursor.place :].strip(_AROUND_JSON):
            if cursor.is_cut:
                raise TruncatedError
            return True
        return False

    def _check_end(self, cursor: Cursor) -> Steps[None]:
        """Raise unless an end mark, a further call or the end of the answer follows; reads none."""
        begin = cursor.place
        yield from _optional(cursor, _JSON_END)
        if (yield from self._ends(cursor, self._end)):
            cursor.place = begin
            return
        is_next = (yield from _optional(cursor, self._start)) is not None
        cursor.place = begin
        if not is_next and not (yield from self._is_next(cursor, "{,;")):
            raise NotACallError

    def _skip_end(self, cursor: Cursor) -> Steps[None]:
        while (yield from _optional(cursor, _CLOSING)) is not None:
            pass
        if self._format.end:
            yield from _optional(cursor, self._end)

    def _check_nothing_else(self, cursor: Cursor) -> Steps[None]:
        """Raise unless the answer ends here."""
        while (yield from cursor.peek()):
            if cursor.text[cursor.place] not in _AROUND_JSON:
                raise NotACallError
            cursor.place += 1


_SPACE = regex.compile(r"\s*+(?=\S)")
_SEPARATOR = regex.compile(r"\s*[,;]")
_LIST_END = regex.compile(r"\s*\]")
_CLOSING = regex.compile(r"\s*[\]}]")
_OBJECT_FOLLOWS = regex.compile(r"\s*(?=\{)")


def _optional(cursor: Cursor, pattern: Any) -> Steps[Any]:
    """What matches here, or ``None``, also where the model ends the answer within it."""
    try:
        return (yield from cursor.find(pattern))
    except TruncatedError:
        if cursor.is_cut:
            raise
        return None
