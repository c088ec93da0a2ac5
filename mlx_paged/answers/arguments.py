"""Converts the text of an argument to JSON by the schema of its tool."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_paged.answers.literals import as_json, as_number, is_strict_json, json_text

_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_ANY = frozenset(("null", "boolean", "number", "object", "array", "string"))
_OTHER_NAMES = {
    "int": "integer", "float": "number", "double": "number", "bool": "boolean", "str": "string",
    "text": "string", "dict": "object", "list": "array", "tuple": "array", "none": "null",
}  # fmt: skip
_MAX_REFERENCES = 20  # one within another


class Parameters:
    """The parameters of a tool.

    Args:
        schema: the JSON schema of its arguments, or anything else that a client has sent.
    """

    def __init__(self, schema: object):
        self._root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        self._properties: dict[str, Any] = {}
        for part in self._alternatives(self._root):
            properties = part.get("properties")
            if isinstance(properties, Mapping):
                self._properties = {**properties, **self._properties}

    @property
    def names(self) -> list[str]:
        """The names of the parameters in their order."""
        return list(self._properties)

    def convert(self, name: str, text: str) -> str:
        """The JSON of an argument, of which a model has written the plain text. A text that is no
        value of the parameter's type stays a text.
        """
        wanted = _wanted(self._parts(name), text)
        return wanted if wanted is not None else _converted(text, self.kinds(name) or _ANY)

    def kinds(self, name: str) -> set[str]:
        """The types of a parameter; empty if the schema names none."""
        return {kind for part in self._parts(name) for kind in _kinds_of(part)}

    def _parts(self, name: str) -> list[Mapping[str, Any]]:
        schema = self._properties.get(name, self._root.get("additionalProperties", True))
        return list(self._alternatives(schema if isinstance(schema, Mapping) else {}))

    def _alternatives(self, schema: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
        """The schema, and those that it refers to or consists of."""
        if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
            return
        yield schema
        for keyword in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(keyword)
            for part in parts if isinstance(parts, list) else ():
                yield from self._alternatives(part, depth + 1)
        if isinstance(reference := schema.get("$ref"), str):
            yield from self._alternatives(self._resolved(reference), depth + 1)

    def _resolved(self, reference: str) -> Any:
        found: Any = self._root
        for step in reference.removeprefix("#").strip("/").split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _wanted(parts: list[Mapping[str, Any]], text: str) -> str | None:
    """The value of an ``enum`` or ``const`` that a text is; ``None`` if it is none of them."""
    values: list[Any] = []
    for part in parts:
        if isinstance(part.get("enum"), list):
            values += part["enum"]
        if "const" in part:
            values.append(part["const"])
    if text in values and any(isinstance(value, str) and value == text for value in values):
        return json_text(text)
    for value in values:
        if not isinstance(value, str) and _is_same(value, text):
            return json_text(value)
    return None


def _is_same(value: Any, text: str) -> bool:
    read = as_json(text)
    try:
        return read is not None and json_text(json.loads(read)) == json_text(value)
    except ValueError:
        return False


def _kinds_of(schema: Mapping[str, Any]) -> Iterator[str]:
    """The types that a schema names, or that its other keywords are for."""
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if isinstance(kind, str):
            yield _OTHER_NAMES.get(kind.lower(), kind.lower())
    if schema.get("nullable") is True:
        yield "null"
    values = [*(schema["enum"] if isinstance(schema.get("enum"), list) else ())]
    values += [schema["const"]] if "const" in schema else []
    for value in values:
        text = json_text(value)
        yield _KINDS.get(text[0], "number")
    if kinds is None:
        if "properties" in schema or "additionalProperties" in schema:
            yield "object"
        if "items" in schema or "prefixItems" in schema:
            yield "array"
        if schema.keys() & {"pattern", "format", "minLength", "maxLength"}:
            yield "string"


def _converted(text: str, kinds: frozenset[str] | set[str]) -> str:
    has_text = "string" in kinds
    word = text if has_text else text.strip()
    if "null" in kinds and (word == "null" or (not has_text and word in ("None", "nil"))):
        return "null"
    if not has_text or kinds & {"integer", "number", "boolean"}:
        simple = _simple(word, kinds, has_text)
        if simple is not None:
            return simple
    if kinds & {"object", "array"}:
        value = word if has_text and is_strict_json(word) else None if has_text else as_json(word)
        if value is not None and _KINDS.get(value.lstrip()[:1]) in kinds & {"object", "array"}:
            return value.strip()
    return json_text(text)


def _simple(word: str, kinds: frozenset[str] | set[str], has_text: bool) -> str | None:
    """A number or a truth value, as JSON. Where a text may be meant as well, only what a template
    would write for one is read as it.
    """
    if "boolean" in kinds:
        plain = word if has_text else word.lower()
        if plain in ("true", "false"):
            return plain
        if word in ("True", "False") and not has_text:
            return word.lower()
    if kinds & {"integer", "number"}:
        number = None if "_" in word else as_number(word)
        if number is not None and not (has_text and number != word):
            return number if "number" in kinds else _as_integer(number)
    return None


def _as_integer(number: str) -> str | None:
    """A number without a fraction, written as an integer; ``None`` if it has one."""
    if re.fullmatch("-?[0-9]+", number):
        return number
    found = re.fullmatch(r"(-?)([0-9]+)(?:\.([0-9]+))?(?:[eE]([-+]?[0-9]+))?", number)
    assert found is not None
    sign, whole, fraction, exponent = found[1], found[2], found[3] or "", int(found[4] or 0)
    if abs(exponent) > 400:
        return None
    digits = whole + fraction
    point = len(whole) + exponent
    if point < 0 or digits[point:].strip("0"):
        return None
    return sign + (digits[:point].ljust(point, "0").lstrip("0") or "0")
