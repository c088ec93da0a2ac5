"""JSON schemas as llguidance can keep them. Pure functions.

``oneOf`` becomes ``anyOf`` if its branches are mutually exclusive: a grammar can express "any of",
but not "exactly one of". pydantic writes ``oneOf`` for unions with a discriminator. llguidance
recognises some exclusive branches itself, but not with references, in recursive schemas, or if the
discriminator has a default and so is not required.

Numbers that llguidance would round are found, and ranges of numbers written as regular expressions,
exact at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
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
        types = _types_of(one) & _types_of(other)
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


def children_of(schema: Schema) -> Iterator[Any]:
    """The schemas directly in a schema, without definitions."""
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties") and isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, list) and keyword in (*_LISTS, "items"):
            yield from value
        elif keyword in (*_SINGLE, "additionalItems"):
            yield value


def _told_by(parent: Schema, branches: Sequence[Any]) -> Iterator[str]:
    """The properties that may distinguish branches that are objects: the discriminator, or those
    that all of them declare.
    """
    if not all(isinstance(each, Mapping) and _types_of(each) == {"object"} for each in branches):
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


def _types_of(schema: Schema) -> frozenset[str]:
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


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MAX_EXACT = 2**53
_MAX_INT64 = 2**63 - 1
_MAX_POWER = 10**18  # llguidance has no open ranges from here on


def is_rounded(value: Any) -> bool:
    """Whether llguidance keeps an answer to another number than this constant."""
    if not isinstance(value, int) or abs(value) <= _MAX_EXACT:
        return False
    try:
        near = float(value)
    except OverflowError:
        return True
    if abs(value) <= _MAX_INT64:
        return near != value
    # It writes the shortest digits, and overflows at the least of all 64-bit integers.
    return value == -_MAX_INT64 - 1 or Decimal(repr(near)) != value


def has_exact_bounds(schema: Schema) -> bool:
    """Whether llguidance computes with exactly the bounds of a schema."""
    bounds = list(_bounds_of(schema))
    sides = [side for side in (_bound_of(schema, 0), _bound_of(schema, 1)) if side[0] is not None]
    for bound, is_excluded in sides:
        # It adds 1 to an excluded bound.
        limit_of_side = _MAX_EXACT if is_excluded else _MAX_POWER if len(sides) == 1 else math.inf
        if abs(bound or 0) >= limit_of_side:
            return False
    # The greatest 64-bit integer is rounded up and limited to itself.
    limit = {_MAX_INT64} if schema.get("type") == "integer" else set()
    return all(bound in limit or _is_exact(bound) for bound in bounds)


def has_fractions(schema: Schema) -> bool:
    """Whether a bound of a schema for any number is not an integer."""
    return schema.get("type") != "integer" and any(
        bound != int(bound) for bound in _bounds_of(schema)
    )


def pattern_within_bounds(schema: Schema) -> str:
    """The numbers of a schema of integers, or of numbers between integers, as a regular expression;
    ``""`` if there are none.
    """
    (low, is_low_open), (high, is_high_open) = _bound_of(schema, 0), _bound_of(schema, 1)
    least = None if low is None else -int(-low // 1)
    most = None if high is None else int(high // 1)
    if schema["type"] != "integer":
        return _reals(least, is_low_open, most, is_high_open)
    if least is not None and is_low_open and least == low:
        least += 1
    if most is not None and is_high_open and most == high:
        most -= 1
    return _integers(least, most)


def _is_exact(bound: int | float) -> bool:
    try:
        return float(bound) == bound and abs(bound) <= _MAX_INT64
    except OverflowError:
        return False


def _bounds_of(schema: Schema) -> Iterator[int | float]:
    for name in BOUNDS:
        bound = schema.get(name)
        if isinstance(bound, int | float) and not isinstance(bound, bool):
            yield bound


def _bound_of(schema: Schema, side: int) -> tuple[int | float | None, bool]:
    """The lower (0) or upper (1) bound of a schema, and whether it is excluded itself."""
    bound, excluded = schema.get(BOUNDS[side]), schema.get(BOUNDS[side + 2])
    if excluded is None or isinstance(excluded, bool):  # as in draft 4
        return bound, bool(excluded)
    choose: Callable[..., int | float] = min if side else max
    if bound is None or choose(bound, excluded) == excluded:
        return excluded, True
    return bound, False


def _integers(low: int | None, high: int | None) -> str:
    """The integers of a range, with both bounds; ``""`` if there are none.

    Args:
        low, high: ``None`` is no bound.
    """
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        if negative := _naturals(least, None if low is None else -low):
            parts.append(f"-{negative}")
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    return _one_of_these(parts)


def _naturals(low: int, high: int | None) -> str:
    """The integers of a range that has no negative ones."""
    if high is not None and low > high:
        return ""
    num_digits = len(str(low))
    parts = []
    for length in range(num_digits, len(str(high)) + 1 if high is not None else num_digits + 1):
        least = max(low, 10 ** (length - 1) if length > 1 else 0)
        most = 10**length - 1
        parts.append(_of_length(str(least), str(most if high is None else min(high, most))))
    if high is None:
        parts.append(f"[1-9][0-9]{{{num_digits},}}")
    return _one_of_these(parts)


def _of_length(low: str, high: str) -> str:
    """The numbers of a range whose bounds have as many digits as each other."""
    if low == high:
        return low
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    if first == last:
        return low[0] + _of_length(low[1:], high[1:])
    parts = []
    if low[1:].strip("0"):
        parts.append(low[0] + _of_length(low[1:], "9" * rest))
        first += 1
    if high[1:].strip("9"):
        parts.append(high[0] + _of_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        digits = f"[{first}-{last}]" if first < last else str(first)
        parts.append(digits + (f"[0-9]{{{rest}}}" if rest else ""))
    return _one_of_these(parts)


def _reals(low: int | None, is_low_open: bool, high: int | None, is_high_open: bool) -> str:
    """The numbers of a range, written without exponents; ``""`` if there are none.

    Args:
        low, high: ``None`` is no bound.
        is_low_open, is_high_open: whether the bound itself is excluded.
    """
    parts = []
    if low is None or low < 0:
        least, is_open = 0, True
        if high is not None and high < 0:
            least, is_open = -high, is_high_open
        if part := _reals_from(least, is_open, None if low is None else -low, is_low_open):
            parts.append(f"-{part}")
    if high is None or high >= 0:
        least, is_open = (low, is_low_open) if low is not None and low >= 0 else (0, False)
        parts.append(_reals_from(least, is_open, high, is_high_open))
    return _one_of_these(parts)


def _reals_from(low: int, is_low_open: bool, high: int | None, is_high_open: bool) -> str:
    """The same, of a range without negative numbers."""
    parts = []
    if high is None or low < high:
        if is_low_open:
            parts.append(rf"{low}\.[0-9]*[1-9][0-9]*")
        whole = _naturals(low + is_low_open, None if high is None else high - 1)
        parts.append(rf"{whole}(\.[0-9]+)?" if whole else "")
    if high is not None and not is_high_open and (low < high or (low == high and not is_low_open)):
        parts.append(rf"{high}(\.0+)?")
    return _one_of_these(parts)


def _one_of_these(parts: Iterable[str]) -> str:
    found = [part for part in parts if part]
    return found[0] if len(found) == 1 else f"({'|'.join(found)})" if found else ""
