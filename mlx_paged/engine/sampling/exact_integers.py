"""Rewrites JSON schemas whose integers llguidance would round. Pure functions.

llguidance compares numbers in float64, so it would keep an answer to another integer beyond 2^53
than the schema says. Here the objects, lists and references on the way to such an integer become
rules of Lark, the integers become literals and ranges of digits, and everything else stays a JSON
schema. What can't be rewritten is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from json import JSONDecoder, dumps
from typing import Any, NoReturn

from mlx_paged.answers.json_schema import (
    Schema,
    children_of,
    constants_of,
    nodes,
    one_of_as_any_of,
    target_of,
    types_of,
)

_LONG_NUMBER = re.compile(r"[0-9]{16}|[0-9][eE]\+?[0-9]")
# What a grammar consists of, as far as it matters: texts, comments, patterns and JSON schemas.
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/|%json\b\s*')
# A name in an object, as llguidance writes it.
_NAME = r'/"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/'

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MAX_EXACT = 2**53
_MAX_INT64 = 2**63 - 1
_MAX_POWER = 10**18  # llguidance has no open ranges from here on
# Characters of JSON schemas in a rewritten one. llguidance takes about a tenth of it.
_MAX_LEN = 2**22

# Keywords that apply to values of any type, and those of one type only.
_OF_ALL = ("not", "if", "then", "else", "$ref", "anyOf", "oneOf", "allOf", "const", "enum")
_OF_TYPES: dict[str, set[str]] = {
    "number": {*BOUNDS, "multipleOf"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "contains",
        "minContains", "maxContains", "uniqueItems", "unevaluatedItems",
    },
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "minProperties",
        "maxProperties", "propertyNames", "dependentSchemas", "dependentRequired", "dependencies",
        "unevaluatedProperties",
    },
}  # fmt: skip
_OF_TYPES["integer"] = _OF_TYPES["number"]
_OF_SOME = set().union(*_OF_TYPES.values())
_RELEVANT = {*_OF_ALL, *_OF_SOME}
# Those that are rewritten here, and those that llguidance does not know.
_REWRITTEN = {
    *BOUNDS, "items", "prefixItems", "minItems", "maxItems", "properties", "required",
    "additionalProperties",
}  # fmt: skip
_UNKNOWN = {
    *_OF_ALL[:4], "contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems",
    "propertyNames", "dependentSchemas", "dependentRequired", "dependencies",
    "unevaluatedProperties",
}  # fmt: skip
# The forms of keywords that are read here. llguidance refuses others.
_FORMS: dict[str, Any] = {
    **dict.fromkeys(("properties", "$defs", "definitions", "x-guidance"), Mapping),
    **dict.fromkeys(("required", "enum", "anyOf", "oneOf", "allOf", "prefixItems"), list),
    **dict.fromkeys(("minItems", "maxItems"), int),
    **dict.fromkeys(BOUNDS, int | float),
    "type": str | list,
    "$ref": str,
}
_EACH_TYPE = ("null", "boolean", "number", "string", "array", "object")


class InexactError(ValueError):
    """A schema has an integer that can't be kept exactly; the message says where."""


def exact_json(schema: Schema, guidance: Mapping[str, Any]) -> str | None:
    """JSON of a schema as a grammar of Lark; ``None`` if llguidance keeps its integers exactly.

    Args:
        guidance: llguidance's options for the schema.

    Raises:
        InexactError: an integer can't be kept exactly.
    """
    lark = "start: %json " + dumps({**schema, "x-guidance": guidance})
    exact = with_exact_integers(lark)
    return None if exact is lark else exact


def with_exact_integers(lark: str) -> str:
    """A grammar of llguidance's Lark whose JSON schemas keep their integers exactly: the same text
    if they do so already.

    Raises:
        InexactError: an integer can't be kept exactly.
    """
    if not _LONG_NUMBER.search(lark):
        return lark
    pieces: list[str] = []
    rules: list[str] = []
    end = place = 0
    while (match := _PIECE.search(lark, place)) is not None:
        place = match.end()
        if not match[0].startswith("%json"):
            continue
        try:
            schema, place = JSONDecoder().raw_decode(lark, place)
        except (ValueError, RecursionError):
            continue  # llguidance says what is wrong with it.
        prefix = f"exact_{len(rules)}_"
        if written := _rules_of(schema, prefix):
            rules += written
            pieces += [lark[end : match.start()], f"{prefix}start "]
            end = place
    return "\n".join(["".join(pieces) + lark[end:], *rules]) if rules else lark


