"""Parses JSON bodies strictly, and refuses those that would be expensive to parse."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from mlx_paged.errors import shown
from mlx_paged.server.errors import ApiError

MAX_JSON_DEPTH = 64
# Python's parser holds the GIL while it reads a text: half a second for the worst bodies of maximum
# size, about 50 ms within these limits.
MAX_JSON_VALUES = 2**19
MAX_JSON_OBJECTS = 2**16  # including lists
MAX_JSON_NUMBER = 64  # characters

_LONG_NUMBER = re.compile(rb"[0-9+\-.eE]{%d}" % (MAX_JSON_NUMBER + 1))
_CHUNK = 2**17  # bytes that are scanned before another thread may run
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def parse_json(body: bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ApiError: it is invalid, or too expensive to parse; 400.
    """
    check_json(body)
    try:
        value = json.loads(
            body, parse_constant=_refuse_constant, object_pairs_hook=_with_unique_names
        )
        if b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode()  # Fails for lone surrogates.
        return value
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the body contains a lone surrogate, half a character") from None
    except ValueError as error:
        # Also UnicodeDecodeError, whose message would quote the body.
        what = f": {error}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(400, f"the body is not valid JSON{what}") from None


def _with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate names: a proxy that inspects the body might use the other value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ApiError(400, f"the body contains the name {shown(name)} twice in an object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not valid JSON: {name} is not allowed")


def check_json(body: bytes) -> None:
    """Raise :class:`ApiError` if a body is not UTF-8 or would be expensive to parse: nested too
    deeply, with too many values, or with overlong numbers. Validity is left to the parser.

    The body is scanned in chunks, so that other threads can run in between.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 at byte {error.start}") from error
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Each value has at most four quotes: those of its name and of its text.
    if unescaped.count(b'"') > 4 * MAX_JSON_VALUES:
        raise _too_many("values", MAX_JSON_VALUES)
    num_commas = num_brackets = depth = 0
    end = b""  # the end of the previous chunks
    for bare in _without_texts(unescaped):
        num_commas += bare.count(b",")
        if num_commas >= MAX_JSON_VALUES:
            raise _too_many("values", MAX_JSON_VALUES)
        if _LONG_NUMBER.search(end + bare):
            raise ApiError(
                400, f"the body has a number with more than {MAX_JSON_NUMBER} characters"
            )
        end = (end + bare)[-MAX_JSON_NUMBER:]
        brackets = bare.translate(None, _NO_BRACKETS)
        deepest, depth = _depths(brackets, depth)
        if deepest > MAX_JSON_DEPTH:
            raise ApiError(400, f"the body is nested deeper than {MAX_JSON_DEPTH} levels")
        num_brackets += len(brackets)
        if num_brackets > 2 * MAX_JSON_OBJECTS:
            raise _too_many("objects and lists", MAX_JSON_OBJECTS)


def _too_many(what: str, most: int) -> ApiError:
    return ApiError(400, f"the body has more than {most:,} {what}")


def _without_texts(unescaped: bytes) -> Iterator[bytes]:
    """The chunks of JSON text without escaped quotes, with all strings removed."""
    is_text = 0
    for start in range(0, len(unescaped), _CHUNK):
        parts = unescaped[start : start + _CHUNK].split(b'"')
        yield b"".join(parts[is_text::2])
        is_text ^= (len(parts) - 1) % 2


def _depths(brackets: bytes, depth: int) -> tuple[int, int]:
    """The maximum and the final nesting depth of brackets that begin at ``depth``."""
    if not brackets:
        return depth, depth
    codes = np.frombuffer(brackets, np.uint8)
    opens = (codes == ord("[")) | (codes == ord("{"))
    depths = np.cumsum(np.where(opens, 1, -1))
    return depth + int(depths.max()), depth + int(depths[-1])
