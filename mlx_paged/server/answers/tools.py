"""Parses tool calls, in the formats of mlx-lm's tool parsers, into events."""

from __future__ import annotations

import json
import logging
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_paged.engine.text_stream import find_unfinished_stop
from mlx_paged.model_dialect import ToolFormat
from mlx_paged.server.answers.events import Event, ToolCall
from mlx_paged.server.answers.tool_arguments import ArgumentsScanner

LOG = logging.getLogger("mlx_paged.server")

_ID_CHARACTERS = string.ascii_letters + string.digits
_JSON_STRING = r'"(?:[^"\\]|\\.)*"'
# Characters around calls, which may be in a list.
_AROUND_JSON = " \t\r\n[],"
# `{"name": "...", "arguments": `, followed by an object.
_JSON_HEAD = re.compile(
    rf'[\s,\[\]]*\{{\s*"name"\s*:\s*({_JSON_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
# After the arguments: further fields, and `}`.
_JSON_FOOT = re.compile(rf'\s*(?:,\s*"\w+"\s*:\s*(?:{_JSON_STRING}|[-+.\w]+)\s*)*\}}')


def _parse_json(text: str, tools: object = None) -> Any:
    return json.loads(text)


JSON_LIST = ToolFormat("json_tools", "", "", _parse_json)
"""An answer of calls only, ``[{"name": ..., "arguments": {...}}, ...]``: it is enforced if there is
no grammar for the model's own format.
"""


def new_call_id(tool_format: ToolFormat) -> str:
    """An id for a call. The templates of Mistral's older models require nine letters and digits."""
    length, prefix = (9, "") if tool_format.name == "mistral" else (24, "call_")
    return prefix + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(length))


