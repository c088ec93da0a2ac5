"""What JSON schemas say: the value of an argument by the schema of its tool, and which branches of
a union exclude one another. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from json import dumps, loads
from typing import Any, TypeAlias

from mlx_paged.answers.literals import as_json, as_number, is_strict_json, json_text

Schema: TypeAlias = Mapping[str, Any]

# Keywords that contain schemas. Others (const, enum, default) contain data.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")
# Here "number" stands for numbers that are not integers.
_TYPES = {"number": {"number", "integer"}}
_ALL_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
_MAX_COMPARISONS = 10_000  # of pairs of schemas per rewritten one: some ten milliseconds
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_ANY = frozenset(("null", "boolean", "number", "object", "array", "string"))
_OTHER_NAMES = {
    "int": "integer", "float": "number", "double": "number", "bool": "boolean", "str": "string",
    "text": "string", "dict": "object", "list": "array", "tuple": "array", "none": "null",
}  # fmt: skip


def target_of(root: Any, reference: str) -> Schema | None:
    """The schema at a reference within the same document."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def children_of(schema: Schema) -> Iterator[Any]:
    """The schemas directly in a schema, without definitions."""
    for keyword, value in schema.items():
        if keyword in _BY_NAME[:2] and isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, list) and keyword in (*_LISTS, "items"):
            yield from value
        elif keyword in (*_SINGLE, "additionalItems"):
            yield value


def nodes(schema: Any) -> Iterator[Schema]:
    """A schema and all schemas in it, without what it refers to."""
    if isinstance(schema, Mapping):
        yield schema
        for child in children_of(schema):
            yield from nodes(child)


def types_of(schema: Schema) -> frozenset[str]:
    """A superset of the types of valid values."""
    types, values = schema.get("type"), constants_of(schema)
    if values is not None:
        return frozenset(_type_and_json(value)[0] for value in values)
    names = types if isinstance(types, list) else _ALL_TYPES if types is None else [types]
    return frozenset().union(*(_TYPES.get(str(name), {str(name)}) for name in names))


