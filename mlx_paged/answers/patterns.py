"""Patterns of the module ``regex`` for the templates of :mod:`mlx_paged.answers.formats`."""

from __future__ import annotations

import re
from typing import Any

import regex

from mlx_paged.answers.cursor import Sought
from mlx_paged.answers.formats import CallFormat, Tags
from mlx_paged.answers.marks import Marks

_PLACEHOLDER = re.compile(r"\{(name|key|type|id|any)\}|\s+")


def escaped(text: str, marks: Marks) -> str:
    return str(regex.escape(marks.encode(text), special_only=True))


def ends_of(call_format: CallFormat, marks: Marks) -> list[str]:
    """The end marks of a format."""
    return [marks.encode(end) for end in (call_format.end, *call_format.other_ends) if end]


def any_end(call_format: CallFormat, marks: Marks) -> str:
    """The source of a pattern for the end marks of a format; empty if it has none."""
    ends = [regex.escape(end, special_only=True) for end in ends_of(call_format, marks)]
    return f"(?:{'|'.join(ends)})" if ends else ""


def begin_of(template: str, marks: Marks) -> Any:
    """The pattern of the first mark of a head."""
    return regex.compile(escaped(template.partition(" ")[0], marks))


_NAME = r"[^\s<>\[\]{}`\"'\ud800-\udbff][^<>\[\]{}`\"'\n\ud800-\udbff]*?"
_ATTRIBUTES = r"(?:[^<>\"\ud800-\udbff]|\"[^\"\ud800-\udbff]*\")*?"


def source_of(template: str, marks: Marks) -> str:
    """The source of a pattern for a template; see :class:`Tags`."""
    source, place = "", 0
    for found in _PLACEHOLDER.finditer(template):
        source += escaped(template[place : found.start()], marks)
        place = found.end()
        if found[1] is None:
            source += r"\s*"
        elif found[1] == "any":
            source += _ATTRIBUTES
        elif template[place : place + 1] == '"':
            source += rf'(?P<{found[1]}>[^"\ud800-\udbff]*)'
        else:
            source += rf"(?P<{found[1]}>{_NAME})"
    return source + escaped(template[place:], marks)


class TagPatterns:
    """The patterns of a format of tags."""

    def __init__(self, call_format: CallFormat, tags: Tags, marks: Marks, names: list[str]):
        self.call_end = tags.call_end
        end = any_end(call_format, marks)
        call_end = escaped(tags.call_end, marks)
        argument = source_of(tags.argument, marks)
        argument_end = escaped(tags.argument_end, marks)
        close = call_end or end
        if tags.call == "{name}":
            source = rf"\s*(?P<name>[^\s<>{{}}\ud800-\udbff]+)(?=\s*(?:{argument}|{end}))"
        else:
            source = r"\s*" + source_of(tags.call, marks)
        self.call = regex.compile(source)
        self.is_plain_name = tags.call == "{name}"
        self.is_marked = not tags.call.startswith("<function=")
        self.begin = regex.compile(source_of(tags.call, marks)) if tags.call_end else self.call
        self.argument = regex.compile(r"\s*" + argument)
        self.close = regex.compile(rf"\s*{close}")
        newline = r"\n[ \t]*" if tags.newline else ""
        self.next_argument = regex.compile(newline + argument)
        offered = "|".join(map(regex.escape, names)) or "(?!)"
        if call_format.is_section or not call_format.start:
            follows = rf"\s*(?:{end + '|' if end else ''}{source_of(tags.call, marks)})"
            left_out = close
        else:
            begin = escaped(tags.call.partition("{")[0], marks)
            follows = rf"\s*{escaped(call_format.start, marks)}\s*{begin}(?:{offered})\b"
            left_out = rf"{call_end}\s*{end}" if call_end else end
        closed = rf"(?P<close>{argument_end})(?=\s*(?:{argument}|{close}))"
        ends = [marks.encode(tags.argument_end), marks.encode(tags.call_end)]
        self.value_end = Sought(
            rf"{closed}|{left_out}(?={follows})",
            "".join(mark[:1] for mark in (*ends, *ends_of(call_format, marks))),
            rf"{closed}|{left_out}(?={follows}|\s*$)",
        )
        self.json = (
            None
            if tags.json is None
            else tuple(regex.compile(r"\s*" + source_of(each, marks)) for each in tags.json)
        )