class CallReader:
    """Reads the text between two marks, which may contain several calls. Their events come with the
    end mark.

    Args:
        tools: the tools that may be called, in the form of OpenAI's ``tools``.
        first_index: the index of the first call.
        max_calls: further calls of the answer are dropped; ``None``: no limit.

    Attributes:
        num_calls: the number of calls so far, including dropped ones.
        rest: the text after the end mark, once that was found.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Sequence[Mapping[str, Any]],
        first_index: int,
        max_calls: int | None,
    ):
        self.num_calls = 0
        self.rest: str | None = None
        self._format = tool_format
        self._tools = [dict(tool) for tool in tools]
        self._names = {tool.get("function", {}).get("name") for tool in tools}
        self._first_index = first_index
        self._max_calls = max_calls
        self._body: list[str] = []
        self._tail = ""  # possibly the beginning of the end mark

    def add(self, text: str) -> list[Event]:
        """The events that are certain after this text."""
        body, self.rest = self._cut(text)
        self._body.append(body)
        return [] if self.rest is None else self._parsed("".join(self._body))

    def finish(self, is_truncated: bool) -> list[Event]:
        """The events at the end of the answer. A call without an end mark is accepted unless the
        answer was truncated: its arguments might be incomplete.
        """
        body = "".join([*self._body, self._tail])
        if is_truncated and self._format.end:
            return self._as_text(body, "was truncated")
        return self._parsed(body)

    def _cut(self, text: str) -> tuple[str, str | None]:
        """The text up to the end mark, and the text after it if the mark was found."""
        text, end = self._tail + text, self._format.end
        self._tail = ""
        place = text.find(end) if end else -1
        if place >= 0:
            return text[:place], text[place + len(end) :]
        place = find_unfinished_stop(text, (end,))
        self._tail = text[place:]
        return text[:place], None

    def _parsed(self, body: str) -> list[Event]:
        try:
            found = self._format.parse(body, self._tools)
            calls = [_as_call(each) for each in (found if isinstance(found, list) else [found])]
        except Exception as error:
            # mlx-lm's parser may raise anything for the text of a model.
            return self._as_text(body, f"can't be parsed ({type(error).__name__})")
        if not calls:
            return self._as_text(body, "is empty")
        events: list[Event] = []
        for name, arguments, call_id in calls:
            index = self._begin(name, events, call_id)
            if index is not None:
                events.append(Event("call", arguments))
        return events

    def _begin(self, name: str, events: list[Event], call_id: str | None = None) -> int | None:
        """Begin a call; returns its index, or ``None`` if the call is dropped."""
        index = self._first_index + self.num_calls
        self.num_calls += 1
        if self._max_calls is not None and index >= self._max_calls:
            return None
        if name not in self._names:
            # Agents reply that the tool does not exist, and models then choose another one.
            LOG.warning("the model called a tool that is not in the request")
        call = ToolCall(index, call_id or new_call_id(self._format), name)
        events.append(Event("call", call=call))
        return index

    def _as_text(self, body: str, why: str) -> list[Event]:
        LOG.warning("a call in the format %s %s; it is returned as text", self._format.name, why)
        end = "" if self.rest is None else self._format.end
        return [Event("text", self._format.start + body + end)]


class JsonCallReader(CallReader):
    """Reads ``{"name": ..., "arguments": {...}}``, and streams the arguments.

    The events of JSON calls that begin differently come with the end mark. An end mark inside a
    string is part of the string.
    """

    _pending = ""
    _arguments: ArgumentsScanner | None = None
    _index: int | None = None  # of the call whose arguments are being read
    _needs_foot = False  # after the arguments, before the end of their call
    _is_raw = False  # the text up to the end mark is not JSON

    def add(self, text: str) -> list[Event]:
        self._pending += text
        events: list[Event] = []
        while self.rest is None and self._step(events):
            pass
        return events

    def finish(self, is_truncated: bool) -> list[Event]:
        events: list[Event] = []
        if self._is_raw:
            self._tell(self._tail, events)
        elif self._arguments is not None:
            self._end_arguments(None if is_truncated else self._arguments.close(), events)
        elif self._pending.strip(_AROUND_JSON) or not self.num_calls:
            if is_truncated:
                return self._as_text(self._pending, "was truncated")
            return self._parsed(self._pending)
        return events

    def _step(self, events: list[Event]) -> bool:
        """Read the next element; returns whether there may be more to read."""
        if self._is_raw:
            text, self.rest = self._cut(self._pending)
            self._pending = ""
            self._tell(text, events)
            return False
        if self._arguments is not None:
            return self._read_arguments(self._arguments, events)
        return self._read_head(events)

    def _read_arguments(self, arguments: ArgumentsScanner, events: list[Event]) -> bool:
        self._tell(arguments.add(self._pending), events)
        self._pending = arguments.rest
        if arguments.is_done:
            self._arguments, self._needs_foot = None, True
            return True
        end = self._format.end
        if not arguments.is_broken or (
            len(self._pending) < len(end) and end.startswith(self._pending)
        ):
            return False
        if end and self._pending.startswith(end):
            self._end_arguments(arguments.close(), events)
            self.rest = self._pending[len(end) :]
            return False
        LOG.warning("the arguments of a call are not JSON; they are returned unchanged")
        self._is_raw = True
        return True

    def _end_arguments(self, closing: str | None, events: list[Event]) -> None:
        """End the call before the end of its arguments."""
        if closing is None:
            LOG.warning("the arguments of a call were truncated")
        self._tell(closing or "", events)
        self._arguments = None

    def _read_head(self, events: list[Event]) -> bool:
        if self._needs_foot and (foot := _JSON_FOOT.match(self._pending)):
            self._pending, self._needs_foot = self._pending[foot.end() :], False
        head = None if self._needs_foot else _JSON_HEAD.match(self._pending)
        if head is not None and (name := _as_name(head[1])):
            self._pending = self._pending[head.end() :]
            self._index = self._begin(name, events)
            self._arguments = ArgumentsScanner()
            return True
        end = self._format.end
        if end and end in self._pending:
            body, _, self.rest = self._pending.partition(end)
            if body.strip(_AROUND_JSON) or not self.num_calls:
                events += self._parsed(body)
        return False

    def _tell(self, text: str, events: list[Event]) -> None:
        if text and self._index is not None:
            events.append(Event("call", text, is_json=not self._is_raw))


def _as_call(found: Any) -> tuple[str, str, str | None]:
    """The name, the arguments as JSON and the id of a parsed call; raises ``ValueError``."""
    name, call_id = found["name"], found.get("id")
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("not a call")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return name, text, call_id if isinstance(call_id, str) and call_id else None


def _as_name(text: str) -> str | None:
    """The value of a JSON string, or ``None`` if it is invalid or empty."""
    try:
        name = json.loads(text, strict=False)
    except ValueError:
        return None
    return name if isinstance(name, str) and name else None