def _rules_of(schema: Any, prefix: str) -> list[str]:
    """The rules of a schema, whose first one is named ``start`` after the prefix. Empty if
    llguidance keeps its integers, or will refuse it.
    """
    try:
        if not isinstance(schema, Mapping) or not _is_well_formed(schema):
            return []
        writer = _Writer(schema, prefix)
        reached = list(writer.reached(writer.root))
        is_rewritten = all(map(_is_well_formed, reached)) and any(map(_rounds, reached))
        return writer.all_rules() if is_rewritten else []
    except RecursionError:
        raise InexactError("is nested too deeply for its integers beyond 2^53") from None


class _Writer:
    """Writes the rules of one schema.

    Args:
        prefix: of the names of its rules.
    """

    def __init__(self, schema: Schema, prefix: str):
        self.root = dict(one_of_as_any_of(schema))
        self._prefix = prefix
        self._guidance = self.root.pop("x-guidance", {})
        self._is_lenient = self._guidance.get("lenient", False)
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # of the rules of references
        self._num_left = _MAX_LEN
        flexible = self._guidance.get("whitespace_flexible", True)
        space = self._guidance.get("whitespace_pattern") or r"[ \n\r\t]+" * flexible
        self._space = f"({space})?" if space else ""
        self._comma = self._pattern(self._guidance.get("item_separator", ","))
        self._colon = self._pattern(self._guidance.get("key_separator", ":"))

    def all_rules(self) -> list[str]:
        start = self._of(self.root)
        return [f"{self._prefix}start: {start}", *self._rules]

    def _pattern(self, pattern: str) -> str:
        """A regular expression with the white space that may be around it."""
        inner = f"{self._space}({pattern}){self._space}" if self._space else pattern
        return "/" + re.sub(r"(?<!\\)/", r"\\/", inner) + "/"

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _is_rounded(self, schema: Any) -> bool:
        """Whether something in a schema, or in what it refers to, would be rounded."""
        return any(
            _rounds(node) or node.get("$ref") in self._names for node in self.reached(schema)
        )

    def reached(self, schema: Any) -> Iterator[Schema]:
        """The schemas in a schema, and in what it refers to."""
        references: set[str] = set()
        pending = [schema]
        while pending:
            for node in nodes(pending.pop()):
                yield node
                reference = node.get("$ref")
                if isinstance(reference, str) and reference not in references:
                    references.add(reference)
                    pending.append(target_of(self.root, reference))

    # Expressions of Lark

    def _of(self, schema: Any) -> str:
        """What is valid for a schema."""
        if isinstance(schema, Mapping) and self._is_lenient:
            schema = {name: value for name, value in schema.items() if name not in _UNKNOWN}
        if not self._is_rounded(schema):
            return self._json(schema)
        keyword = next((each for each in _OF_ALL if each in schema), None)
        if keyword is None:
            types = schema.get("type", _EACH_TYPE)
            types = [types] if isinstance(types, str) else types
            return _either(self._typed(schema, str(kind)) for kind in types)
        beside = [each for each in schema if each in _RELEVANT and each != keyword]
        if beside and keyword not in _UNKNOWN:
            self._refuse(beside[0])
        if keyword == "$ref":
            return self._reference(schema)
        if keyword in ("const", "enum"):
            return self._constants(schema)
        coerces = self._is_lenient or self._guidance.get("coerce_one_of")
        if keyword == "anyOf" or (keyword == "oneOf" and coerces):
            return _either(map(self._of, self._branches(schema, keyword)))
        if keyword == "allOf" and len(schema["allOf"]) == 1 and "type" not in schema:
            return self._of(schema["allOf"][0])
        self._refuse(keyword)

    def _json(self, schema: Any) -> str:
        """A schema that llguidance keeps, with the definitions that it refers to."""
        if schema is False:
            raise InexactError("has integers beyond 2^53 beside a schema that nothing is valid for")
        piece = {} if schema is True else dict(schema)
        definitions: dict[str, dict[str, Any]] = {}
        for node in self.reached(piece):
            if not isinstance(reference := node.get("$ref"), str):
                continue
            place, _, name = reference.removeprefix("#/").partition("/")
            name = name.partition("/")[0].replace("~1", "/").replace("~0", "~")
            if place not in ("$defs", "definitions") or name not in self.root.get(place, {}):
                self._refuse(f"the reference {reference[:80]!r}, which is not to $defs")
            definitions.setdefault(place, {})[name] = self.root[place][name]
        for place, found in definitions.items():
            piece[place] = {**found, **piece.get(place, {})}
        written = "%json " + dumps({**piece, "x-guidance": self._guidance})
        self._num_left -= len(written)
        if self._num_left < 0:
            raise InexactError("has integers beyond 2^53 beside too many references")
        return written

    def _refuse(self, beside: str) -> NoReturn:
        raise InexactError(
            f"has an integer beyond 2^53 that can't be kept exactly beside {beside}; describe it "
            "as a string, or by const, enum, minimum and maximum alone"
        )

    def _reference(self, schema: Schema) -> str:
        reference = schema["$ref"]
        if "type" in schema:
            self._refuse("$ref and type")
        if reference not in self._names:
            # It is named before it is written, since it may refer to itself.
            name = self._names[reference] = f"{self._prefix}ref_{len(self._names)}"
            self._rules.append(f"{name}: {self._of(target_of(self.root, reference))}")
        return self._names[reference]

    def _branches(self, schema: Schema, keyword: str) -> list[Any]:
        """The branches of a schema, each with the type beside them."""
        kind, branches = schema.get("type"), schema[keyword]
        if kind is None:
            return list(branches)
        for branch in branches:
            if isinstance(branch, Mapping) and (
                "$ref" in branch or branch.get("type", kind) != kind
            ):
                self._refuse("anyOf and type")
        return [{**each, "type": kind} if isinstance(each, Mapping) else each for each in branches]

    def _constants(self, schema: Schema) -> str:
        types = types_of({"type": schema.get("type")})
        values = [each for each in constants_of(schema) or () if types & types_of({"const": each})]
        if not values:
            raise InexactError("has integers beyond 2^53 that are not of their schema's type")
        return _either(map(self._constant, values))

    def _constant(self, value: Any) -> str:
        if not any(map(is_rounded, _values(value))):
            return self._json({"const": value})
        if isinstance(value, Mapping):
            properties = {name: {"const": each} for name, each in value.items()}
            return self._object(
                {"properties": properties, "required": properties, "additionalProperties": False}
            )
        if isinstance(value, list):
            items = [{"const": each} for each in value]
            return self._array({"prefixItems": items, "items": False, "minItems": len(items)})
        return _text(value)

    def _typed(self, schema: Schema, kind: str) -> str:
        """What is valid for a schema and of one type."""
        own = _OF_TYPES.get(kind, set())
        single = {name: schema[name] for name in schema if name in own or name not in _OF_SOME}
        single["type"] = kind
        if not self._is_rounded(single):
            return self._json(single)
        for keyword in single:
            if keyword in own - _REWRITTEN:
                self._refuse(keyword)
        return {"object": self._object, "array": self._array}.get(kind, self._number)(single)

    def _number(self, schema: Schema) -> str:
        if schema["type"] != "integer" and any(bound % 1 for bound in _bounds_of(schema)):
            self._refuse("a bound with a fraction")
        pattern = pattern_within_bounds(schema)
        if not pattern:
            raise InexactError(f"has bounds that no {schema['type']} is within")
        return f"/{pattern}/"

    def _object(self, schema: Schema) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        rest = schema.get("additionalProperties", True)
        names = list(dict.fromkeys([*properties, *required]))
        first, after = self._others(names, rest)
        for name in reversed(names):
            value = properties.get(name, rest)
            if value is False and name not in required:
                continue
            item = self._rule(f"{_text(name)} {self._colon} {self._of(value)}")
            following = f"{self._comma} {item}"
            if name in required:
                first, after = self._rule(f"{item} {after}"), self._rule(f"{following} {after}")
            else:
                first = self._rule(f"{item} {after} | {first}")
                after = self._rule(f"({following})? {after}")
        return self._between("{", first, "}")

    def _others(self, names: Sequence[str], rest: Any) -> tuple[str, str]:
        """Properties of other names: those of an object with no others, and those after others."""
        if rest is False:
            return '""', '""'
        terminal = f"{self._prefix}NAME_{len(self._rules)}".upper()
        others = f" & ~({' | '.join(map(_text, names))})" if names else ""
        self._rules.append(f"{terminal}: {_NAME}{others}")
        item = self._rule(f"{terminal} {self._colon} {self._of(rest)}")
        more = f"({self._comma} {item})*"
        return self._rule(f"({item} {more})?"), self._rule(more)

    def _array(self, schema: Schema) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        rest, first = schema.get("items", True), schema.get("prefixItems", [])[:most]
        if isinstance(rest, list):
            self._refuse("a list of items")
        item = None if rest is False or most == len(first) else self._rule(self._of(rest))
        items = [self._rule(self._of(each)) for each in first]
        tail = ""
        if item is not None:
            items = items or [item]
            high = "" if most is None else most - len(items)
            tail = f"({self._comma} {item}){{{max(least - len(items), 0)},{high}}}"
        for index in reversed(range(len(items))):
            part = self._rule(f"{self._comma if index else ''} {items[index]} {tail}")
            tail = part if index < least else f"({part})?"
        return self._between("[", tail, "]")

    def _between(self, left: str, inner: str, right: str) -> str:
        space = f"/{self._space}/" if self._space else '""'
        return f"{dumps(left)} {space} {inner} {space} {dumps(right)}"