def constants_of(schema: Schema) -> list[Any] | None:
    """The values of a schema that enumerates them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _type_and_json(value: Any) -> tuple[str, str]:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # For Python, 1 equals True, and 2.0 equals 2; for JSON only the latter.
    names = {bool: "boolean", str: "string", int: "integer", float: "number", type(None): "null"}
    name = names.get(type(value), "array" if isinstance(value, list) else "object")
    return name, dumps(value, sort_keys=True)


# Arguments


class Parameters:
    """The parameters of a tool.

    Args:
        schema: the JSON schema of its arguments, or anything else that a client has sent.
    """

    def __init__(self, schema: object):
        self._root: Schema = schema if isinstance(schema, Mapping) else {}
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

    def _parts(self, name: str) -> list[Schema]:
        schema = self._properties.get(name, self._root.get("additionalProperties", True))
        return list(self._alternatives(schema if isinstance(schema, Mapping) else {}))

    def _alternatives(self, schema: Any) -> Iterator[Schema]:
        """The schema, and those that it refers to or consists of, each reference once."""
        references: set[str] = set()
        pending = [schema]
        while pending:
            schema = pending.pop()
            if not isinstance(schema, Mapping):
                continue
            yield schema
            lists = [schema.get(keyword) for keyword in ("anyOf", "oneOf", "allOf")]
            inner = [part for parts in lists if isinstance(parts, list) for part in parts]
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in references:
                references.add(reference)
                inner.append(target_of(self._root, reference))
            pending += reversed(inner)


def _wanted(parts: list[Schema], text: str) -> str | None:
    """The value of an ``enum`` or ``const`` that a text is; ``None`` if it is none of them."""
    values = [value for part in parts for value in constants_of(part) or ()]
    if text in values and any(isinstance(value, str) and value == text for value in values):
        return json_text(text)
    for value in values:
        if not isinstance(value, str) and _is_same(value, text):
            return json_text(value)
    return None


def _is_same(value: Any, text: str) -> bool:
    read = as_json(text)
    try:
        return read is not None and json_text(loads(read)) == json_text(value)
    except ValueError:
        return False


def _kinds_of(schema: Schema) -> Iterator[str]:
    """The types that a schema names, or that its other keywords are for."""
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if isinstance(kind, str):
            yield _OTHER_NAMES.get(kind.lower(), kind.lower())
    if schema.get("nullable") is True:
        yield "null"
    for value in constants_of(schema) or ():
        yield _KINDS.get(json_text(value)[0], "number")
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


# Unions


def one_of_as_any_of(schema: Schema) -> Schema:
    """The schema with ``anyOf`` in place of each ``oneOf`` whose branches are mutually exclusive,
    by their types, by their values, or by those of a property.

    A grammar can express "any of", but not "exactly one of". pydantic writes ``oneOf`` for unions
    with a discriminator. llguidance recognises some exclusive branches itself, but not with
    references, in recursive schemas, or if the discriminator has a default and so is not required.

    What is valid for the result is valid for the schema. The reverse is true except that a property
    that distinguishes branches is required in the result, as pydantic itself requires it. Any other
    ``oneOf`` is kept.
    """
    rewriting = _Rewriting(schema)
    try:
        result = rewriting.of(schema)
    except RecursionError:
        return schema
    added = rewriting.definitions
    return {**result, "$defs": {**result.get("$defs", {}), **added}} if added else result


class _Rewriting:
    """The rewriting of one schema.

    Attributes:
        definitions: added definitions, which require a property.
    """

    def __init__(self, root: Schema):
        self._root = root
        self._num_left = _MAX_COMPARISONS
        self._names: dict[tuple[str, str], str] = {}  # of added definitions
        self.definitions: dict[str, Any] = {}

    def of(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        result = dict(schema)
        branches = schema.get("oneOf")
        if isinstance(branches, list) and "anyOf" not in schema:
            exclusive = self._exclusive(branches, schema)
            if exclusive is not None:
                del result["oneOf"]
                result.pop("discriminator", None)  # llguidance does not recurse beside it.
                result["anyOf"] = exclusive
        for keyword, value in result.items():
            if keyword in _BY_NAME and isinstance(value, Mapping):
                result[keyword] = {name: self.of(each) for name, each in value.items()}
            elif keyword in _LISTS and isinstance(value, list):
                result[keyword] = [self.of(each) for each in value]
            elif keyword in _SINGLE:
                result[keyword] = self.of(value)
        return result

    def _exclusive(self, branches: Sequence[Any], parent: Schema) -> list[Any] | None:
        """The branches, made mutually exclusive if necessary; ``None`` if that is impossible."""
        common = {"type": parent["type"]} if "type" in parent else {}
        resolved = [self._resolved(each, common) for each in branches]
        if all(self._exclude(one, other) for one, other in combinations(resolved, 2)):
            return list(branches)
        for name in _distinguishing(parent, resolved):
            values = [each["properties"][name] for each in resolved]
            if all(self._exclude(one, other) for one, other in combinations(values, 2)):
                return [self._requiring(each, name) for each in branches]
        return None

    def _requiring(self, branch: Schema, name: str) -> Schema:
        """A branch that requires one of its properties."""
        resolved = self._resolved(branch)
        required = _required_of(resolved)
        if name in required:
            return branch
        stricter = {**resolved, "required": [*required, name]}
        if "$ref" not in branch:
            return stricter
        place = dumps(branch), name
        if place not in self._names:
            # It is named before it is rewritten, since it may refer to itself.
            self._names[place] = added = f"mlx_paged.required.{len(self._names)}"
            self.definitions[added] = self.of(stricter)
        return {"$ref": f"#/$defs/{self._names[place]}"}

    def _exclude(self, one: Any, other: Any) -> bool:
        """Whether it is certain that no value is valid for both schemas."""
        self._num_left -= 1
        one, other = self._resolved(one), self._resolved(other)
        if self._num_left < 0 or not (isinstance(one, Mapping) and isinstance(other, Mapping)):
            return False
        types = types_of(one) & types_of(other)
        if not types:
            return True
        values, others = constants_of(one), constants_of(other)
        if values is not None and others is not None:
            return not set(map(_type_and_json, values)) & set(map(_type_and_json, others))
        for schema, against in ((one, other), (other, one)):
            for keyword in ("anyOf", "oneOf"):
                if schema.get(keyword) and isinstance(schema[keyword], list):
                    return all(self._exclude(each, against) for each in schema[keyword])
        ours, theirs = _properties_of(one), _properties_of(other)
        both = [name for name in _required_of(one) if name in _required_of(other)]
        return types == {"object"} and any(
            self._exclude(ours.get(name), theirs.get(name)) for name in both
        )

    def _resolved(self, schema: Any, common: Schema | None = None) -> Any:
        """The target of a reference, with the keywords next to the reference."""
        for _ in range(16):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            beside = {name: value for name, value in schema.items() if name != "$ref"}
            target = target_of(self._root, schema["$ref"])
            if target is None or beside.keys() & target.keys() - {"title", "description"}:
                break
            schema = {**target, **beside}
        return {**common, **schema} if common and isinstance(schema, Mapping) else schema


def _distinguishing(parent: Schema, branches: Sequence[Any]) -> Iterator[str]:
    """The properties that may distinguish branches that are objects: the discriminator, or those
    that all of them declare.
    """
    if not all(isinstance(each, Mapping) and types_of(each) == {"object"} for each in branches):
        return
    common = list(_properties_of(branches[0]))
    discriminator = parent.get("discriminator")
    if isinstance(discriminator, Mapping):
        common = [name for name in common if name == discriminator.get("propertyName")]
    for name in common:
        if all(name in _properties_of(each) for each in branches):
            yield name


def _properties_of(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _required_of(schema: Schema) -> list[str]:
    names = schema.get("required")
    return [each for each in names if isinstance(each, str)] if isinstance(names, list) else []
