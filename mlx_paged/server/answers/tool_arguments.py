"""``ArgumentsScanner``: turns the arguments of a call, as a model writes them, into valid JSON."""

from __future__ import annotations

import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_SCALAR = re.compile(r"[-+.0-9A-Za-z_]+")
_VALID_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")
# Models trained on Python sometimes write its constants.
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]"}
# The expectations with which a bracket may close.
_CAN_CLOSE = ("comma", "key", "item", "first key", "first item")


class ArgumentsScanner:
    """Reads one JSON object incrementally, and returns its text as far as it is certain.

    Frequent mistakes of models are corrected: raw control characters and unknown escapes in
    strings, a comma before a closing bracket, Python's ``True``, ``False`` and ``None``.

    Attributes:
        is_done: the object is complete.
        is_broken: the text is not JSON; :attr:`rest` begins with the error.
        rest: the unread text: after the object, or from the error on.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self.rest = ""
        self._stack: list[str] = []  # open brackets
        self._expected = "object"  # what is expected next
        self._held = ""  # the beginning of an escape, of a number or of a word
        self._comma = ""  # with the space after it; dropped before a closing bracket

    @property
    def is_in_string(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self._expected in ("text", "key text")

    def add(self, text: str) -> str:
        """Read more; returns the JSON text that is certain now."""
        text, self._held = self._held + text, ""
        out: list[str] = []
        place = 0
        while place < len(text) and not self.is_done and not self.is_broken:
            if self.is_in_string:
                place = self._read_string(text, place, out)
            else:
                place = self._read_structure(text, place, out)
        self.rest = text[place:]
        return "".join(out)

    def close(self) -> str | None:
        """At the end of the text: the missing brackets, or ``None`` if the text does not end after
        a complete value.
        """
        if self.is_done:
            return ""
        scalar: str | None = ""
        if self._held and not self.is_in_string:
            scalar, self._held, self._expected = _as_scalar(self._held), "", "comma"
        if scalar is None or self._expected not in _CAN_CLOSE:
            return None
        self.is_done = True
        return scalar + "".join(_CLOSING[bracket] for bracket in reversed(self._stack))

    # Strings

    def _read_string(self, text: str, place: int, out: list[str]) -> int:
        if plain := _PLAIN.match(text, place):
            out.append(plain[0])
            place = plain.end()
        if place == len(text):
            return place
        character = text[place]
        if character == "\\":
            return self._read_escape(text, place, out)
        if character == '"':
            self._expected = "colon" if self._expected == "key text" else "comma"
            out.append('"')
        else:
            out.append({"\n": "\\n", "\t": "\\t"}.get(character, f"\\u{ord(character):04x}"))
        return place + 1

    def _read_escape(self, text: str, place: int, out: list[str]) -> int:
        length = 6 if text[place + 1 : place + 2] == "u" else 2
        escape = text[place : place + length]
        if len(escape) < length and set(escape[2:]) <= _HEX:
            self._held = escape
            return len(text)
        if escape[1] == "u" and set(escape[2:]) <= _HEX:
            out.append(escape)
            return place + 6
        if escape[1] in '"\\/bfnrt':
            out.append(escape)
            return place + 2
        if escape[1] == "'":
            out.append("'")
            return place + 2
        # A literal backslash, as in regular expressions and paths.
        out.append("\\\\")
        return place + 1

    # Between strings

    def _read_structure(self, text: str, place: int, out: list[str]) -> int:
        if space := _SPACE.match(text, place):
            if self._comma:
                self._comma += space[0]
            else:
                out.append(space[0])
            return space.end()
        character = text[place]
        if self._expected == "colon":
            return self._take(character == ":", "value", character, place, out)
        if self._expected == "comma" and character == ",":
            self._comma = ","
            self._expected = "key" if self._stack[-1] == "{" else "item"
            return place + 1
        if character in "}]":
            return self._read_close(character, place, out)
        if self._expected in ("key", "first key"):
            return self._take(character == '"', "key text", character, place, out)
        if self._expected == "object":
            return self._open(character == "{", character, place, out)
        if self._expected in ("value", "item", "first item"):
            return self._read_value(text, place, out)
        return self._fail(place)

    def _read_value(self, text: str, place: int, out: list[str]) -> int:
        character = text[place]
        if character == '"':
            return self._take(True, "text", character, place, out)
        if character in "{[":
            return self._open(True, character, place, out)
        word = _SCALAR.match(text, place)
        if word is None:
            return self._fail(place)
        if word.end() == len(text):
            self._expected = "value"
            self._held = word[0]
            self._flush_comma(out)
            return word.end()
        scalar = _as_scalar(word[0])
        if scalar is None:
            return self._fail(place)
        return self._take(True, "comma", scalar, place, out) - len(scalar) + len(word[0])

    def _read_close(self, character: str, place: int, out: list[str]) -> int:
        is_right = self._stack and _CLOSING[self._stack[-1]] == character
        if not is_right or self._expected not in _CAN_CLOSE:
            return self._fail(place)
        # Drop a comma before the bracket, but keep the space after it.
        out.append(self._comma[1:] + character)
        self._comma = ""
        self._stack.pop()
        self._expected = "comma"
        self.is_done = not self._stack
        return place + 1

    def _open(self, is_right: bool, bracket: str, place: int, out: list[str]) -> int:
        if is_right:
            self._stack.append(bracket)
        return self._take(
            is_right, "first key" if bracket == "{" else "first item", bracket, place, out
        )

    def _take(self, is_right: bool, expected: str, text: str, place: int, out: list[str]) -> int:
        if not is_right:
            return self._fail(place)
        self._flush_comma(out)
        out.append(text)
        self._expected = expected
        return place + len(text)

    def _flush_comma(self, out: list[str]) -> None:
        if self._comma:
            out.append(self._comma)
            self._comma = ""

    def _fail(self, place: int) -> int:
        self.is_broken = True
        return place


def _as_scalar(word: str) -> str | None:
    """A number or a constant in valid JSON, or ``None``."""
    if _VALID_SCALAR.fullmatch(word):
        return word
    return _CONSTANTS.get(word)
