"""OpenAI's ``/v1/responses``, without storage: answers as one object or as events, in items of
reasoning, text and calls.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any, NoReturn

from starlette.responses import Response

from mlx_paged.request import RequestOutput
from mlx_paged.server.errors import RESPONSES, ApiError, not_stored
from mlx_paged.server.generations import (
    Answer,
    AnswerBlock,
    BlockEvent,
    Generation,
    parts_of,
)
from mlx_paged.server.http.sse import event
from mlx_paged.server.openai.answers import TokenNames, chat_logprobs
from mlx_paged.server.responses.body import ResponsesRequest, read_responses_body, seal
from mlx_paged.server.routes import Renderer, RequestContext
from mlx_paged.server.schemas import Body

# For each kind of block: the type of its item, the prefix of its id, and the name of its events.
_TYPES = {
    "reasoning": ("reasoning", "rs", "reasoning_text"),
    "text": ("message", "msg", "output_text"),
    "call": ("function_call", "fc", "function_call_arguments"),
}


async def responses(context: RequestContext[ResponsesRequest]) -> Response:
    """The answer to a conversation, as one object or as events."""
    read = partial(read_responses_body, owner=context.principal.cache_salt)
    return await context.respond(ResponseRenderer(context, *await context.prepare_chat(read)))


async def stored_response(context: RequestContext[Body]) -> NoReturn:
    """Always 404, since responses are not stored."""
    raise not_stored()


class ResponseRenderer(Renderer[ResponsesRequest]):
    """Renders a response, and keeps its items for later references by the same user."""

    def __init__(
        self,
        context: RequestContext[ResponsesRequest],
        body: ResponsesRequest,
        *generations: Generation,
    ):
        super().__init__(context, body, *generations)
        self._created = int(time.time())
        self._echo = body.echo(self.params)
        self._namespaces = body.namespaces()
        self._status = "completed"
        self._items: list[dict[str, Any]] = []  # finished items
        self._logprobs: list[dict[str, Any]] = []  # of the open block
        self._pending: list[dict[str, Any]] = []  # logprobs of tokens without text so far

    def whole(self, *outputs: RequestOutput) -> dict[str, Any]:
        [output] = outputs
        for _ in self._events_of(output):
            pass
        return self._response(self._status)

    async def events(self, *answers: Answer) -> AsyncGenerator[bytes, None]:
        """The events of a stream, numbered from 0: the beginning of the response, the events of
        each item, and the complete response.

        A failed stream ends with ``response.failed``, which contains the items so far, and
        ``error``, since OpenAI's clients raise only for that.
        """
        numbers = itertools.count()

        def numbered(data: dict[str, Any]) -> bytes:
            return event({**data, "sequence_number": next(numbers)})

        for kind in ("created", "in_progress"):
            response = self._response("in_progress")
            yield numbered({"type": f"response.{kind}", "response": response})
        try:
            async for _, output in parts_of(answers):
                for each in self._events_of(output):
                    yield numbered(each)
        except ApiError as error:
            response = self._response("failed", error)
            yield numbered({"type": "response.failed", "response": response})
            yield numbered(RESPONSES.event(error))
            return
        response = self._response(self._status)
        yield numbered({"type": f"response.{self._status}", "response": response})

    def _events_of(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events for a part of the answer."""
        for completion, part in self.states[0].parts(output):
            events = completion.read(part)
            if self.params.logprobs is not None:
                names = TokenNames(self.context.service.token_texts)
                self._pending += chat_logprobs(names, part, self.params.logprobs)
            if completion.finish_reason == "length":
                self._status = "incomplete"
            for each in events:
                is_last = completion.finish_reason is not None and each is events[-1]
                yield from self._block_events(each, self._status if is_last else "completed")
            if completion.finish_reason is not None:
                owner = self.context.principal.cache_salt
                self.context.service.kept_items.keep(owner, self._items)

    def _response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """The response as an object."""
        is_over = status != "in_progress"
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error and {"code": "server_error", "message": error.message},
            "incomplete_details": details,
            "model": self.model,
            "output": self._items if is_over else [],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": None,
            **self._echo,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.states[0].usage
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": usage.output_details("reasoning_tokens"),
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }

    def _block_events(self, each: BlockEvent, status: str) -> Iterator[dict[str, Any]]:
        """The events for an event of a block; ``status`` is that of an item that ends."""
        block = each.block
        _, prefix, name = _TYPES[block.kind]
        item_id = f"{prefix}_{self.request_id}_{block.index}"
        place = {"item_id": item_id, "output_index": block.index}
        content = {} if block.kind == "call" else {"content_index": 0}
        if each.what == "start":
            self._logprobs = []
            item = self._item(item_id, block, "in_progress")
            yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
            if content:
                added = {**content, "part": self._part(block, "")}
                yield {"type": "response.content_part.added", **place, **added}
        elif each.what == "delta":
            found, self._pending = _found_in(self._pending, each.text)
            delta = {"type": f"response.{name}.delta", **place, "delta": each.text, **content}
            if block.kind == "text":
                delta["logprobs"] = found
                self._logprobs += found
            yield delta
        else:
            item = self._item(item_id, block, status, block.text)
            self._items.append(item)
            if block.kind == "call":
                done = {"name": item["name"], "arguments": item["arguments"]}
                yield {"type": f"response.{name}.done", **place, **done}
            else:
                [part] = item["content"]
                place |= content
                logprobs = {"logprobs": self._logprobs} if block.kind == "text" else {}
                yield {"type": f"response.{name}.done", **place, "text": part["text"], **logprobs}
                yield {"type": "response.content_part.done", **place, "part": part}
            yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _item(
        self, item_id: str, block: AnswerBlock, status: str, text: str | None = None
    ) -> dict[str, Any]:
        """The item for a block; ``text`` is given once the block is complete."""
        item: dict[str, Any] = {"id": item_id, "type": _TYPES[block.kind][0]}
        call = block.call
        if call is not None:
            item |= {"call_id": call.call_id, "name": call.name, "arguments": text or ""}
            if call.name in self._namespaces:
                item["namespace"] = self._namespaces[call.name]
        else:
            name, value = ("summary", []) if block.kind == "reasoning" else ("role", "assistant")
            item[name] = value
            item["content"] = [] if text is None else [self._part(block, text)]
        if block.kind != "reasoning":
            item["status"] = status
        elif text is not None and self.body.has_sealed_reasoning:
            item["encrypted_content"] = seal(text)
        return item

    def _part(self, block: AnswerBlock, text: str) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}


def _found_in(
    logprobs: list[dict[str, Any]], text: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split off the entries whose tokens make up a text, dropping tokens of marks before them. A
    text that does not occur in the tokens, such as corrected arguments, has no entries.

    Returns:
        The entries of the text, and the remaining ones.
    """
    if not logprobs:
        return [], []
    sizes = [len(each["bytes"] or ()) for each in logprobs]
    wanted = text.encode(errors="replace")
    begin = b"".join(bytes(each["bytes"] or ()) for each in logprobs).find(wanted)
    if begin < 0:
        return [], logprobs
    ends = list(itertools.accumulate(sizes))
    first = next(index for index, end in enumerate(ends) if end > begin)
    last = next(index for index, end in enumerate(ends) if end >= begin + len(wanted))
    return logprobs[first : last + 1], logprobs[last + 1 :]
