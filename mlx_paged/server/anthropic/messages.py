"""The body of Anthropic's ``/v1/messages`` as a :class:`ChatJob`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mlx_paged.errors import ArgumentError, shown
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server.answers.reader import ToolChoice
from mlx_paged.server.chat_jobs import ChatJob, left_out_text
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fields import Fields
from mlx_paged.server.generations import api_error
from mlx_paged.server.openai.messages import refuse_second_names
from mlx_paged.server.openai.options import read_model
from mlx_paged.server.sampling_fields import MAX_STOPS, MAX_STOPS_LEN
from mlx_paged.server.service import Service
from mlx_paged.structured_outputs import StructuredOutputsParams

# They say whose request it is, how soon it should be answered, or what is cached, which everything
# is; or they let Anthropic's servers shorten a conversation, which is not done here, and the answer
# says so.
_WITHOUT_EFFECT = (
    "metadata",
    "cache_control",
    "service_tier",
    "inference_geo",
    "speed",
    "diagnostics",
    "context_management",
    "compaction",
    "billing_policy",
    "fallbacks",
    "fallback_credit_token",
    "user_profile_id",
    "workspace_id",
    "betas",
    "anthropic_beta",
    "anthropic_version",
)
_ADVICE = {
    "container": "containers run on Anthropic's servers; leave it out",
    "mcp_servers": "give the servers' tools as tools, and call them yourself",
    "max_tokens_to_sample": "send max_tokens",
    "prompt": "send messages",
}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
# Claude Code's note for Anthropic's accounting. It is no text for a model, and it changes with each
# request, so that no prompt would begin like the one before.
_BILLING = "x-anthropic-billing-header:"
_OTHER_BLOCKS = {
    "image": ("images", ""),
    "document": ("documents", "; send their text"),
    "search_result": ("search results", "; send their text"),
    "container_upload": ("files", "; send their text"),
    "tool_reference": ("references to tools", "; send the tools themselves"),
}


@dataclass(frozen=True)
class MessagesBody:
    """A body, read.

    Args:
        shows_thinking: whether the answer shows the text of its reasoning.
        left_out: fields that nobody here knows, and that the client's betas allow.
    """

    job: ChatJob
    model: str
    is_streamed: bool = False
    shows_thinking: bool = True
    left_out: tuple[str, ...] = ()


def read_messages_body(
    fields: Fields, service: Service, *, has_betas: bool = False, is_count: bool = False
) -> MessagesBody:
    """Everything that the body says.

    Args:
        has_betas: the request has the header ``anthropic-beta``: it may hold optional fields that
            are newer than this server.
        is_count: the tokens of the prompt are to be counted, so that nothing is said of an answer.

    Raises:
        ApiError: the first thing that is wrong, and every field that can't be honoured, by name.
    """
    if fields.has("thread"):
        # By this code Anthropic's clients know that they have to send the conversation.
        text, code = "thread is not supported; send all messages", "thread_unsupported_request"
        raise ApiError(400, text, param="thread", code=code)
    model = read_model(fields, service)
    tools = tuple(_read_tool(each) for each in fields.children("tools", ()))
    choice, is_parallel = _read_tool_choice(fields, tools)
    options, shows_thinking, budget = _read_thinking(fields, service, has_betas)
    params, effort = _read_params(fields, service, is_count, budget)
    if effort is not None:
        options["reasoning_effort"] = effort
    messages = [*_read_system(fields), *_read_messages(fields)]
    if messages[-1]["role"] == "assistant":
        # The answer goes on from it.
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    body = MessagesBody(
        ChatJob(
            messages,
            params,
            tools,
            choice,
            is_parallel,
            options,
            fields.integer("priority", 0),
            fields.text("cache_salt", None) or None,
            fields.boolean("no_store", False),
        ),
        model,
        fields.boolean("stream", False),
        shows_thinking,
    )
    fields.accept(*_WITHOUT_EFFECT)
    fields.only("mcp_servers", [])
    if has_betas:
        # What is known and can't be had is refused all the same.
        unknown = fields.unread() - _ADVICE.keys()
        fields.accept(*unknown)
        body = replace(body, left_out=tuple(sorted(unknown)))
    fields.refuse_rest(_ADVICE)
    return body


def _read_params(
    fields: Fields, service: Service, is_count: bool, thinking_budget: int | None
) -> tuple[SamplingParams, str | None]:
    """How the answer is sampled, and with how much effort."""
    names = ("temperature", "top_p", "top_k")
    values: dict[str, Any] = {name: fields.raw(name) for name in names if fields.has(name)}
    if not is_count or fields.has("max_tokens"):
        values["max_tokens"] = fields.integer("max_tokens")
        if values["max_tokens"] < 1:
            raise fields.error("max_tokens", f"must be at least 1, got {values['max_tokens']}")
    if fields.has("stop_sequences"):
        values["stop"] = fields.texts("stop_sequences", MAX_STOPS, MAX_STOPS_LEN)
    if thinking_budget is not None:
        values["thinking_token_budget"] = thinking_budget
    effort, schema = _read_output_config(fields)
    try:
        if schema is not None:
            values["structured_outputs"] = StructuredOutputsParams(json=schema)
        return service.default_params.clone(**values), effort
    except ArgumentError as error:
        raise api_error(error) from error


def _read_output_config(fields: Fields) -> tuple[str | None, dict[str, Any] | None]:
    """The effort, and the schema of the answer."""
    effort = schema = None
    config = fields.child("output_config", None)
    if config is not None:
        effort = config.choice("effort", _EFFORTS, None)
        schema = _read_format(config, "format")
        config.accept("task_budget")
        config.refuse_rest()
    other = _read_format(fields, "output_format")
    return effort, other if schema is None else schema


def _read_format(fields: Fields, name: str) -> dict[str, Any] | None:
    answer_format = fields.child(name, None)
    if answer_format is None:
        return None
    answer_format.choice("type", ("json_schema",))
    answer_format.child("schema")
    schema: dict[str, Any] = answer_format.raw("schema")
    answer_format.refuse_rest()
    return schema


def _read_thinking(
    fields: Fields, service: Service, has_betas: bool
) -> tuple[dict[str, Any], bool, int | None]:
    """Variables of the template, whether the answer shows reasoning, and how many tokens of it
    there may be.

    Without ``thinking`` there is none, as in the protocol, unless the server was told otherwise.
    """
    if not fields.has("thinking"):
        default = service.template_options.get("enable_thinking", False)
        return {"enable_thinking": default}, True, None
    thinking = fields.child("thinking")
    kind = thinking.choice("type", ("enabled", "disabled", "adaptive", "between_tools"))
    budget = thinking.integer("budget_tokens", None)
    display = thinking.choice("display", ("summarized", "omitted", "full"), "full")
    if has_betas:
        thinking.leave_out_rest()
    thinking.refuse_rest()
    return {"enable_thinking": kind != "disabled"}, display != "omitted", budget


# Tools


def _read_tool(fields: Fields) -> dict[str, Any]:
    """A tool as templates take it, which is OpenAI's way."""
    kind = fields.text("type", "custom")
    if kind != "custom":
        raise fields.error(
            "type",
            f"is {shown(kind)}, which is Anthropic's own tool; describe it as a custom tool with "
            "an input_schema",
        )
    name = fields.filled_text("name")
    fields.child("input_schema")
    function: dict[str, Any] = {"name": name, "parameters": fields.raw("input_schema")}
    description = fields.text("description", None)
    if description is not None:
        function = {"name": name, "description": description, **function}
    if fields.boolean("strict", False):
        function["strict"] = True
    fields.leave_out_rest()
    return {"type": "function", "function": function}


