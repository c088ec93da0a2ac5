"""Answers of OpenAI's ``/v1/responses``: items of reasoning, text and calls, whole or as events."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from mlx_paged.request import CompletionOutput, RequestOutput
from mlx_paged.server.answers.reader import AnswerFormat, Event, Reasoning, Text, ToolCallStart
from mlx_paged.server.answers.reasoning_tokens import ReasoningTokens
from mlx_paged.server.errors import ApiError
from mlx_paged.server.generations import Answer, check_end
from mlx_paged.server.http.sse import event, responses_error
from mlx_paged.server.openai.logprobs import TokenNames, chat_logprobs
from mlx_paged.server.responses.body import ResponsesBody, sealed
from mlx_paged.server.service import Service


class ResponseAnswer:
    """A response, as far as it has come.

    Args:
        request_id: the response's and the items' ids are made of it.
        owner: may refer to the items later.
    """

    def __init__(
        self,
        service: Service,
        body: ResponsesBody,
        answer_format: AnswerFormat,
        request_id: str,
        owner: str | None = None,
    ):
        self._body = body
        self._id = f"resp_{request_id}"
        self._created = int(time.time())
        self._reader = answer_format.reader()
        self._reasoning_tokens = ReasoningTokens.of(service.tokenizer, answer_format)
        self._names = TokenNames(service.token_texts, False)
        self._num_prompt_tokens = self._num_cached_tokens = self._num_tokens = 0
        self._last: CompletionOutput | None = None
        self.items = _Items(request_id, body.has_sealed_reasoning, body.namespaces)
        self._keep = partial(service.kept_items.keep, owner)

    def add(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events that the next part makes."""
        check_end(output)
        [completion] = output.outputs
        self._num_prompt_tokens = len(output.prompt_token_ids)
        self._num_cached_tokens = output.num_cached_tokens
        self._num_tokens += len(completion.token_ids)
        self._reasoning_tokens.add(completion.token_ids)
        self._last = completion
        yield from self.items.add(self._reader.read(completion), self._logprobs_of(completion))
        if completion.finish_reason is not None:
            yield from self.items.finish(completion.finish_reason == "length")
            self._keep(self.items.done)

    def _logprobs_of(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        number = self._body.num_top_logprobs
        if number is None:
            return []
        entries: list[dict[str, Any]] = chat_logprobs(
            self._names, completion.token_ids, completion.logprobs or [], number
        )["content"]
        return entries

    def response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """The response as an object."""
        is_over = status != "in_progress"
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error and {"code": "server_error", "message": error.message},
            "incomplete_details": details,
            "model": self._body.model,
            "output": self.items.done if is_over else [],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": None,
            **self._body.echo,
        }

    @property
    def status(self) -> str:
        """How it ended."""
        is_cut = self._last is not None and self._last.finish_reason == "length"
        return "incomplete" if is_cut else "completed"

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self._num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens.count},
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
        }


def whole_response(answer: ResponseAnswer, output: RequestOutput) -> dict[str, Any]:
    """The answer as one object."""
    for _ in answer.add(output):
        pass
    return answer.response(answer.status)


async def response_events(answer: ResponseAnswer, parts: Answer) -> AsyncGenerator[bytes, None]:
    """The events of a stream, numbered from 0: the response begins, each item from its beginning to
    its end, and the response as a whole.

    One that fails ends with ``response.failed``, which has what came of it, and ``error``: OpenAI's
    clients raise for that one alone.
    """
    numbers = itertools.count()

    def numbered(data: dict[str, Any]) -> bytes:
        return event({**data, "sequence_number": next(numbers)}, data["type"])

    for kind in ("created", "in_progress"):
        response = answer.response("in_progress")
        yield numbered({"type": f"response.{kind}", "response": response})
    try:
        async for part in parts:
            for each in answer.add(part):
                yield numbered(each)
    except ApiError as error:
        yield numbered({"type": "response.failed", "response": answer.response("failed", error)})
        yield numbered(responses_error(error))
        return
    status = answer.status
    yield numbered({"type": f"response.{status}", "response": answer.response(status)})


class _Items:
    """The items of a response.

    Attributes:
        done: those that are whole.
    """

    def __init__(self, request_id: str, has_sealed_reasoning: bool, namespaces: Mapping[str, str]):
        self.done: list[dict[str, Any]] = []
        self._request_id = request_id
        self._has_sealed_reasoning = has_sealed_reasoning
        self._namespaces = namespaces
        self._item: dict[str, Any] | None = None  # the open one
        self._text = ""  # of it
        self._logprobs: list[dict[str, Any]] = []  # of it
        self._pending: list[dict[str, Any]] = []  # of tokens whose text did not come yet

    def add(
        self, events: Iterable[Event], logprobs: list[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        self._pending += logprobs
        for each in events:
            kind = _kind_of(each)
            if isinstance(each, ToolCallStart) or self._item is None or self._item["type"] != kind:
                yield from self.finish(False)
                yield from self._begin(each)
            if not isinstance(each, ToolCallStart) and each.text:
                yield self._delta(kind, each.text)

    def finish(self, is_broken_off: bool) -> Iterator[dict[str, Any]]:
        """End the open item."""
        item, text = self._item, self._text
        if item is None:
            return
        place = self._place(item)
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            yield {"type": "response.function_call_arguments.done", **place, **done}
        else:
            part = self._part(item["type"], text)
            place["content_index"] = 0
            name = _NAMES[item["type"]]
            logprobs = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            yield {"type": f"response.{name}.done", **place, "text": text, **logprobs}
            yield {"type": "response.content_part.done", **place, "part": part}
            item["content"] = [part]
        if item["type"] == "reasoning":
            if self._has_sealed_reasoning:
                item["encrypted_content"] = sealed(text)
        else:
            item["status"] = "incomplete" if is_broken_off else "completed"
        self.done.append(item)
        self._item = None
        index = place["output_index"]
        yield {"type": "response.output_item.done", "output_index": index, "item": {**item}}

    def _begin(self, each: Event) -> Iterator[dict[str, Any]]:
        index = len(self.done)
        kind = _kind_of(each)
        item: dict[str, Any] = {"id": f"{_PREFIXES[kind]}_{self._request_id}_{index}", "type": kind}
        if isinstance(each, ToolCallStart):
            item |= {"call_id": each.call_id, "name": each.name, "arguments": ""}
            if each.name in self._namespaces:
                item["namespace"] = self._namespaces[each.name]
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        if kind != "reasoning":
            item["status"] = "in_progress"
        self._item, self._text, self._logprobs = item, "", []
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item}}
        if kind != "function_call":
            part = {"content_index": 0, "part": self._part(kind, "")}
            yield {"type": "response.content_part.added", **self._place(item), **part}

    def _delta(self, kind: str, text: str) -> dict[str, Any]:
        assert self._item is not None
        self._text += text
        delta = {"type": f"response.{_NAMES[kind]}.delta", **self._place(self._item), "delta": text}
        if kind != "function_call":
            delta["content_index"] = 0
        found, self._pending = _found_in(self._pending, text)
        if kind == "message":
            delta["logprobs"] = found
            self._logprobs += found
        return delta

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.done)}

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}


_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_NAMES = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
}


def _kind_of(each: Event) -> str:
    if isinstance(each, Reasoning):
        return "reasoning"
    return "message" if isinstance(each, Text) else "function_call"


def _found_in(
    logprobs: list[dict[str, Any]], text: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The entries whose tokens make up a text, and those that follow. Before them may be tokens of
    marks. A text that the tokens do not have (arguments that were put right) has no entries.
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
