"""Answers in Anthropic's protocol: blocks of thinking, text and calls, whole or as events."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mlx_paged.request import CompletionOutput, RequestOutput
from mlx_paged.server.answers.reader import (
    AnswerFormat,
    Event,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)
from mlx_paged.server.answers.reasoning_tokens import ReasoningTokens
from mlx_paged.server.errors import ApiError
from mlx_paged.server.generations import Answer, check_end
from mlx_paged.server.http.sse import event
from mlx_paged.server.service import Service


@dataclass(frozen=True)
class MessageOptions:
    """What the events of an answer depend on.

    Args:
        max_tokens: that the request allows.
        shows_thinking: whether blocks of thinking have their text.
    """

    message_id: str
    model: str
    max_tokens: int | None
    stop_sequences: tuple[str, ...]
    shows_thinking: bool
    has_context_management: bool = False


class MessageAnswer:
    """An answer, as far as it has come."""

    def __init__(self, service: Service, answer_format: AnswerFormat, options: MessageOptions):
        self._options = options
        self._reader = answer_format.reader()
        self._reasoning_tokens = ReasoningTokens.of(service.tokenizer, answer_format)
        self._num_prompt_tokens = self._num_cached_tokens = self._num_tokens = 0
        self._last: CompletionOutput | None = None

    def add(self, output: RequestOutput) -> list[Event]:
        """What the next part says."""
        check_end(output)
        [completion] = output.outputs
        self._num_prompt_tokens = len(output.prompt_token_ids)
        self._num_cached_tokens = output.num_cached_tokens
        self._num_tokens += len(completion.token_ids)
        self._reasoning_tokens.add(completion.token_ids)
        self._last = completion
        return self._reader.read(completion)

    def start(self) -> dict[str, Any]:
        """The message before anything of it came."""
        message: dict[str, Any] = {
            "id": self._options.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._options.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(),
        }
        if self._options.has_context_management:
            message["context_management"] = {"applied_edits": []}
        return message

    def end(self, has_calls: bool) -> dict[str, Any]:
        """Why it ended."""
        last = self._last
        assert last is not None
        sequence = last.stop_reason if isinstance(last.stop_reason, str) else None
        reason = "tool_use" if has_calls else "end_turn"
        if last.finish_reason == "length":
            reason = "max_tokens"
            if self._options.max_tokens is None or self._num_tokens < self._options.max_tokens:
                reason = "model_context_window_exceeded"
        elif sequence in self._options.stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        return {"stop_reason": reason, "stop_sequence": None}

    def usage(self) -> dict[str, Any]:
        """The tokens so far. All of a prompt is cached, and nobody pays for it."""
        return {
            "input_tokens": self._num_prompt_tokens - self._num_cached_tokens,
            "cache_read_input_tokens": self._num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"thinking_tokens": self._reasoning_tokens.count},
            "service_tier": "standard",
        }

    @property
    def shows_thinking(self) -> bool:
        return self._options.shows_thinking


def whole_message(answer: MessageAnswer, output: RequestOutput) -> dict[str, Any]:
    """The answer as one object."""
    blocks: list[dict[str, Any]] = []
    for each in answer.add(output):
        is_call = isinstance(each, ToolCallStart)
        if is_call or not blocks or _delta_kind(each) != _KINDS[blocks[-1]["type"]]:
            blocks.append(_new_block(each))
        if not isinstance(each, ToolCallStart):
            block = blocks[-1]
            block[_FIELDS[block["type"]]] += each.text
    content = [_whole_block(block, answer.shows_thinking) for block in blocks]
    has_calls = any(block["type"] == "tool_use" for block in content)
    return {
        **answer.start(),
        "content": content or [{"type": "text", "text": ""}],
        **answer.end(has_calls),
    }


async def message_events(answer: MessageAnswer, parts: Answer) -> AsyncGenerator[bytes, None]:
    """The events of a stream: the message's start, its blocks one after another, and its end."""
    blocks = _BlockEvents(answer.shows_thinking)
    is_first = True
    async for part in parts:
        new = answer.add(part)
        if is_first:
            is_first = False
            yield _named({"type": "message_start", "message": answer.start()})
            yield _named({"type": "ping"})
        for each in blocks.add(new):
            yield _named(each)
    for each in blocks.finish():
        yield _named(each)
    end = {"type": "message_delta", "delta": answer.end(blocks.num_calls > 0)}
    yield _named({**end, "usage": answer.usage()})
    yield _named({"type": "message_stop"})


class _BlockEvents:
    """The events of the blocks of a message.

    Attributes:
        num_calls: blocks that are calls of tools.
    """

    def __init__(self, shows_thinking: bool):
        self.num_calls = 0
        self._shows_thinking = shows_thinking
        self._index = -1
        self._block: dict[str, Any] | None = None  # the open one, with its text so far

    def add(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        for each in events:
            is_call = isinstance(each, ToolCallStart)
            block = self._block
            if is_call or block is None or _KINDS[block["type"]] != _delta_kind(each):
                yield from self.finish()
                yield self._start(each)
            if isinstance(each, ToolCallArguments) and not each.is_json:
                # Clients that read along would fail with less clear words.
                raise ApiError(500, "the model called a tool with arguments that are no JSON")
            if not isinstance(each, ToolCallStart) and each.text:
                yield from self._delta(_delta_kind(each), each.text)

    def finish(self) -> Iterator[dict[str, Any]]:
        """End the open block."""
        block, self._block = self._block, None
        if block is None:
            return
        if block["type"] == "thinking":
            delta = {"type": "signature_delta", "signature": signature_of(block["thinking"])}
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}
        yield {"type": "content_block_stop", "index": self._index}

    def _start(self, each: Event) -> dict[str, Any]:
        self._index += 1
        self._block = _new_block(each)
        self.num_calls += self._block["type"] == "tool_use"
        shown = {**self._block, "input": {}} if "input" in self._block else {**self._block}
        return {"type": "content_block_start", "index": self._index, "content_block": shown}

    def _delta(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        assert self._block is not None
        self._block[_FIELDS[self._block["type"]]] += text
        if kind != "thinking_delta" or self._shows_thinking:
            delta = {"type": kind, _DELTA_FIELDS[kind]: text}
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}


_KINDS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "input"}
_DELTA_FIELDS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
}


def _delta_kind(each: Event) -> str:
    if isinstance(each, Reasoning):
        return "thinking_delta"
    return "text_delta" if isinstance(each, Text) else "input_json_delta"


def _new_block(each: Event) -> dict[str, Any]:
    """A block without its text; the input of a call is JSON text until it is whole."""
    if isinstance(each, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    if isinstance(each, Text):
        return {"type": "text", "text": ""}
    assert isinstance(each, ToolCallStart)
    return {"type": "tool_use", "id": each.call_id, "name": each.name, "input": ""}


def _whole_block(block: dict[str, Any], shows_thinking: bool) -> dict[str, Any]:
    if block["type"] == "thinking":
        text = block["thinking"] if shows_thinking else ""
        return {**block, "thinking": text, "signature": signature_of(block["thinking"])}
    if block["type"] != "tool_use":
        return block
    if not _is_object(block["input"]):
        # Broken off, or no JSON: no input, so no call.
        return {"type": "text", "text": f"{block['name']} {block['input']}"}
    return {**block, "input": json.loads(block["input"])}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def signature_of(thinking: str) -> str:
    """What clients send back with a block of thinking. Nothing here depends on it."""
    return hashlib.blake2b(thinking.encode(errors="replace"), digest_size=16).hexdigest()


def _named(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])
