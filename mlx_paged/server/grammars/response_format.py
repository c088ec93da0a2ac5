"""What an answer has to be, as requests say it: OpenAI's ``response_format`` and ``text.format``,
vLLM's ``structured_outputs`` and ``guided_*``, and llama.cpp's ``json_schema`` and ``grammar``.
Pure functions.
"""

from __future__ import annotations

from typing import Any

from mlx_paged.errors import ArgumentError, one_line
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fields import Fields
from mlx_paged.structured_outputs import KINDS, MAX_GRAMMAR_LEN, StructuredOutputsParams

# vLLM's fields and llama.cpp's, by the name of what they mean.
_PLAIN = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},
    "json_schema": "json",
    "grammar": "grammar",
}


def read_structured_outputs(body: Fields) -> StructuredOutputsParams | None:
    """What ``response_format``, ``structured_outputs``, ``guided_*``, ``json_schema`` and
    ``grammar`` of a request say; ``None``: any text.

    Raises:
        ApiError: one of them is wrong, or there are several; it names the field.
    """
    found: dict[str, StructuredOutputsParams] = {}
    for name in ("response_format", "structured_outputs", *_PLAIN):
        if not body.has(name):
            continue
        if name == "response_format":
            wanted = read_format(body.child(name))
        elif name == "structured_outputs":
            wanted = _read_structured_outputs(body.child(name))
        else:
            value = _lark_of(body, name) if name == "grammar" else body.raw(name)
            wanted = _made(body, name, **{_PLAIN[name]: value})
        if wanted is not None:
            found[name] = wanted
    if len(found) > 1:
        first, second, *_ = found
        raise body.error(second, f"does not go with {first}; give one of them")
    return next(iter(found.values()), None)


def read_format(fields: Fields) -> StructuredOutputsParams | None:
    """What OpenAI's ``response_format`` says, or ``text.format`` of its responses, which has the
    schema beside the type; ``None``: any text.

    Raises:
        ApiError: a field is wrong; it names the field.
    """
    kind = fields.choice("type", ("text", "json_object", "json_schema"))
    wanted = None
    if kind == "json_object" and fields.has("schema"):  # as llama.cpp has it
        wanted = _made(fields, "schema", json=fields.raw("schema"))
    elif kind == "json_object":
        wanted = StructuredOutputsParams(json_object=True)
    elif kind == "json_schema":
        has_child = fields.has("json_schema")
        inner = fields.child("json_schema") if has_child or not fields.has("schema") else fields
        inner.text("name", None)
        inner.accept("description")
        inner.boolean("strict", None)
        if not inner.has("schema"):
            raise inner.error("schema", "is missing")
        wanted = _made(inner, "schema", json=inner.raw("schema"))
        inner.refuse_rest()
    fields.refuse_rest()
    return wanted


def _lark_of(body: Fields, name: str) -> str:
    """A grammar in llama.cpp's GBNF, or in llguidance's Lark, as Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    text = body.text(name)
    if len(text) > MAX_GRAMMAR_LEN:
        raise body.error(
            name, f"has {len(text):,} characters, and {MAX_GRAMMAR_LEN:,} are the most"
        )
    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # Its parser is recursive, and the text may be anything.
        raise body.error(name, f"can't be used: it is no GBNF: {one_line(error)}") from None
    return lark


def _read_structured_outputs(fields: Fields) -> StructuredOutputsParams:
    # That there is no white space is the default here; vLLM would fall back to another engine.
    fields.only("disable_any_whitespace", True)
    fields.accept("disable_fallback")
    options: dict[str, Any] = {name: fields.raw(name) for name in KINDS if fields.has(name)}
    options["whitespace_flexible"] = fields.boolean("whitespace_flexible", False)
    fields.refuse_rest()
    return _made(fields, "", **options)


def _made(fields: Fields, name: str, **options: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**options)
    except ArgumentError as error:
        if not name:  # The error knows which.
            is_ours = error.argument in (*KINDS, "whitespace_flexible")
            full = fields.name_of(str(error.argument)) if is_ours else fields.path
        else:
            full = fields.name_of(name)
        message = str(error).removeprefix("[structured_outputs] ")
        raise ApiError(400, f"{full} can't be used: {message}", param=full) from error
