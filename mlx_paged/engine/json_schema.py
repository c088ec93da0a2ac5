"""JSON schemas as llguidance can keep them. Pure functions.

``oneOf`` becomes ``anyOf`` if its branches are mutually exclusive: a grammar can express "any of",
but not "exactly one of". pydantic writes ``oneOf`` for unions with a discriminator. llguidance
recognises some exclusive branches itself, but not with references, in recursive schemas, or if the
discriminator has a default and so is not required.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from json import dumps
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]

# Keywords that contain schemas. Others (const, enum, default) contain data.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")
# Here "number" stands for numbers that are not integers.
_TYPES = {"number": {"number", "integer"}}
_ALL_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
_MAX_COMPARISONS = 10_000  # of pairs of schemas per rewritten one: some ten milliseconds


def one_of_as_any_of(schema: Schema) -> Schema:
    """The schema with ``anyOf`` in place of each ``oneOf`` whose branches are mutually exclusive,
    by their types, by their values, or by those of a property.

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
        for name in _told_by(parent, resolved):
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
        values = _values_of(one), _values_of(other)
        if values[0] is not None and values[1] is not None:
            return not set(values[0]) & set(values[1])
        for schema, against in ((one, other), (other, one)):
            for keyword in ("anyOf", "oneOf"):
                if schema.get(keyword) and isinstance(schema[keyword], list):
                    return all(self._exclude(each, against) for each in schema[keyword])
        return types == {"object"} and self._objects_exclude(one, other)

    def _objects_exclude(self, one: Schema, other: Schema) -> bool:
        ours, theirs = _properties_of(one), _properties_of(other)
        both = [name for name in _required_of(one) if name in _required_of(other)]
        return any(self._exclude(ours.get(name), theirs.get(name)) for name in both)

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


def children_of(schema: Schema, with_definitions: bool = False) -> Iterator[Any]:
    """The schemas directly in a schema."""
    by_name = _BY_NAME if with_definitions else _BY_NAME[:2]
    for keyword, value in schema.items():
        if keyword in by_name and isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, list) and keyword in (*_LISTS, "items"):
            yield from value
        elif keyword in (*_SINGLE, "additionalItems"):
            yield value


def nodes(schema: Any, with_definitions: bool = False) -> Iterator[Schema]:
    """A schema and all schemas in it, without what it refers to."""
    if isinstance(schema, Mapping):
        yield schema
        for child in children_of(schema, with_definitions):
            yield from nodes(child, with_definitions)


def _told_by(parent: Schema, branches: Sequence[Any]) -> Iterator[str]:
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


def types_of(schema: Schema) -> frozenset[str]:
    """A superset of the types of valid values."""
    said, values = schema.get("type"), _values_of(schema)
    if values is not None:
        return frozenset(value.partition(" ")[0] for value in values)
    names = said if isinstance(said, list) else _ALL_TYPES if said is None else [said]
    return frozenset().union(*(_TYPES.get(str(name), {str(name)}) for name in names))


def _values_of(schema: Schema) -> list[str] | None:
    """The values of a schema that enumerates them, each as its type and its JSON."""
    if "const" in schema:
        return [_type_and_json(schema["const"])]
    values = schema.get("enum")
    return [_type_and_json(each) for each in values] if isinstance(values, list) else None


def _type_and_json(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # For Python, 1 equals True, and 2.0 equals 2; for JSON only the latter.
    names = {bool: "boolean", str: "string", int: "integer", float: "number", type(None): "null"}
    name = names.get(type(value), "array" if isinstance(value, list) else "object")
    return f"{name} {dumps(value, sort_keys=True)}"


def target_of(root: Any, reference: str) -> Schema | None:
    """The schema at a reference within the same document."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None
