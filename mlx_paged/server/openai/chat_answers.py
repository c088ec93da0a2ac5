"""Answers of chat: one object, or chunks as the text comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from mlx_paged.request import CompletionOutput, RequestOutput
from mlx_paged.server.answers.events import ToolCallStart
from mlx_paged.server.answers.reader import AnswerFormat
from mlx_paged.server.answers.state import AnswerState, BlockEvent, CompletionState, Kind
from mlx_paged.server.generations import Answer
from mlx_paged.server.http.sse import DONE, event
from mlx_paged.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from mlx_paged.server.openai.options import Options, usage_with_reasoning
from mlx_paged.server.service import Service


class ChatRenderer:
    """Writes the completions of a conversation.

    Args:
        head: what each object begins with.
        answer_format: how the text is read.
        num_top_logprobs: for each token; ``None``: no logprobs.
        has_reasoning: whether reasoning is shown.
    """

    def __init__(
        self,
        service: Service,
        head: Mapping[str, Any],
        options: Options,
        answer_format: AnswerFormat,
        *,
        num_top_logprobs: int | None = None,
        has_reasoning: bool = True,
    ):
        self.options = options
        self._head = head
        self._state = AnswerState(answer_format)
        self._names = TokenNames(service.token_texts, options.has_tokens_as_ids)
        self._num_top_logprobs = num_top_logprobs
        self._has_reasoning = has_reasoning

    def chunks(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The objects of a stream that a part makes: for each completion its role, what comes, and
        its end.
        """
        is_first = not self._state.completions
        for completion, part in self._state.parts(output):
            for choice in self._choices(completion, part):
                chunk = self._chunk(choice)
                if is_first and self.options.has_token_ids:
                    chunk["prompt_token_ids"] = output.prompt_token_ids
                is_first = False
                yield chunk

    def last_chunk(self) -> dict[str, Any]:
        """The object of a stream that has its usage."""
        return {**self._chunk(), "usage": usage_with_reasoning(self._state.usage)}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The answer as one object."""
        choices = []
        for completion, part in self._state.parts(output):
            completion.add(part)
            message = self._message(completion)
            choices.append(
                {
                    "index": completion.index,
                    "message": message,
                    "logprobs": None,
                    **_end(completion),
                    **self._extras(part),
                }
            )
        whole = {
            **self._head,
            "choices": choices,
            "usage": usage_with_reasoning(self._state.usage),
        }
        if output.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(self._names, output.prompt_logprobs)
        if self.options.has_token_ids:
            whole["prompt_token_ids"] = output.prompt_token_ids
        return whole

    def _chunk(self, *choices: Mapping[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        if self.options.has_usage:
            is_wanted = self.options.has_usage_always
            chunk["usage"] = usage_with_reasoning(self._state.usage) if is_wanted else None
        return chunk

    def _choices(
        self, completion: CompletionState, part: CompletionOutput
    ) -> Iterator[dict[str, Any]]:
        index = completion.index
        if not completion.has_begun:
            yield _choice(index, {"role": "assistant", "content": ""})
        deltas = [delta for each in completion.add(part) if (delta := self._delta(each))]
        extras = self._extras(part) if part.token_ids else {}
        if extras and not deltas:
            deltas = [{}]  # They are not lost where a token has no text yet.
        for delta in deltas:
            yield _choice(index, delta, extras)
            extras = {}
        if completion.finish_reason is not None:
            yield _choice(index, {}, _end(completion))

    def _delta(self, each: BlockEvent) -> dict[str, Any]:
        """What an event adds to a message; nothing, where it says nothing here."""
        what, block, text = each
        if what == "end":
            return {}
        if block.call is None:
            return self._text(block.kind, text) if text else {}
        if what == "start":
            return {"tool_calls": [{"index": block.call.index, **_call(block.call)}]}
        return {"tool_calls": [{"index": block.call.index, "function": {"arguments": text}}]}

    def _text(self, kind: Kind, text: str) -> dict[str, Any]:
        if kind == "text":
            return {"content": text}
        # The first name is that of most clients, the second one that of vLLM now.
        return {"reasoning_content": text, "reasoning": text} if self._has_reasoning else {}

    def _message(self, completion: CompletionState) -> dict[str, Any]:
        texts = {
            kind: [block.text for block in completion.blocks if block.kind == kind]
            for kind in ("reasoning", "text")
        }
        calls = [_call(block.call, block.text) for block in completion.blocks if block.call]
        content = "".join(texts["text"])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if texts["reasoning"]:
            message |= self._text("reasoning", "".join(texts["reasoning"]))
        if calls:
            message["tool_calls"] = calls
        return message

    def _extras(self, part: CompletionOutput) -> dict[str, Any]:
        """What was asked for beside the text: logprobs and token ids of a part."""
        extras: dict[str, Any] = {}
        if self._num_top_logprobs is not None:
            extras["logprobs"] = chat_logprobs(
                self._names, part.token_ids, part.logprobs or [], self._num_top_logprobs
            )
        if self.options.has_token_ids:
            extras["token_ids"] = part.token_ids
        return extras


def _choice(
    index: int, delta: Mapping[str, Any], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": None,
        **(more or {}),
    }


def _end(completion: CompletionState) -> dict[str, Any]:
    """Why it ended."""
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


def _call(call: ToolCallStart, arguments: str = "") -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}


async def chat_events(renderer: ChatRenderer, answer: Answer) -> AsyncGenerator[bytes, None]:
    """The events of a stream."""
    async for output in answer:
        for chunk in renderer.chunks(output):
            yield event(chunk)
    if renderer.options.has_usage:
        yield event(renderer.last_chunk())
    yield DONE