def _is_well_formed(schema: Schema) -> bool:
    for name in _FORMS.keys() & schema.keys():
        value = schema[name]
        if not isinstance(value, _FORMS[name]):
            return False
        # To Python, True is a number.
        if isinstance(value, bool) and name not in BOUNDS[2:]:
            return False
        if isinstance(value, float) and math.isinf(value):
            return False
    counts = (schema.get("minItems", 0), schema.get("maxItems", 0))
    return (
        min(counts) >= 0
        and all(isinstance(name, str) for name in schema.get("required", []))
        and all(isinstance(child, Mapping | bool) for child in children_of(schema))
    )


def _rounds(schema: Schema) -> bool:
    """Whether llguidance would round a number of this schema itself."""
    values = [inner for value in constants_of(schema) or () for inner in _values(value)]
    return any(map(is_rounded, values)) or not has_exact_bounds(schema)


def _values(value: Any) -> Iterator[Any]:
    """A value and all values in it."""
    yield value
    if isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _values(each)


def _text(value: Any) -> str:
    """JSON as a text of Lark."""
    return dumps(dumps(value, ensure_ascii=False))


def _either(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


# Numbers


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
    sides = [side for side in (_bound_of(schema, 0), _bound_of(schema, 1)) if side[0] is not None]
    for bound, is_excluded in sides:
        # It adds 1 to an excluded bound.
        limit = _MAX_EXACT if is_excluded else _MAX_POWER if len(sides) == 1 else math.inf
        if abs(bound or 0) >= limit:
            return False
    # The greatest 64-bit integer is rounded up and limited to itself.
    is_whole = schema.get("type") == "integer"
    return all(
        (is_whole and bound == _MAX_INT64) or (abs(bound) <= _MAX_INT64 and float(bound) == bound)
        for bound in _bounds_of(schema)
    )


def pattern_within_bounds(schema: Schema) -> str:
    """The numbers of a schema of integers, or of numbers between integers, as a regular expression,
    without exponents; ``""`` if there are none.
    """
    (low, is_low_open), (high, is_high_open) = _bound_of(schema, 0), _bound_of(schema, 1)
    least = None if low is None else math.ceil(low)
    most = None if high is None else math.floor(high)
    is_low_open, is_high_open = is_low_open and least == low, is_high_open and most == high
    is_whole = schema["type"] == "integer"
    parts = []
    if least is None or least < 0:
        begin = (-most, is_high_open) if most is not None and most < 0 else (0, True)
        end = None if least is None else -least
        if part := _not_negative(*begin, end, is_low_open, is_whole):
            parts.append(f"-{part}")
    if most is None or most >= 0:
        begin = (least, is_low_open) if least is not None and least >= 0 else (0, False)
        parts.append(_not_negative(*begin, most, is_high_open, is_whole))
    return _one_of_these(parts)


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
    if bound is None or (excluded <= bound if side else excluded >= bound):
        return excluded, True
    return bound, False


def _not_negative(
    low: int, is_low_open: bool, high: int | None, is_high_open: bool, is_whole: bool
) -> str:
    """The numbers of a range without negative ones, of integers if it ``is_whole``.

    Args:
        high: ``None`` is no bound.
        is_low_open, is_high_open: whether the bound itself is excluded.
    """
    if is_whole:
        return _naturals(low + is_low_open, None if high is None else high - is_high_open)
    parts = []
    if high is None or low < high:
        if is_low_open:
            parts.append(rf"{low}\.[0-9]*[1-9][0-9]*")
        whole = _naturals(low + is_low_open, None if high is None else high - 1)
        parts.append(rf"{whole}(\.[0-9]+)?" if whole else "")
    if high is not None and not is_high_open and (low < high or (low == high and not is_low_open)):
        parts.append(rf"{high}(\.0+)?")
    return _one_of_these(parts)


def _naturals(low: int, high: int | None) -> str:
    """The integers of a range that has no negative ones."""
    if high is None:
        num_digits = len(str(low))
        shorter = _naturals(low, 10**num_digits - 1)
        return _one_of_these((f"[1-9][0-9]{{{num_digits},}}", shorter))
    parts = []
    while low <= high:
        # The most numbers in a row that differ only in a digit, and in all digits after it.
        step = 1
        while low and low % (10 * step) == 0 and low + 10 * step - 1 <= high:
            step *= 10
        digits, num_free = str(low // step), len(str(step)) - 1
        digit = int(digits[-1])
        last = min(9, digit + (high + 1 - low) // step - 1)
        parts.append(
            f"{digits[:-1]}[{digit}-{last}]" + (f"[0-9]{{{num_free}}}" if num_free else "")
        )
        low += (last + 1 - digit) * step
    return _one_of_these(parts)


def _one_of_these(parts: Iterable[str]) -> str:
    found = [part for part in parts if part]
    return found[0] if len(found) == 1 else f"({'|'.join(found)})" if found else ""
