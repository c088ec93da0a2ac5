"""The bodies of Ollama's ``POST /api/chat`` and ``/api/generate``, and what each asks for; those of
``/api/embed`` and ``/api/embeddings``.

As in Ollama, answers are streamed unless ``stream`` is false, and unknown fields and options are
ignored; each is logged once.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper
from pydantic import BeforeValidator, Field

from mlx_paged.answers.dialect import Dialect
from mlx_paged.answers.template_traits import TemplateTraits
from mlx_paged.errors import shown
from mlx_paged.options.sampling_declarations import StructuredOutputsParams
from mlx_paged.server.chat_jobs import ChatJob, prepare
from mlx_paged.server.conversations import OtherPart
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fields import (
    ModelFields,
    RequestedFormat,
    RequestFields,
    StopTexts,
    effort_options,
    make_params,
    read_format,
)
from mlx_paged.server.generations import Generation
from mlx_paged.server.openai.chat import ChatTool, read_tools
from mlx_paged.server.openai.completions import encode_all
from mlx_paged.server.pooling import MAX_INPUTS
from mlx_paged.server.prompt_threads import Work
from mlx_paged.server.schemas import (
    ONE_OR_MORE,
    Children,
    Repeated,
    only,
    refused,
    without_effect,
)
from mlx_paged.server.service import Service

# Some clients send whole numbers as 40.0.
_Whole = Annotated[
    int,
    BeforeValidator(
        lambda value: int(value) if isinstance(value, float) and value.is_integer() else value,
        json_schema_input_type=int,
    ),
]
_TEXT_ONLY = "models are text-only here"

# How a model is loaded, which the server's flags say, and what shortens a conversation that is too
# long, which is refused here.
_LoadOptions: Any = without_effect(
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "num_keep"
)
_WithoutEffect: Any = without_effect("truncate", "shift")
_EmbeddingsWithoutEffect: Any = without_effect("keep_alive", "options")


class OllamaOptions(Repeated, _LoadOptions):  # type: ignore[misc]
    place = "options"
    num_predict: _Whole | None = None
    temperature: float | None = None
    top_k: _Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: _Whole | None = None
    stop: StopTexts | None = None


_PARAMS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
OPTIONS = {
    name: _PARAMS.get(name, name)
    for name in OllamaOptions.model_fields
    if name not in _LoadOptions.model_fields
}
"""The names of options, with those of the sampling parameters that they set."""


def capabilities_of(tokenizer: TokenizerWrapper) -> list[str]:
    """What a model that generates text can do, in Ollama's words."""
    dialect = Dialect.of(tokenizer)
    calls_tools = dialect.calls is not None and TemplateTraits.of(tokenizer).shows_tools
    others = {"tools": calls_tools, "thinking": dialect.reasoning is not None}
    return ["completion", *(name for name, can in others.items() if can)]


