"""Fields that the bodies of several protocols share.

- The model, and the use of the cache.
- Sampling, with the names of OpenAI's API and vLLM: the parameters of
  :mod:`mlx_paged.options.sampling_declarations` that requests may set.
- Structured outputs: OpenAI's ``response_format`` and ``text.format``, vLLM's
  ``structured_outputs`` and ``guided_*``, and llama.cpp's ``json_schema`` and ``grammar``.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, create_model

from mlx_paged.engine.options import RequestOptions
from mlx_paged.errors import ArgumentError, one_line, shown
from mlx_paged.options.argument_values import Several
from mlx_paged.options.sampling_declarations import (
    KINDS,
    MAX_GRAMMAR_LEN,
    SAMPLING_PARAMS,
    StructuredOutputsParams,
)
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.server.errors import ApiError, api_error, same_names, unknown_model
from mlx_paged.server.generations import Generation
from mlx_paged.server.schemas import ONE_OR_MORE, Body, Filled, OneOf, refused, short
from mlx_paged.server.service import Service

MAX_NAME_LEN = 256  # of a model; each event of a stream contains it

MAX_COMPLETIONS = 128  # per prompt, as in OpenAI's API
MAX_STOPS = 64  # each new piece of text is searched for all of them
MAX_STOPS_LEN = 2**14  # characters in total
MAX_WORDS = 1000
MAX_WORDS_LEN = 2**16  # characters in total; they are encoded twice
MAX_TOKEN_IDS = 2**18  # about the size of the largest vocabularies


class ModelFields(Body):
    """The field ``model`` of all bodies."""

    model: str | None = None

    def model_name(self, service: Service) -> str:
        """The requested model, or the first one."""
        name = service.model_names[0] if self.model is None else self.model
        check_model_name(name, service)
        return name


def check_model_name(name: str, service: Service) -> None:
    """Raise unless the server has a model or an adapter of this name."""
    is_taken = service.takes_any_name and len(name) <= MAX_NAME_LEN
    if same_names(name).isdisjoint(service.all_names) and not is_taken:
        raise unknown_model(name, service.all_names)


def adapter_of(name: str, service: Service) -> str | None:
    """The adapter that a model's name stands for; ``None`` for the model alone."""
    found = same_names(name).intersection(service.adapter_names)
    return next(iter(found), None)


class RequestFields(ModelFields):
    """The fields of all requests for answers: the priority, the use of the prefix cache and of the
    disk, and whether the answer is one object or a stream of events.
    """

    stream: bool = False
    priority: int = 0
    cache_salt: str | None = None
    no_store: bool = False
    # A router reads it. A server of one model keeps that in memory.
    keep_alive: Any = None

    def options(self, service: Service) -> RequestOptions:
        """The corresponding options of a request to the engine."""
        return {
            "adapter": adapter_of(self.model_name(service), service),
            "priority": self.priority,
            "cache_salt": self.cache_salt or None,
            "no_store": self.no_store,
        }


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def effort_options(effort: Effort | None) -> dict[str, Any]:
    """The variables of the chat template for an effort: ``reasoning_effort``, which some templates
    use, and ``enable_thinking``, which is false for ``"none"`` only.
    """
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def first_given(*values: int | None) -> int | None:
    """The first value that is not ``None``."""
    return next((value for value in values if value is not None), None)


StopTexts = Annotated[
    list[Filled], Field(max_length=MAX_STOPS, fail_fast=True), short(MAX_STOPS_LEN), ONE_OR_MORE
]
TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
# The keys of JSON objects are texts.
_Biases = Annotated[dict[str, float | None], Field(max_length=MAX_TOKEN_IDS)]
_TYPES = {
    "n": Annotated[int, Field(le=MAX_COMPLETIONS)],
    "stop": StopTexts,
    "bad_words": Annotated[
        list[Filled], Field(max_length=MAX_WORDS, fail_fast=True), short(MAX_WORDS_LEN), ONE_OR_MORE
    ],
    "logit_bias": _Biases,
}


def _type_of(name: str) -> Any:
    """The type of a field. ``SamplingParams`` checks its range; lists are limited here."""
    domain = SAMPLING_PARAMS[name].domain
    return _TYPES.get(name) or (TokenIds if isinstance(domain, Several) else domain.parse)


class _SamplingFields(Body):
    # Further features of vLLM; only the values that describe what happens here are accepted.
    use_beam_search: Literal[False] | None = None
    length_penalty: Literal[1] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    best_of: int | None = None

    def sampling(
        self, defaults: SamplingParams, fields: Mapping[str, str] | None = None, **values: Any
    ) -> SamplingParams:
        """The sampling parameters.

        Args:
            defaults: used for parameters that are not given.
            fields: the fields that set parameters of other names.
            values: parameters that differ between protocols, such as ``max_tokens``.
        """
        values |= {
            name: getattr(self, name)
            for name, param in SAMPLING_PARAMS.items()
            if param.wire and name in self.model_fields_set
        }
        if "logit_bias" in values:
            values["logit_bias"] = _biases_of(values["logit_bias"])
        params = make_params(defaults, values, fields)
        if self.best_of not in (None, params.n):
            raise refused("best_of", f"is not supported, got {self.best_of}; leave it out")
        return params


