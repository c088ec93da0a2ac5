"""Rewrites JSON schemas whose integers llguidance would round.

llguidance compares numbers in float64, so it would keep an answer to another integer beyond 2^53
than the schema says. Here the objects, lists and references on the way to such an integer become
rules of Lark, the integers become literals and ranges of digits, and everything else stays a JSON
schema. What can't be rewritten is refused. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from json import JSONDecoder, dumps
from typing import Any, NoReturn

from mlx_paged.engine.json_schema import (
    BOUNDS,
    Schema,
    children_of,
    has_exact_bounds,
    has_fractions,
    is_rounded,
    one_of_as_any_of,
    pattern_within_bounds,
    target_of,
)

_LONG_NUMBER = re.compile(r"[0-9]{16}|[0-9][eE]\+?[0-9]")
# What a grammar consists of, as far as it matters: texts, comments, patterns and JSON schemas.
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/|%json\b\s*')

# Keywords that apply to values of any type, and those of one type only. llguidance does not know
# the last ones of each, and refuses or ignores them.
_UNKNOWN = {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems",
    "unevaluatedItems", "propertyNames", "dependentSchemas", "dependentRequired", "dependencies",
    "unevaluatedProperties",
}  # fmt: skip
_OF_ALL = {"const", "enum", "anyOf", "oneOf", "allOf", "$ref", "not", "if", "then", "else"}
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
    "null": set(),
    "boolean": set(),
}  # fmt: skip
_OF_TYPES["integer"] = _OF_TYPES["number"]
_EACH_TYPE = ("null", "boolean", "number", "string", "array", "object")
# A name in an object, as llguidance writes it.
_NAME = r'/"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/'


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
        written = _rules_of(schema, f"exact_{len(rules)}_")
        if written:
            rules += written
            pieces += [lark[end : match.start()], f"exact_{len(rules) - len(written)}_start "]
            end = place
    return "\n".join(["".join(pieces) + lark[end:], *rules]) if rules else lark


def _rules_of(schema: Any, prefix: str) -> list[str]:
    """The rules of a schema, whose first one is named ``start`` after the prefix. Empty if
    llguidance keeps its integers, or will refuse it.
    """
    try:
        if not isinstance(schema, Mapping) or not all(map(_is_well_formed, _all_nodes(schema))):
            return []
        writer = _Writer(schema, prefix)
        return writer.all_rules() if writer.is_rounded(writer.root) else []
    except RecursionError:
        raise InexactError("is nested too deeply for its integers beyond 2^53") from None


class _Writer:
    """Writes the rules of one schema.

    Args:
        prefix: of the names of its rules.
    """

    def __init__(self, schema: Schema, prefix: str):
        root = dict(one_of_as_any_of(schema))
        self.prefix = prefix
        self._guidance = root.pop("x-guidance", {})
        self.root = root
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # of the rules of references
        self._refs: dict[str, set[str]] = {}  # in the targets of references
        self._rounded: dict[str, bool] = {}  # whether these targets would be
        flexible = self._guidance.get("whitespace_flexible", True)
        space = self._guidance.get("whitespace_pattern") or r"[ \n\r\t]+" * flexible
        self._space = f"({space})?" if space else ""
        self._comma = self._pattern(self._guidance.get("item_separator", ","))
        self._colon = self._pattern(self._guidance.get("key_separator", ":"))
        self._is_lenient = self._guidance.get("lenient", False)

    def all_rules(self) -> list[str]:
        start = self._of(self.root)
        return [f"{self.prefix}start: {start}", *self._rules]

    def _pattern(self, pattern: str) -> str:
        """A regular expression with the white space that may be around it."""
        inner = f"{self._space}({pattern}){self._space}" if self._space else pattern
        return "/" + re.sub(r"(?<!\\)/", r"\\/", inner) + "/"

    def _rule(self, body: str) -> str:
        name = f"{self.prefix}{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    # What llguidance would round

    def is_rounded(self, schema: Any) -> bool:
        """Whether something in a schema, or in what it refers to, would be rounded."""
        return any(map(_rounds, _nodes(schema))) or any(
            self._is_target_rounded(ref) for ref in self._references(schema)
        )

    def _is_target_rounded(self, ref: str) -> bool:
        if ref not in self._rounded:
            self._rounded[ref] = any(map(_rounds, _nodes(target_of(self.root, ref))))
        return self._rounded[ref]

    def _references(self, schema: Any) -> set[str]:
        """The references in a schema, and in what they refer to."""
        found: set[str] = set()
        new = _refs_in(schema)
        while new:
            ref = new.pop()
            found.add(ref)
            if ref not in self._refs:
                self._refs[ref] = _refs_in(target_of(self.root, ref))
            new |= self._refs[ref] - found
        return found

    # Expressions of Lark

    def _of(self, schema: Any) -> str:
        """What is valid for a schema."""
        if isinstance(schema, Mapping) and self._is_lenient:
            schema = {name: value for name, value in schema.items() if name not in _UNKNOWN}
        if not self.is_rounded(schema):
            return self._json(schema)
        for keyword in schema.keys() & _UNKNOWN & _OF_ALL:
            self._refuse(keyword)
        for keyword, write in (
            ("$ref", self._ref),
            ("anyOf", self._any_of),
            ("oneOf", self._one_of),
            ("allOf", self._all_of),
            ("const", self._const),
            ("enum", self._enum),
        ):
            if keyword in schema:
                self._check_beside(schema, keyword, _OF_ALL | set().union(*_OF_TYPES.values()))
                return write(schema)
        types = schema.get("type", _EACH_TYPE)
        types = [types] if isinstance(types, str) else types
        return _either(self._typed(schema, str(each)) for each in types)

    def _typed(self, schema: Schema, kind: str) -> str:
        others = set().union(*_OF_TYPES.values()) - _OF_TYPES.get(kind, set())
        single = {name: value for name, value in schema.items() if name not in others}
        single["type"] = kind
        if not self.is_rounded(single):
            return self._json(single)
        if kind == "object":
            return self._object(single)
        if kind == "array":
            return self._array(single)
        if kind not in ("number", "integer"):
            self._refuse(f"the type {kind[:80]}")
        return self._number(single)

    def _json(self, schema: Any) -> str:
        """A schema that llguidance keeps."""
        if schema is False:
            raise InexactError("has integers beyond 2^53 beside a schema that nothing is valid for")
        piece = {} if schema is True else dict(schema)
        for ref in self._references(piece):
            place, _, name = ref.removeprefix("#/").partition("/")
            name = name.partition("/")[0].replace("~1", "/").replace("~0", "~")
            if place not in ("$defs", "definitions") or name not in self.root.get(place, {}):
                self._refuse(f"the reference {ref[:80]!r}, which is not to $defs")
            known = dict(piece.get(place, {}))
            piece[place] = {name: self.root[place][name], **known}
        return "%json " + dumps({**piece, "x-guidance": self._guidance})

    def _refuse(self, beside: str) -> NoReturn:
        raise InexactError(
            f"has an integer beyond 2^53 that can't be kept exactly beside {beside}; describe it "
            "as a string, or by const, enum, minimum and maximum alone"
        )

    def _check_beside(self, schema: Schema, keyword: str, relevant: set[str]) -> None:
        for other in schema:
            if other in relevant and other != keyword:
                self._refuse(other)

    def _ref(self, schema: Schema) -> str:
        ref = schema["$ref"]
        if "type" in schema:
            self._refuse("$ref and type")
        if ref not in self._names:
            # It is named before it is written, since it may refer to itself.
            self._names[ref] = f"{self.prefix}ref_{len(self._names)}"
            self._rules.append(f"{self._names[ref]}: {self._of(target_of(self.root, ref))}")
        return self._names[ref]

    def _any_of(self, schema: Schema) -> str:
        kind = {"type": schema["type"]} if "type" in schema else {}
        branches = []
        for branch in schema["anyOf"]:
            if kind and isinstance(branch, Mapping):
                if "$ref" in branch or branch.get("type", kind["type"]) != kind["type"]:
                    self._refuse("anyOf and type")
                branch = {**branch, **kind}
            branches.append(branch)
        return _either(map(self._of, branches))

    def _one_of(self, schema: Schema) -> str:
        if not (self._is_lenient or self._guidance.get("coerce_one_of")):
            self._refuse("oneOf")
        return self._any_of({**schema, "anyOf": schema["oneOf"]})

    def _all_of(self, schema: Schema) -> str:
        if len(schema["allOf"]) != 1 or "type" in schema:
            self._refuse("allOf")
        return self._of(schema["allOf"][0])

    def _const(self, schema: Schema) -> str:
        return self._enum({**schema, "enum": [schema["const"]]})

    def _enum(self, schema: Schema) -> str:
        types = schema.get("type", _EACH_TYPE)
        types = [types] if isinstance(types, str) else types
        values = [value for value in schema["enum"] if _type_of(value) & set(types)]
        if not values:
            raise InexactError("has integers beyond 2^53 that are not of their schema's type")
        return _either(map(self._constant, values))

    def _constant(self, value: Any) -> str:
        if not any(map(is_rounded, _values(value))):
            return self._json({"const": value})
        if isinstance(value, Mapping):
            pairs = [
                f"{_text(name)} {self._colon} {self._constant(each)}"
                for name, each in value.items()
            ]
            return self._between("{", f" {self._comma} ".join(pairs), "}")
        if isinstance(value, list):
            items = f" {self._comma} ".join(map(self._constant, value))
            return self._between("[", items, "]")
        return _text(value)

    def _between(self, left: str, inner: str, right: str) -> str:
        space = f"/{self._space}/" if self._space else '""'
        return f"{dumps(left)} {space} {inner} {space} {dumps(right)}"

    def _number(self, schema: Schema) -> str:
        if "multipleOf" in schema or has_fractions(schema):
            if not has_exact_bounds(schema):
                self._refuse("multipleOf" if "multipleOf" in schema else "a bound with a fraction")
            return self._json(schema)
        pattern = pattern_within_bounds(schema)
        if not pattern:
            raise InexactError(f"has bounds that no {schema['type']} is within")
        return f"/{pattern}/"

    # Objects and lists

    def _object(self, schema: Schema) -> str:
        known = {"properties", "required", "additionalProperties"}
        for keyword in known:
            self._check_beside(schema, keyword, _OF_TYPES["object"] - known)
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
        terminal = f"{self.prefix}NAME_{len(self._rules)}".upper()
        others = f" & ~({' | '.join(map(_text, names))})" if names else ""
        self._rules.append(f"{terminal}: {_NAME}{others}")
        item = self._rule(f"{terminal} {self._colon} {self._of(rest)}")
        more = f"({self._comma} {item})*"
        return self._rule(f"({item} {more})?"), self._rule(more)

    def _array(self, schema: Schema) -> str:
        known = {"items", "prefixItems", "minItems", "maxItems"}
        for keyword in known:
            self._check_beside(schema, keyword, _OF_TYPES["array"] - known)
        rest, prefix = schema.get("items", True), schema.get("prefixItems", [])
        if isinstance(rest, list):
            self._refuse("a list of items")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        prefix = prefix[:most]
        low = max(least - len(prefix), 0)
        high = None if most is None else most - len(prefix)
        tail = ""
        if rest is not False and high != 0:
            item = self._rule(self._of(rest))
            counted = f"({self._comma} {item})"
            if prefix:
                tail = f"{counted}{_times(low, high)}"
            else:
                times = _times(max(low - 1, 0), None if high is None else high - 1)
                tail = f"({item} {counted}{times}){'' if low else '?'}"
        for index in reversed(range(len(prefix))):
            comma = self._comma if index else ""
            part = self._rule(f"{comma} {self._of(prefix[index])} {tail}")
            tail = part if index < least else f"({part})?"
        return self._between("[", tail, "]")


# The forms of keywords that are read here. llguidance refuses others.
_FORMS: dict[str, Any] = {
    **dict.fromkeys(("properties", "$defs", "definitions"), Mapping),
    **dict.fromkeys(("required", "enum", "anyOf", "oneOf", "allOf", "prefixItems"), list),
    **dict.fromkeys(("minItems", "maxItems"), int),
    "additionalProperties": Mapping | bool,
    "items": Mapping | bool | list,
    **dict.fromkeys(BOUNDS[:2], int | float),
    **dict.fromkeys(BOUNDS[2:], int | float | bool),
    "type": str | list,
    "$ref": str,
    "x-guidance": Mapping,
}


def _is_well_formed(schema: Schema) -> bool:
    for name, form in _FORMS.items():
        value = schema.get(name)
        if name in schema and not isinstance(value, form):
            return False
        # To Python, True is a number.
        if name in (*BOUNDS[:2], "minItems", "maxItems") and isinstance(value, bool):
            return False
    counts = (schema.get("minItems", 0), schema.get("maxItems", 0))
    names = schema.get("required", [])
    return (
        min(counts) >= 0
        and all(isinstance(name, str) for name in names)
        and all(isinstance(child, Mapping | bool) for child in children_of(schema))
    )


def _all_nodes(schema: Schema) -> Iterator[Schema]:
    """All schemas of a document."""
    yield from _nodes(schema)
    for place in ("$defs", "definitions"):
        if isinstance(schema.get(place), Mapping):
            for definition in schema[place].values():
                yield from _nodes(definition)


def _refs_in(schema: Any) -> set[str]:
    return {ref for node in _nodes(schema) if isinstance(ref := node.get("$ref"), str)}


def _nodes(schema: Any) -> Iterator[Schema]:
    """A schema and all schemas in it, without what it refers to."""
    if isinstance(schema, Mapping):
        yield schema
        for child in children_of(schema):
            yield from _nodes(child)


def _rounds(schema: Schema) -> bool:
    """Whether llguidance would round a number of this schema itself."""
    constants = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return any(map(is_rounded, _values(constants))) or not has_exact_bounds(schema)


def _values(value: Any) -> Iterator[Any]:
    """A value and all values in it."""
    yield value
    inside = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list):
        for each in inside:
            yield from _values(each)


def _type_of(value: Any) -> set[str]:
    """The types of a value."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    if value is None:
        return {"null"}
    return {
        "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    }


def _text(value: Any) -> str:
    """JSON as a text of Lark."""
    return dumps(dumps(value, ensure_ascii=False))


def _either(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"
