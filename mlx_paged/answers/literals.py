"""Values as models write them, as JSON text: JSON with its usual mistakes, Python's literals, and
Gemma's notation. Numbers stay as they are written, at any size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import regex

from mlx_paged.answers.cursor import Cursor, NotACallError, Sought, Steps, TruncatedError, run

MAX_DEPTH = 100  # of brackets within brackets

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"([-+]?)([0-9][0-9_]*)?(?:\.([0-9]*))?(?:[eE]([-+]?[0-9]+))?")
_CONSTANTS = {
    "true": "true", "True": "true", "false": "false", "False": "false",
    "null": "null", "None": "null",
}  # fmt: skip
_STRUCTURE = Sought(r"""["'{}\[\]]""", "\"'{}[]")
_DOUBLE_END, _SINGLE_END = (Sought(rf"{quote}|\\.", quote + "\\") for quote in "\"'")
_ESCAPE = re.compile(r"(?:\\u[0-9a-fA-F]{4})+|\\(x[0-9a-fA-F]{2}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0",
    "\n": "", "\\": "\\", "/": "/", '"': '"', "'": "'",
}  # fmt: skip
_SPACE = regex.compile(r"\s*+(?=\S)")
_COMMA = regex.compile(r"\s*,")
_WORD = regex.compile(r"[^,\]\[}{()]*(?=[,\]}{()\[])")
_PLAIN_KEY = regex.compile(r"\s*(?P<key>[^\s:{}\[\],][^:{}\[\],]*?)\s*:")
_KEYWORD = regex.compile(r"""\s*(?P<key>[^\s=,()\[\]{}"'][^=,()\[\]{}"']*?)\s*=""")
_COLON = regex.compile(r"\s*:")