class OllamaFields(Repeated, RequestFields, _WithoutEffect):  # type: ignore[misc]
    """The fields of both bodies."""

    stream: bool = True
    format: Any = ""
    options_: OllamaOptions = Field(default_factory=OllamaOptions, alias="options")
    think: Annotated[
        Any,
        only(
            *(True, False, "low", "medium", "high", "max"),
            way_out="send true, false, 'low', 'medium', 'high' or 'max'",
        ),
    ] = None
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing is asked, as by clients that only want the model to be loaded."""

    @abstractmethod
    def prepare(self, work: Work, service: Service, generation: Generation) -> Generation:
        """The generation with its prompt. This is slow for long ones."""

    def check(self, service: Service) -> None:
        """Check that there is the model, and that it can do what is asked."""
        self.check_capability("thinking", bool(self.think), service)

    def check_capability(self, name: str, is_asked: bool, service: Service) -> None:
        model = self.model_name(service)
        if is_asked and name not in capabilities_of(service.tokenizer):
            raise ApiError(400, f"{shown(model)} does not support {name}")

    def template_options(self) -> dict[str, Any]:
        """The variables of the chat template."""
        if self.think in (None, True, False):
            return {} if self.think is None else {"enable_thinking": bool(self.think)}
        return effort_options(self.think)

    def generation(self, service: Service) -> Generation:
        """What is asked of the engine, still without a prompt."""
        given = {name: getattr(self.options_, name) for name in OPTIONS}
        values = {OPTIONS[name]: value for name, value in given.items() if value is not None}
        # A limit below 1 is none, and a negative seed is a random one.
        if values.get("max_tokens", 1) < 1:
            values["max_tokens"] = None
        if values.get("seed", 0) < 0:
            values["seed"] = None
        if self.logprobs:
            values["logprobs"] = self.top_logprobs
        requested = self._requested_format()
        values["structured_outputs"] = requested.params
        fields = {param: f"options.{name}" for name, param in OPTIONS.items()}
        fields |= {"logprobs": "top_logprobs", **requested.fields}
        params = make_params(service.default_params, values, fields)
        return Generation([], params, self.options(service), fields=fields)

    def _requested_format(self) -> RequestedFormat:
        if isinstance(self.format, dict):
            return read_format("format", json=self.format)
        if self.format == "json":
            return RequestedFormat(StructuredOutputsParams(json_object=True), "format")
        if self.format:
            raise refused("format", f"must be 'json' or a JSON schema, got {shown(self.format)}")
        return RequestedFormat()


class OllamaFunction(Repeated):
    place = "messages[].tool_calls[].function"
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaToolCall(Repeated):
    place = "messages[].tool_calls[]"
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Repeated):
    """A message of any role. The result of a tool belongs to the call of its id, or without one to
    the call of its number.
    """

    place = "messages[]"
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[Any] = Field(default_factory=list)
    tool_calls: Children[OllamaToolCall] = Field(default_factory=list)
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_message(self) -> dict[str, Any]:
        """The message for a chat template, with a line of text for its images."""
        calls = [{"type": "function", **call.model_dump()} for call in self.tool_calls]
        others = {
            "reasoning_content": self.thinking,
            "tool_calls": calls or None,
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
        }
        given = {name: value for name, value in others.items() if value is not None}
        texts = [self.content]
        if self.images:
            texts.append(OtherPart(type="image").as_text("", is_last=False))
        return {"role": self.role, "content": "\n".join(filter(None, texts)), **given}


class OllamaChatRequest(OllamaFields):
    """The body of ``POST /api/chat``."""

    messages: Children[OllamaMessage] = Field(default_factory=list)
    tools: Children[ChatTool] = Field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def check(self, service: Service) -> None:
        super().check(service)
        self.check_capability("tools", bool(self.tools), service)
        if self.messages and self.messages[-1].images:
            raise refused(
                f"messages[{len(self.messages) - 1}].images", f"can't be read: {_TEXT_ONLY}"
            )

    def prepare(self, work: Work, service: Service, generation: Generation) -> Generation:
        options = self.template_options()
        last = self.messages[-1]
        if last.role == "assistant" and not last.tool_calls:
            # The answer continues it.
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        messages = [each.as_message() for each in self.messages]
        tools = read_tools(self.tools)
        job = ChatJob(messages, generation, tools, template_options=options)
        return prepare(work, service, job)


class GenerateRequest(OllamaFields):
    """The body of ``POST /api/generate``."""

    prompt: str = ""
    system: str = ""
    raw: bool = False
    suffix: Annotated[Any, only("", way_out="send the text before it alone")] = ""
    template: Annotated[Any, only("", way_out="start the server with --chat-template")] = ""
    context: Annotated[Any, only([], way_out="send the conversation to /api/chat")] = None
    images: Annotated[Any, only([], way_out=_TEXT_ONLY)] = None

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    def check(self, service: Service) -> None:
        super().check(service)
        if self.raw and self.system:
            raise refused("raw", "can't be combined with system")

    def prepare(self, work: Work, service: Service, generation: Generation) -> Generation:
        if self.raw:
            [token_ids] = encode_all(work, service, [self.prompt], True)
            return replace(generation, prompt_token_ids=token_ids)
        messages = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        job = ChatJob(messages, generation, template_options=self.template_options())
        return prepare(work, service, job)


class EmbeddingFields(Repeated, ModelFields, _EmbeddingsWithoutEffect):  # type: ignore[misc]
    """The fields of both bodies of requests for embeddings."""

    dimensions: Annotated[int, Field(ge=0)] = 0
    truncate: bool = True

    @property
    @abstractmethod
    def inputs(self) -> list[str]:
        """The texts; none if nothing is asked, as by clients that only want the model loaded."""


class EmbedRequest(EmbeddingFields):
    """The body of ``POST /api/embed``."""

    input: Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True), ONE_OR_MORE] = Field(
        default_factory=list
    )

    @property
    def inputs(self) -> list[str]:
        return [] if self.input == [""] else self.input


class EmbeddingsRequest(EmbeddingFields):
    """The body of ``POST /api/embeddings``, which is older and has one text."""

    prompt: str = ""

    @property
    def inputs(self) -> list[str]:
        return [self.prompt] if self.prompt else []