def _read_tool_choice(fields: Fields, tools: tuple[dict[str, Any], ...]) -> tuple[ToolChoice, bool]:
    """Which tool may or must be called, and whether several may be."""
    names = [tool["function"]["name"] for tool in tools]
    refuse_second_names(fields, names)
    choice = fields.child("tool_choice", None)
    if choice is None:
        return "auto", True
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    wanted: ToolChoice = {"any": "required"}.get(kind, kind)
    if kind == "tool":
        wanted = choice.text("name")
        if wanted not in names:
            raise choice.error("name", f"is {shown(wanted)}, and no tool has that name")
        if wanted in ("none", "auto", "required"):
            raise choice.error("name", f"is {wanted!r}, which is no name for a tool here")
    elif kind == "any" and not tools:
        raise fields.error("tool_choice", "is 'any', and there are no tools; send some")
    is_parallel = not choice.boolean("disable_parallel_tool_use", False)
    choice.accept("name")
    choice.refuse_rest()
    return wanted, is_parallel


# Messages


def _read_system(fields: Fields) -> list[dict[str, Any]]:
    if not fields.has("system"):
        return []
    texts = [text for text in _read_texts(fields, "system") if not text.startswith(_BILLING)]
    text = "\n\n".join(texts)
    return [{"role": "system", "content": text}] if text else []


def _read_texts(fields: Fields, name: str, is_last: bool = True) -> list[str]:
    """The texts of a field that is one, or a list of blocks that have one each."""
    if isinstance(fields.raw(name), str):
        return [fields.text(name)]
    texts = []
    for block in fields.children(name):
        kind = _read_kind(block, ("text",), is_last)
        texts.append(_text_of(block, kind))
        block.leave_out_rest()
    return texts


