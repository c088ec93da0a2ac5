"""Anthropic's ``POST /v1/messages`` and ``/v1/messages/count_tokens``: answers as one object or as
events, in blocks of thinking, text and tool use.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response

from mlx_paged.request import RequestOutput
from mlx_paged.server.anthropic.messages import (
    AnyRequest,
    CountRequest,
    MessagesRequest,
    read_messages_body,
)
from mlx_paged.server.chat_jobs import object_of
from mlx_paged.server.generations import (
    Answer,
    AnswerBlock,
    BlockEvent,
    CompletionState,
    Generation,
    parts_of,
)
from mlx_paged.server.http.sse import event
from mlx_paged.server.routes import Renderer, RequestContext

C = TypeVar("C", bound=AnyRequest)


async def messages(context: RequestContext[MessagesRequest]) -> Response:
    """The answer to a conversation, as one object or as events."""
    return await context.respond(MessageRenderer(context, *await _prepare(context)))


async def count_tokens(context: RequestContext[CountRequest]) -> Response:
    """How many tokens the prompt of a conversation has."""
    _, generation = await _prepare(context)
    return JSONResponse({"input_tokens": len(generation.prompt_token_ids)})


async def _prepare(context: RequestContext[C]) -> tuple[C, Generation]:
    # Betas may add fields that are unknown here.
    has_betas = "anthropic-beta" in context.request.headers
    return await context.prepare_chat(read_messages_body, leaves_out=has_betas)


class MessageRenderer(Renderer[MessagesRequest]):
    """Renders an answer."""

    @property
    def _shows_thinking(self) -> bool:
        """Whether thinking blocks have a text."""
        thinking = self.body.thinking
        return thinking is None or thinking.display != "omitted"

    def whole(self, *outputs: RequestOutput) -> dict[str, Any]:
        [output] = outputs
        [(completion, part)] = self.states[0].parts(output)
        completion.read(part)
        content = [self._block(block, is_whole=True) for block in completion.blocks]
        has_calls = any(block["type"] == "tool_use" for block in content)
        return {
            **self._start(),
            "content": content or [{"type": "text", "text": ""}],
            **self._end(completion, has_calls),
        }

    async def events(self, *answers: Answer) -> AsyncGenerator[bytes, None]:
        """The events of a stream: the message's start, its blocks one after another, its end."""
        async for _, output in parts_of(answers):
            for completion, part in self.states[0].parts(output):
                events = completion.read(part)
                if completion.num_parts == 1:
                    yield event({"type": "message_start", "message": self._start()})
                    yield event({"type": "ping"})
                for each in events:
                    for data in self._block_events(each):
                        yield event(data)
                if completion.finish_reason is not None:
                    has_calls = any(block.call is not None for block in completion.blocks)
                    end = {"type": "message_delta", "delta": self._end(completion, has_calls)}
                    yield event({**end, "usage": self._usage()})
        yield event({"type": "message_stop"})

    def _start(self) -> dict[str, Any]:
        """The message without its content."""
        message: dict[str, Any] = {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        if self.body.context_management is not None:
            message["context_management"] = {"applied_edits": []}
        return message

    def _end(self, completion: CompletionState, has_calls: bool) -> dict[str, Any]:
        """The fields that say why the answer ended."""
        stop, most = completion.part.stop_reason, self.params.max_tokens
        reason = "tool_use" if has_calls else "end_turn"
        if completion.finish_reason == "length":
            is_own_limit = most is not None and completion.num_tokens >= most
            reason = "max_tokens" if is_own_limit else "model_context_window_exceeded"
        elif isinstance(stop, str) and stop in self.params.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """The usage so far. Everything is cached, so no tokens count as cache creation."""
        usage = self.states[0].usage
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": usage.output_details("thinking_tokens"),
            "service_tier": "standard",
        }

    def _block_events(self, each: BlockEvent) -> Iterator[dict[str, Any]]:
        block = each.block
        place = {"index": block.index}
        if each.what == "start":
            new = self._block(block, is_whole=False)
            yield {"type": "content_block_start", **place, "content_block": new}
            return
        if each.what == "end":
            if block.kind == "reasoning":
                delta = {"type": "signature_delta", "signature": signature_of(block.text)}
                yield {"type": "content_block_delta", **place, "delta": delta}
            yield {"type": "content_block_stop", **place}
        elif block.kind != "reasoning" or self._shows_thinking:
            kind, name = _DELTAS[block.kind]
            yield {"type": "content_block_delta", **place, "delta": {"type": kind, name: each.text}}

    def _block(self, block: AnswerBlock, is_whole: bool) -> dict[str, Any]:
        """A whole block, or its beginning without a text."""
        text = block.text if is_whole else ""
        if block.call is not None:
            arguments = object_of(text) if is_whole else {}
            if arguments is None:
                # Python reads no integer of more than 4,300 digits.
                return {"type": "text", "text": f"{block.call.name} {text}"}
            call = {"id": block.call.call_id, "name": block.call.name, "input": arguments}
            return {"type": "tool_use", **call}
        if block.kind == "reasoning":
            signature = signature_of(text) if is_whole else ""
            shown = text if self._shows_thinking else ""
            return {"type": "thinking", "thinking": shown, "signature": signature}
        return {"type": "text", "text": text}


# The type of a delta and the field with its text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def signature_of(thinking: str) -> str:
    """A signature for a thinking block, which clients send back. The server ignores it."""
    return hashlib.blake2b(thinking.encode(errors="replace"), digest_size=16).hexdigest()
