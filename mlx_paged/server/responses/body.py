"""The body of OpenAI's ``/v1/responses`` as a :class:`ChatJob`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlx_paged.errors import shown
from mlx_paged.server.answers.reader import ToolChoice
from mlx_paged.server.chat_jobs import ChatJob, arguments_of, left_out_text
from mlx_paged.server.fields import Fields
from mlx_paged.server.grammars.response_format import read_format
from mlx_paged.server.openai.messages import read_tool_choice, refuse_second_names
from mlx_paged.server.openai.options import read_cache_salt, read_model, read_no_store
from mlx_paged.server.sampling_fields import read_sampling
from mlx_paged.server.service import Service
from mlx_paged.structured_outputs import StructuredOutputsParams

_WITHOUT_EFFECT = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "client_metadata",
    "max_tool_calls",  # of tools that run on the server
    # Nothing is stored, and the answer says so.
    "store",
)
_ADVICE = {
    "previous_response_id": "nothing is stored here; send the whole conversation as input",
    "conversation": "nothing is stored here; send the whole conversation as input",
    "prompt": "nothing is stored here; send instructions and input",
    "messages": "send input",
    "max_tokens": "send max_output_tokens",
    "max_completion_tokens": "send max_output_tokens",
    "response_format": "send text.format",
    "reasoning_effort": "send reasoning.effort",
}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_INCLUDES = ("reasoning.encrypted_content", "message.output_text.logprobs")
_OTHER_PARTS = {
    "input_image": "images",
    "input_file": "files",
    "input_audio": "audio",
}
# Before the reasoning in ``encrypted_content``, so that what other servers made is told apart. The
# server keeps nothing, and clients bring it back.
_SEAL = "mlx_paged."


@dataclass(frozen=True)
class ResponsesBody:
    """A body, read.

    Args:
        namespaces: of the tools that came in one, by their names.
        echo: what the response repeats of the request.
        has_sealed_reasoning: whether reasoning comes as ``encrypted_content``, too.
    """

    job: ChatJob
    model: str
    is_streamed: bool = False
    num_top_logprobs: int | None = None
    has_sealed_reasoning: bool = False
    namespaces: dict[str, str] = field(default_factory=dict)
    echo: dict[str, Any] = field(default_factory=dict)


def read_responses_body(
    fields: Fields, service: Service, owner: str | None = None
) -> ResponsesBody:
    """Everything that the body says.

    Args:
        owner: of the items that it may refer to.

    Raises:
        ApiError: the first thing that is wrong, and every field that can't be honoured, by name.
    """
    model = read_model(fields, service)
    tools, namespaces = _read_tools(fields)
    choice = _read_tool_choice(fields, tools)
    includes = _read_includes(fields)
    num_top_logprobs = _read_num_top_logprobs(fields, includes)
    options = _read_reasoning(fields)
    text = fields.child("text", None)
    schema = None if text is None else _read_text(text, options)
    fields.only("n", 1)
    fields.only("prompt_logprobs")
    params = read_sampling(
        fields,
        service.default_params,
        max_tokens=fields.integer("max_output_tokens", service.max_tokens),
        logprobs=num_top_logprobs,
        structured_outputs=schema,
    )
    is_parallel = fields.boolean("parallel_tool_calls", True)
    job = ChatJob(
        _read_conversation(fields, partial(service.kept_items.find, owner)),
        params,
        tools,
        choice,
        is_parallel,
        options,
        fields.integer("priority", 0),
        read_cache_salt(fields),
        read_no_store(fields),
    )
    is_streamed = fields.boolean("stream", False)
    _check_rest(fields, is_streamed)
    echo = {
        "instructions": fields.raw("instructions"),
        "max_output_tokens": params.max_tokens,
        "metadata": fields.raw("metadata") or {},
        "parallel_tool_calls": is_parallel,
        "reasoning": {"effort": options.get("reasoning_effort"), "summary": None},
        "temperature": params.temperature,
        "text": fields.raw("text") or {"format": {"type": "text"}},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": fields.raw("tools") or [],
        "top_logprobs": num_top_logprobs or 0,
        "top_p": params.top_p,
    }
    has_sealed_reasoning = _INCLUDES[0] in includes
    return ResponsesBody(
        job, model, is_streamed, num_top_logprobs, has_sealed_reasoning, namespaces, echo
    )


def _check_rest(fields: Fields, is_streamed: bool) -> None:
    stream_options = fields.child("stream_options", None)
    if stream_options is not None:
        if not is_streamed:
            raise fields.error("stream_options", "is given, and stream is not true")
        stream_options.accept("include_obfuscation")
        stream_options.refuse_rest()
    fields.boolean("store", None)
    fields.child("metadata", None)
    fields.only("background", False)
    # A conversation that is too long is refused, and nothing of it goes missing.
    fields.only("truncation", "disabled", "auto")
    fields.only("service_tier", "auto", "default")
    fields.accept(*_WITHOUT_EFFECT)
    fields.refuse_rest(_ADVICE)


def _read_includes(fields: Fields) -> tuple[str, ...]:
    includes = fields.texts("include", 100, 2**14)
    for index, name in enumerate(includes):
        if name not in _INCLUDES:
            raise fields.error(f"include[{index}]", f"is {shown(name)}, which there is not here")
    return includes


def _read_num_top_logprobs(fields: Fields, includes: tuple[str, ...]) -> int | None:
    has_logprobs = _INCLUDES[1] in includes
    number = fields.integer("top_logprobs", 0)
    if number and not has_logprobs:
        raise fields.error("top_logprobs", f"is given, and include has no {_INCLUDES[1]!r}")
    return number if has_logprobs else None


def _read_reasoning(fields: Fields) -> dict[str, Any]:
    """Variables of the template."""
    reasoning = fields.child("reasoning", None)
    if reasoning is None:
        return {}
    effort = reasoning.choice("effort", _EFFORTS, None)
    # Reasoning is shown as it is, and not summed up.
    reasoning.accept("summary", "generate_summary", "context")
    reasoning.refuse_rest()
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _read_text(fields: Fields, options: dict[str, Any]) -> StructuredOutputsParams | None:
    verbosity = fields.choice("verbosity", ("low", "medium", "high"), None)
    if verbosity is not None:
        options["verbosity"] = verbosity  # There may be templates that know it.
    answer_format = fields.child("format", None)
    fields.refuse_rest()
    return None if answer_format is None else read_format(answer_format)


# Tools


def _read_tools(fields: Fields) -> tuple[tuple[dict[str, Any], ...], dict[str, str]]:
    """The tools, those of Codex's namespaces among them, and the namespaces by the tools' names."""
    tools: list[dict[str, Any]] = []
    namespaces: dict[str, str] = {}
    for each in fields.children("tools", ()):
        if each.raw("type") != "namespace":
            tools.append(_read_tool(each))
            continue
        namespace = each.filled_text("name")
        each.text("description", None)
        inner = [_read_tool(tool) for tool in each.children("tools")]
        namespaces |= {tool["function"]["name"]: namespace for tool in inner}
        tools += inner
        each.leave_out_rest()
    return tuple(tools), namespaces


def _read_tool(fields: Fields) -> dict[str, Any]:
    """A tool as templates take it, which is that of chat completions."""
    kind = fields.text("type")
    if kind != "function":
        raise fields.error(
            "type",
            f"is {shown(kind)}, and this server has function tools only; turn the tool off in the "
            "client, or describe it as a function",
        )
    name = fields.filled_text("name")
    function: dict[str, Any] = {"name": name}
    description = fields.text("description", None)
    if description is not None:
        function["description"] = description
    fields.child("parameters", None)
    function["parameters"] = fields.raw("parameters") or {"type": "object", "properties": {}}
    if fields.boolean("strict", None):
        function["strict"] = True
    fields.leave_out_rest()
    return {"type": "function", "function": function}


def _read_tool_choice(fields: Fields, tools: tuple[dict[str, Any], ...]) -> ToolChoice:
    names = [tool["function"]["name"] for tool in tools]
    refuse_second_names(fields, names)
    return read_tool_choice(fields, tools, None)


# Input


def _read_conversation(
    fields: Fields, find: Callable[[str], dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """Instructions and input as messages; what one side says in several items becomes one.

    A content is the list of its texts until all of them are there: to join them one by one would
    take the square of their number.
    """
    messages: list[dict[str, Any]] = []
    instructions = fields.text("instructions", None)
    if instructions:
        messages.append({"role": "system", "content": [instructions]})
    if isinstance(fields.raw("input"), str):
        messages.append({"role": "user", "content": [fields.text("input")]})
    else:
        reader = _ItemReader(messages, find)
        items = list(fields.children("input"))
        for each in items:
            reader.add(each, is_last=each is items[-1])
        reader.end_turn()
    if len(messages) == (1 if instructions else 0):
        raise fields.error("input", "is empty; give a text, or at least one item")
    for message in messages:
        message["content"] = "".join(message["content"])
    return messages


class _ItemReader:
    """Items of the input, one after another, to messages.

    Args:
        find: returns an item by its id, if it is kept.
    """

    def __init__(
        self, messages: list[dict[str, Any]], find: Callable[[str], dict[str, Any] | None]
    ):
        self._messages = messages
        self._find = find
        self._is_last = False
        self._turn: dict[str, Any] | None = None  # what the model says, which may be many items
        self._names: dict[str, str] = {}  # of the tools, by the ids of their calls

    def add(self, item: Fields, is_last: bool) -> None:
        """Take the next item."""
        self._is_last = is_last
        if item.raw("type") == "item_reference":
            item = self._referred(item)
        kind = item.text("type", "message")
        readers = {
            "message": self._add_message,
            "function_call": self._add_call,
            "function_call_output": self._add_output,
            "reasoning": self._add_reasoning,
        }
        if kind not in readers:
            raise item.error("type", f"is {shown(kind)}; this server knows {', '.join(readers)}")
        readers[kind](item)
        item.leave_out_rest()

    def _referred(self, item: Fields) -> Fields:
        item_id = item.text("id")
        found = self._find(item_id)
        if found is None:
            raise item.error(
                "id", f"{shown(item_id)} is not kept here, or not any more; send the item itself"
            )
        return Fields(found, item.path)

    def end_turn(self) -> None:
        """What the model said is over."""
        if self._turn is not None:
            self._messages.append(self._turn)
            self._turn = None

    def _open_turn(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": []}
        return self._turn

    def _add_message(self, item: Fields) -> None:
        role = item.choice("role", ("user", "assistant", "system", "developer"))
        text = _read_content(item, "content", self._is_last)
        if role == "assistant":
            self._open_turn()["content"].append(text)
            return
        self.end_turn()
        last = self._messages[-1] if self._messages else None
        if role == "user":
            self._messages.append({"role": "user", "content": [text]})
        elif last is None:
            self._messages.append({"role": "system", "content": [text]})
        elif last["role"] == "system":
            last["content"] += ["\n\n", text]
        else:
            # Few templates know a system's message in the middle.
            content = f"<system-reminder>\n{text}\n</system-reminder>"
            self._messages.append({"role": "user", "content": [content]})

    def _add_call(self, item: Fields) -> None:
        text, name, call_id = item.text("arguments"), item.text("name"), item.text("call_id")
        self._names[call_id] = name
        turn = self._open_turn()
        function = {"name": name, "arguments": arguments_of(text)}
        call = {"id": call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)

    def _add_output(self, item: Fields) -> None:
        call_id = item.text("call_id")
        if call_id not in self._names:
            raise item.error("call_id", f"is {shown(call_id)}, and no function_call has that id")
        self.end_turn()
        self._messages.append(
            {
                "role": "tool",
                "tool_call_id": call_id,
                "name": self._names[call_id],
                "content": [_read_content(item, "output", self._is_last)],
            }
        )

    def _add_reasoning(self, item: Fields) -> None:
        turn = self._turn
        if turn is not None and (any(turn["content"]) or "tool_calls" in turn):
            self.end_turn()  # Reasoning comes first.
        texts = [each.text("text") for each in item.children("content", ())]
        if not texts:
            texts = [_opened(item.text("encrypted_content", "") or "")]
        item.accept("summary", "encrypted_content")
        text = "\n".join(filter(None, texts))
        if text:
            self._open_turn()["reasoning_content"] = text


def _read_content(fields: Fields, name: str, is_last: bool) -> str:
    """A text, or a list of parts whose texts are joined."""
    if isinstance(fields.raw(name), str):
        return fields.text(name)
    return "".join(_read_part(part, is_last) for part in fields.children(name))


def _read_part(fields: Fields, is_last: bool) -> str:
    kind = fields.text("type")
    if kind in _OTHER_PARTS and not is_last:
        return left_out_text(_OTHER_PARTS[kind])
    if kind in _OTHER_PARTS:
        raise fields.error(
            "type", f"is {kind!r}, and models are text-only here: no {_OTHER_PARTS[kind]}"
        )
    if kind not in ("input_text", "output_text", "text", "refusal"):
        raise fields.error("type", f"must be 'input_text' or 'output_text', got {shown(kind)}")
    text = fields.text("refusal" if kind == "refusal" else "text")
    fields.leave_out_rest()
    return text


def sealed(reasoning: str) -> str:
    """Reasoning as ``encrypted_content``. It is no secret: the client sees it in any case."""
    return _SEAL + base64.b64encode(reasoning.encode(errors="replace")).decode()


def _opened(text: str) -> str:
    """The reasoning in an ``encrypted_content``; nothing if it is another server's."""
    if not text.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(text[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