def json_text(value: Any) -> str:
    """A value as JSON, with all characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def as_number(text: str) -> str | None:
    """A number in valid JSON, as it is written if it can be; ``None`` if it is none."""
    if _NUMBER.fullmatch(text):
        return text
    found = _LOOSE_NUMBER.fullmatch(text)
    if found is None or not (found[2] or found[3]):
        return None
    sign, whole, fraction, exponent = found.groups()
    digits = (whole or "0").replace("_", "").lstrip("0") or "0"
    point = f".{fraction}" if fraction else ""
    return f"{'-' * (sign == '-')}{digits}{point}{f'e{exponent}' if exponent else ''}"


def as_scalar(text: str) -> str | None:
    """A number or a constant in valid JSON; ``None`` if it is neither."""
    return _CONSTANTS.get(text) or as_number(text)


def is_strict_json(text: str) -> bool:
    """Whether a text is valid JSON: without constants such as ``NaN``, and without a key twice."""
    try:
        # Numbers stay text: Python reads none of more than 4,300 digits.
        json.loads(
            text,
            parse_int=str,
            parse_float=str,
            parse_constant=_refuse,
            object_pairs_hook=_refuse_twice,
        )
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(name)


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key occurs twice")
    return result


def as_json(text: str) -> str | None:
    """A value in valid JSON: as it is written if it can be, else with a model's usual mistakes put
    right (unescaped line breaks, unknown escapes, a comma too many, Python's constants and quotes);
    ``None`` if it is none.
    """
    text = text.strip()
    if is_strict_json(text):
        return text
    cursor = Cursor(text + ",", is_complete=True)  # so that a word has an end
    try:
        value = run(Literals(cursor, JSON).value())
    except NotACallError:
        return None
    return value if cursor.place == len(text) else None


def object_end(ends: Sequence[str]) -> Sought:
    """What is sought for ``last_brace`` of :func:`json_end`.

    Args:
        ends: texts that may follow an object.
    """
    source = "|".join([str(_STRUCTURE.pattern.pattern), *map(regex.escape, ends)])
    return Sought(source, "\"'{}[]" + "".join(end[0] for end in ends))


def json_end(cursor: Cursor, last_brace: Sought | None = None) -> Steps[str]:
    """Read a JSON object or list, from its bracket to the one that closes it, as it is written.

    Args:
        last_brace: brackets, quotes, and what may follow an object whose last bracket a model has
            left out; by default it has to be there.
    """
    begin, depth = cursor.place, 0
    while True:
        try:
            mark = (yield from cursor.search(last_brace or _STRUCTURE))[0]
        except TruncatedError:
            text = cursor.text[begin:].rstrip()
            if last_brace is None or cursor.is_cut or depth != 1 or not text.endswith("}"):
                raise
            cursor.place = len(cursor.text)
            return text + "}"
        if mark in "{[":
            depth += 1
        elif mark in "}]":
            depth -= 1
            if not depth:
                return cursor.text[begin : cursor.place]
        elif mark in "\"'":
            end = _DOUBLE_END if mark == '"' else _SINGLE_END
            while len((yield from cursor.search(end))[0]) > 1:
                pass  # an escape
        elif depth == 1:
            cursor.place -= len(mark)
            return cursor.text[begin : cursor.place] + "}"
        else:
            raise NotACallError


@dataclass(frozen=True)
class Style:
    """How values are written.

    Args:
        quotes: the marks around texts.
        has_escapes: whether a backslash escapes within texts.
        has_plain_keys: whether keys have no quotes.
    """

    quotes: tuple[str, ...]
    has_escapes: bool = True
    has_plain_keys: bool = False

    @cached_property
    def begin(self) -> Any:
        """The pattern of a value's beginning: a quote, or another character."""
        quotes = []
        for quote in self.quotes:
            # Two of these may begin three.
            is_short = quote * 3 in self.quotes
            quotes.append(regex.escape(quote) + (f"(?={quote}?[^{quote}])" if is_short else ""))
        first = "".join({regex.escape(quote[0]) for quote in self.quotes})
        return regex.compile(rf"\s*(?:(?P<quote>{'|'.join(quotes)})|(?P<other>[^\s{first}]))")


JSON = Style(('"', "'"))
PYTHON = Style(('"""', "'''", '"', "'"))


class Literals:
    """Reads values from a cursor, and returns them as JSON text.

    Args:
        style: how they are written.
        convert: (text, key) to the JSON of a value that is neither a number nor a constant; by
            default there is no such value.
    """

    def __init__(
        self, cursor: Cursor, style: Style, convert: Callable[[str, str], str] | None = None
    ):
        self._cursor = cursor
        self._style = style
        self._convert = convert
        self._depth = 0
        self._begin = style.begin

    def value(self, key: str = "") -> Steps[str]:
        """The next value."""
        found = yield from self._cursor.match(self._begin)
        if found["quote"]:
            return json_text((yield from self._text(found["quote"])))
        if found["other"] in "{[(":
            return (yield from self._container(found["other"]))
        self._cursor.place -= 1
        word = (yield from self._cursor.match(_WORD))[0].strip()
        scalar = as_scalar(word)
        if scalar is None and word in ("NaN", "Infinity", "-Infinity"):
            return json_text(word)  # There is no such number in JSON.
        if scalar is None and (self._convert is None or not word):
            raise NotACallError
        return scalar if scalar is not None else self._convert(word, key)  # type: ignore[misc]

    def fields(self, end: str, *, key_ends_with: str = ":") -> Steps[dict[str, str]]:
        """The keys and values up to a closing bracket, whose opening one was read. A value without
        a key has its number as the key, as ``"0"``.
        """
        result: dict[str, str] = {}
        while not (yield from self._closes(end)):
            key = yield from self._key(key_ends_with)
            if key is None:
                key = f"\0{len(result)}"
            result.pop(key, None)  # The last one counts.
            result[key] = yield from self.value(key)
            if not (yield from self._separates(end)):
                break
        return result

    def _container(self, bracket: str) -> Steps[str]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotACallError
        if bracket == "{":
            result = object_text((yield from self.fields("}")))
        else:
            end = "]" if bracket == "[" else ")"
            items = []
            while not (yield from self._closes(end)):
                items.append((yield from self.value()))
                if not (yield from self._separates(end)):
                    break
            result = f"[{', '.join(items)}]"
        self._depth -= 1
        return result

    def _closes(self, end: str) -> Steps[bool]:
        yield from self._cursor.match(_SPACE)
        if (yield from self._cursor.peek()) == end:
            self._cursor.place += 1
            return True
        return False

    def _separates(self, end: str) -> Steps[bool]:
        """Whether a comma follows; otherwise the closing bracket was read."""
        if (yield from self._cursor.find(_COMMA)) is not None:
            return True
        if not (yield from self._closes(end)):
            if self._cursor.is_complete and self._cursor.place == len(self._cursor.text):
                raise TruncatedError
            raise NotACallError
        return False

    def _key(self, ends_with: str) -> Steps[str | None]:
        if ends_with == "=":
            begin = self._cursor.place
            found = yield from self._cursor.find(_KEYWORD)
            if found is None or (yield from self._cursor.peek()) == "=":
                self._cursor.place = begin
                return None
            return str(found["key"])
        if self._style.has_plain_keys:
            begin = self._cursor.place
            found = yield from self._cursor.match(self._begin)
            if not found["quote"]:
                self._cursor.place = begin
                return str((yield from self._cursor.match(_PLAIN_KEY))["key"])
        else:
            found = yield from self._cursor.match(self._begin)
            if not found["quote"]:
                raise NotACallError
        key = yield from self._text(found["quote"])
        yield from self._cursor.match(_COLON)
        return key

    def _text(self, quote: str) -> Steps[str]:
        """A text whose opening mark was read."""
        begin = self._cursor.place
        sought = _end_of(quote, self._style.has_escapes)
        while (yield from self._cursor.search(sought))[0] != quote:
            pass  # an escape
        text = self._cursor.text[begin : self._cursor.place - len(quote)]
        if not self._style.has_escapes:
            return text
        return _ESCAPE.sub(_unescaped, text)


def object_text(fields: dict[str, str]) -> str:
    """The JSON of an object whose values are JSON already."""
    return "{" + ", ".join(f"{json_text(key)}: {value}" for key, value in fields.items()) + "}"


@cache
def _end_of(quote: str, has_escapes: bool) -> Sought:
    """A closing mark, or an escape before it."""
    escape = r"|\\." if has_escapes else ""
    return Sought(f"{regex.escape(quote)}{escape}", quote[0] + "\\" * has_escapes)


def _unescaped(found: re.Match[str]) -> str:
    """What an escape stands for. Other backslashes are part of the text, as in paths."""
    letter = found[1]
    if letter is None:
        return str(json.loads(f'"{found[0]}"'))  # with pairs of surrogates joined
    if len(letter) > 1:
        code = int(letter[1:], 16)
        return chr(code) if code < 0x110000 else found[0]
    return _ESCAPED.get(letter, found[0])


def fields_of(text: str) -> dict[str, str] | None:
    """The keys and the JSON texts of the values of an object; ``None`` if it is none."""
    decoder, fields = json.JSONDecoder(), dict[str, str]()
    if not text.startswith("{"):
        return None
    place = 1
    while (key_found := _FIELD.match(text, place)) is not None:
        begin = key_found.end()
        end = _value_end(text, begin)
        key = decoder.decode(key_found[1])
        fields.pop(key, None)
        fields[key] = text[begin:end].strip()
        place = end
    return fields


_FIELD = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*', re.DOTALL)
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],]', re.DOTALL)


def _value_end(text: str, begin: int) -> int:
    """Where the value that begins here ends, in valid JSON."""
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text, begin):
        mark = found[0]
        if mark in ("{", "["):
            depth += 1
        elif mark in ("}", "]"):
            depth -= 1
            if depth < 0:
                return found.start()
        elif mark == "," and not depth:
            return found.start()
    return len(text)
