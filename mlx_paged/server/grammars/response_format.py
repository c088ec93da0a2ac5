"""The fields for structured outputs: OpenAI's ``response_format`` and ``text.format``, vLLM's
``structured_outputs`` and ``guided_*``, and llama.cpp's ``json_schema`` and ``grammar``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from mlx_paged.errors import ArgumentError, one_line
from mlx_paged.sampling_declarations import KINDS, MAX_GRAMMAR_LEN, StructuredOutputsParams
from mlx_paged.server.errors import ApiError
from mlx_paged.server.schemas import Body, OneOf, fixed, refused


class Wanted(NamedTuple):
    """A structured output, and the place in the body that describes it."""

    params: StructuredOutputsParams
    place: str


def fields_of(wanted: Wanted | None) -> dict[str, str]:
    """The place of a structured output by the names that the engine's errors have for it."""
    if wanted is None:
        return {}
    return {wanted.params.kind: wanted.place, "structured_outputs": wanted.place}


class TextFormat(Body):
    type: Literal["text"]

    def wanted(self, place: str) -> Wanted | None:
        """The structured output for the format; ``None``: any text.

        Args:
            place: the place of the format in the body.
        """
        return None


class JsonFormat(Body):
    """OpenAI's; with ``schema``, llama.cpp's."""

    type: Literal["json_object"]
    schema_: Any = Field(None, alias="schema")

    def wanted(self, place: str) -> Wanted:
        if self.schema_ is None:
            return Wanted(StructuredOutputsParams(json_object=True), place)
        return read_wanted(f"{place}.schema", json=self.schema_)


class JsonSchema(Body):
    name: str | None = None
    description: Any = None
    strict: bool | None = None
    schema_: Any = Field(alias="schema")


class SchemaFormat(Body):
    """Of chat, with the schema in ``json_schema``, and of responses, with it in ``schema``."""

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    name: str | None = None
    description: Any = None
    strict: bool | None = None
    schema_: Any = Field(None, alias="schema")

    def wanted(self, place: str) -> Wanted:
        if self.json_schema is not None:
            return read_wanted(f"{place}.json_schema.schema", json=self.json_schema.schema_)
        if self.schema_ is None:
            raise refused(f"{place}.json_schema", "is missing")
        return read_wanted(f"{place}.schema", json=self.schema_)


Format = Annotated[TextFormat | JsonFormat | SchemaFormat, OneOf("type")]


class StructuredOutputs(Body):
    """vLLM's field of this name."""

    json_: Any = Field(None, alias="json")
    regex: Any = None
    choice: Any = None
    grammar: Any = None
    json_object: Any = None
    structural_tag: Annotated[Any, fixed()] = None
    # True is the default here. vLLM would fall back to another grammar engine.
    disable_any_whitespace: Annotated[Any, fixed(True)] = None
    disable_fallback: Any = None
    whitespace_flexible: bool = False

    def wanted(self, place: str) -> Wanted:
        options = {name: getattr(self, "json_" if name == "json" else name) for name in KINDS}
        given = {name: value for name, value in options.items() if value is not None}
        return read_wanted(place, whitespace_flexible=self.whitespace_flexible, **given)


class FormatFields(Body):
    """The fields for structured outputs, at most one of which may be given."""

    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    grammar: str | None = None

    def structured(self) -> Wanted | None:
        """The structured output that is requested; ``None``: any text."""
        found: dict[str, Wanted] = {}
        for name in FormatFields.model_fields:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, Body):
                wanted = value.wanted(name)  # type: ignore[attr-defined]
            else:
                kind = "json" if name == "json_schema" else name.removeprefix("guided_")
                value = _lark_of(value) if name == "grammar" else value
                wanted = read_wanted(name, **{kind: value})
            if wanted is not None:
                found[name] = wanted
        if len(found) > 1:
            first, second, *_ = found
            raise refused(second, f"can't be combined with {first}; send only one of them")
        return next(iter(found.values()), None)


def _lark_of(text: str) -> str:
    """A grammar in llama.cpp's GBNF, or in llguidance's Lark, as Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    if len(text) > MAX_GRAMMAR_LEN:
        raise refused(
            "grammar", f"has {len(text):,} characters, but at most {MAX_GRAMMAR_LEN:,} are allowed"
        )
    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # A recursive parser that may raise anything.
        raise refused("grammar", f"can't be used: it is not GBNF: {one_line(error)}") from None
    return lark


def read_wanted(place: str, **options: Any) -> Wanted:
    """Check the options, which are given by the field at ``place`` or by its fields.

    Raises:
        ApiError: an option is invalid.
    """
    try:
        params = StructuredOutputsParams(**options)
    except ArgumentError as error:
        if "whitespace_flexible" in options and error.argument in (*KINDS, "whitespace_flexible"):
            place = f"{place}.{error.argument}"
        message = str(error).removeprefix("[structured_outputs] ")
        raise ApiError(400, f"{place} can't be used: {message}", param=place) from error
    in_field = f".{params.kind}" if "whitespace_flexible" in options else ""
    return Wanted(params, place + in_field)