def _read_kind(block: Fields, kinds: tuple[str, ...], is_last: bool) -> str:
    """One of these kinds, or, in a message that is not the last, one that is no text."""
    kind = block.text("type")
    if kind in _OTHER_BLOCKS:
        what, way_out = _OTHER_BLOCKS[kind]
        if is_last:
            text = f"is {kind!r}, and models are text-only here: no {what}{way_out}"
            raise block.error("type", text)
    elif kind not in kinds:
        raise block.error("type", f"must be {' or '.join(map(repr, kinds))}, got {shown(kind)}")
    return kind


def _text_of(block: Fields, kind: str) -> str:
    if kind not in _OTHER_BLOCKS:
        return block.text("text")
    what, _ = _OTHER_BLOCKS[kind]
    return left_out_text(what)


def _read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation; what one side says in several messages becomes one.

    A content is the list of its texts until all of them are there: to join them one by one would
    take the square of their number.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the tools, by the ids of their calls
    children = list(fields.children("messages"))
    for each in children:
        is_last = each is children[-1]
        role = each.choice("role", ("user", "assistant", "system", "ctx", "msg"))
        if role == "assistant":
            new = [_read_answer(each, names, is_last)]
        elif role in ("user", "msg"):
            new = _read_question(each, names, is_last)
        else:
            # Few templates know a system's message in the middle.
            text = "\n\n".join(_read_texts(each, "content", is_last))
            text = f"<system-reminder>\n{text}\n</system-reminder>"
            new = [{"role": "user", "content": [text]}]
        each.leave_out_rest()
        for message in new:
            _append(messages, message)
    if not messages:
        raise fields.error("messages", "is empty; give at least one message")
    for message in messages:
        message["content"] = "\n\n".join(filter(None, message["content"]))
    return messages


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    last: dict[str, Any] = messages[-1] if messages else {"role": None}
    if message["role"] != last["role"] or message["role"] == "tool":
        messages.append(message)
        return
    last["content"] += message["content"]
    if "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
    if "reasoning_content" in message:
        last["reasoning_content"] = message["reasoning_content"]


def _read_question(fields: Fields, names: dict[str, str], is_last: bool) -> list[dict[str, Any]]:
    """What the user says, and results of tools, in their order."""
    if isinstance(fields.raw("content"), str):
        return [{"role": "user", "content": [fields.text("content")]}]
    messages: list[dict[str, Any]] = []
    for block in fields.children("content"):
        kind = _read_kind(block, ("text", "tool_result"), is_last)
        if kind == "tool_result":
            messages.append(_read_result(block, names, is_last))
        else:
            _append(messages, {"role": "user", "content": [_text_of(block, kind)]})
        block.leave_out_rest()
    return messages or [{"role": "user", "content": []}]


def _read_result(block: Fields, names: dict[str, str], is_last: bool) -> dict[str, Any]:
    call_id = block.text("tool_use_id")
    if call_id not in names:
        raise block.error("tool_use_id", f"is {shown(call_id)}, and no tool_use has that id")
    texts = _read_texts(block, "content", is_last) if block.has("content") else ()
    text = "\n".join(texts)
    if block.boolean("is_error", False) and "error" not in text[:40].lower():
        # Templates have no word for it.
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": [text]}


def _read_answer(fields: Fields, names: dict[str, str], is_last: bool) -> dict[str, Any]:
    """What the model said."""
    if isinstance(fields.raw("content"), str):
        return {"role": "assistant", "content": [fields.text("content")]}
    texts, reasoning, calls = [], [], []
    for block in fields.children("content"):
        kinds = ("text", "thinking", "redacted_thinking", "tool_use")
        kind = _read_kind(block, kinds, is_last)
        if kind == "thinking":
            reasoning.append(block.text("thinking"))
            block.accept("signature")
        elif kind == "redacted_thinking":
            block.accept("data")  # is Anthropic's, and says nothing here
        elif kind == "tool_use":
            calls.append(_read_call(block))
            names[calls[-1]["id"]] = calls[-1]["function"]["name"]
        else:
            texts.append(_text_of(block, kind))
        block.leave_out_rest()
    message: dict[str, Any] = {"role": "assistant", "content": ["".join(texts)]}
    if any(reasoning):
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_call(block: Fields) -> dict[str, Any]:
    block.child("input")
    function = {"name": block.text("name"), "arguments": block.raw("input")}
    return {"id": block.text("id"), "type": "function", "function": function}
