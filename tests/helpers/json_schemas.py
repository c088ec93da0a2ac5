"""Random JSON schemas whose answers are short, and whether a value is valid for one of them."""

from __future__ import annotations

import random
import re
from typing import Any

NAMES = ("name", "n", "ü", 'quo"te', "is ok", "tags", "x")
WORDS = ("red", "green", "", 'a "b"', "é", "\\", "x\ny")
PATTERNS = ("[a-c]{1,4}", "\\d{2}-\\d", "(ab|ba){1,2}!?")


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema with at most a few dozen characters of JSON for it, and so of keywords that bound
    them.
    """
    leaves = [_string, _integer, _enum, _constant, _pattern, _boolean_or_null]
    nodes = [_object, _object, _array, _any_of]
    make = rng.choice(leaves if depth == 0 else nodes if depth == 2 else leaves + nodes)
    return make(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(-200, 200)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 300)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 7, None, True, [1, "a"]], 3)}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([*WORDS, 12, False, {"a": [1]}])}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{rng.choice(PATTERNS)}$"}


def _boolean_or_null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice([["boolean", "null"], "boolean", "null"])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    items = random_schema(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}


def random_one_of(rng: random.Random) -> dict[str, Any]:
    """A schema with ``oneOf``, whose branches may exclude one another or not, often by a property
    ``"kind"`` that may be required or not.
    """
    branches = [_tagged(rng) if rng.random() < 0.6 else random_schema(rng, 1) for _ in range(2)]
    return {"oneOf": branches + ([random_schema(rng, 0)] if rng.random() < 0.3 else [])}


def _tagged(rng: random.Random) -> dict[str, Any]:
    kinds = rng.choice([{"const": "a"}, {"const": "b"}, {"enum": ["c", "d"]}, {"enum": ["a", "c"]}])
    schema = _object(rng, 1)
    schema["properties"]["kind"] = kinds
    schema["required"] += ["kind"] * (rng.random() < 0.5)
    return schema


_TYPES = {"null": type(None), "boolean": bool, "string": str, "integer": int, "array": list}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """By JSON Schema's definition of the keywords that random schemas have."""
    if "oneOf" in schema:
        return sum(is_valid(value, each) for each in schema["oneOf"]) == 1
    if "anyOf" in schema:
        return any(is_valid(value, each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return any(_are_equal(value, each) for each in schema.get("enum", [schema.get("const")]))
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(_has_type(value, each) for each in types):
        return False
    if isinstance(value, str):
        is_long = not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)
        return not is_long and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(
            is_valid(each, schema["items"]) for each in value
        )
    if isinstance(value, dict):
        properties = schema["properties"]
        return (
            set(schema["required"]) <= value.keys() <= properties.keys()
            and all(is_valid(each, properties[name]) for name, each in value.items())
        )  # fmt: skip
    return "minimum" not in schema or schema["minimum"] <= value <= schema["maximum"]


def _has_type(value: Any, name: str) -> bool:
    if name == "object":
        return isinstance(value, dict)
    return isinstance(value, _TYPES[name]) and not (name == "integer" and isinstance(value, bool))


def _are_equal(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other