if TYPE_CHECKING:
    SamplingFields = _SamplingFields
else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=_SamplingFields,
        **{
            name: (_type_of(name), Field(None, description=param.help))
            for name, param in SAMPLING_PARAMS.items()
            if param.wire
        },
    )


def make_params(
    defaults: SamplingParams, values: dict[str, Any], fields: Mapping[str, str] | None = None
) -> SamplingParams:
    """``defaults`` with some values replaced.

    Args:
        fields: the client's fields by the names of the parameters that they set.

    Raises:
        ApiError: a value is invalid, alone or together with others.
    """
    try:
        return defaults.clone(**values)
    except ArgumentError as error:
        raise api_error(error, fields) from error


def _biases_of(biases: dict[str, float | None]) -> dict[int, float]:
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise refused("logit_bias", f"must map token ids to numbers, got {shown(name)}")
    return {int(name): bias for name, bias in biases.items() if bias is not None}


class RequestedFormat(NamedTuple):
    """A structured output, and the place in the body that describes it; by default any text."""

    params: StructuredOutputsParams | None = None
    place: str = ""

    @property
    def fields(self) -> dict[str, str]:
        """The place by the names that the engine's errors have for it."""
        if self.params is None:
            return {}
        return {self.params.kind: self.place, "structured_outputs": self.place}


class TextFormat(Body):
    type: Literal["text"]

    def requested(self, place: str) -> RequestedFormat:
        """The structured output for the format, whose place in the body is given."""
        return RequestedFormat()


class JsonFormat(Body):
    """OpenAI's; with ``schema``, llama.cpp's."""

    type: Literal["json_object"]
    schema_: Any = Field(None, alias="schema")

    def requested(self, place: str) -> RequestedFormat:
        if self.schema_ is None:
            return RequestedFormat(StructuredOutputsParams(json_object=True), place)
        return read_format(f"{place}.schema", json=self.schema_)


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

    def requested(self, place: str) -> RequestedFormat:
        if self.json_schema is not None:
            return read_format(f"{place}.json_schema.schema", json=self.json_schema.schema_)
        if self.schema_ is None:
            raise refused(f"{place}.json_schema", "is missing")
        return read_format(f"{place}.schema", json=self.schema_)


Format = Annotated[TextFormat | JsonFormat | SchemaFormat, OneOf("type")]


class StructuredOutputs(Body):
    """vLLM's field of this name."""

    json_: Any = Field(None, alias="json")
    regex: Any = None
    choice: Any = None
    grammar: Any = None
    json_object: Any = None
    structural_tag: None = None
    # True is the default here. vLLM would fall back to another grammar engine.
    disable_any_whitespace: Literal[True] | None = None
    disable_fallback: Any = None
    whitespace_flexible: bool = False

    def requested(self, place: str) -> RequestedFormat:
        options = {name: getattr(self, "json_" if name == "json" else name) for name in KINDS}
        given = {name: value for name, value in options.items() if value is not None}
        return read_format(place, whitespace_flexible=self.whitespace_flexible, **given)


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

    def structured(self) -> RequestedFormat:
        """The structured output that is requested."""
        found: dict[str, RequestedFormat] = {}
        for name in FormatFields.model_fields:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, Body):
                requested = value.requested(name)  # type: ignore[attr-defined]
            else:
                kind = "json" if name == "json_schema" else name.removeprefix("guided_")
                value = _lark_of(value) if name == "grammar" else value
                requested = read_format(name, **{kind: value})
            if requested.params is not None:
                found[name] = requested
        if len(found) > 1:
            first, second, *_ = found
            raise refused(second, f"can't be combined with {first}; send only one of them")
        return next(iter(found.values()), RequestedFormat())


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


def read_format(place: str, **options: Any) -> RequestedFormat:
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
    return RequestedFormat(params, place + in_field)


class StreamOptions(Body):
    include_obfuscation: Any = None


class GenerationFields(RequestFields, SamplingFields):
    """The fields that OpenAI's APIs share."""

    cache_salt: Filled | None = None
    # llama.cpp's: whether the prefix cache is used.
    cache_prompt: bool = True
    # OpenAI's: how long K/V are cached. "in_memory" means not on disk.
    prompt_cache_retention: Any = None
    stream_options: StreamOptions | None = None
    # Without effect: they identify the user, or help other servers to find a cache.
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    def check(self, service: Service) -> None:
        """Check the model, and that there are options of a stream only with one."""
        self.model_name(service)
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "is given, but stream is not true")

    def options(self, service: Service) -> RequestOptions:
        options = super().options(service)
        if not self.cache_prompt:
            options["cache_salt"] = uuid.uuid4().hex  # unique, so that nothing is shared
        if self.prompt_cache_retention == "in_memory" or not self.cache_prompt:
            options["no_store"] = True
        return options

    def generation(
        self,
        service: Service,
        requested: RequestedFormat,
        fields: Mapping[str, str] | None = None,
        **values: Any,
    ) -> Generation:
        """What is asked of the engine, still without a prompt.

        Args:
            requested: the structured output.
            fields, values: as of :meth:`sampling`.
        """
        fields = {**(fields or {}), **requested.fields}
        values["structured_outputs"] = requested.params
        params = self.sampling(service.default_params, fields, **values)
        return Generation([], params, self.options(service), fields=fields)
