"""``POST /v1/chat/completions``: answers as one object or as chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import Response

from mlx_paged.answers.events import Kind, ToolCall
from mlx_paged.request import CompletionOutput, RequestOutput
from mlx_paged.server.answers.state import AnswerState, BlockEvent, CompletionState
from mlx_paged.server.context import RequestContext
from mlx_paged.server.generations import Generation
from mlx_paged.server.openai.chat import ChatRequest, read_chat
from mlx_paged.server.openai.logprobs import chat_logprobs, prompt_logprobs
from mlx_paged.server.openai.renderer import OpenAIRenderer, usage_of


async def chat_completions(context: RequestContext[ChatRequest]) -> Response:
    """The answer to a conversation, as one object or as events."""
    body, generation = await context.prepare_chat(read_chat)
    return await context.respond(ChatRenderer(context, body, generation), generation)


class ChatRenderer(OpenAIRenderer):
    """Renders the completions of a conversation."""

    def __init__(
        self,
        context: RequestContext[ChatRequest],
        body: ChatRequest,
        generation: Generation,
    ):
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(context, body, "chatcmpl", kind)
        self._state = AnswerState(generation.answer_format)
        self._num_top_logprobs = body.num_top_logprobs
        self._has_token_ids = body.return_token_ids
        self._has_reasoning = body.include_reasoning

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """For each completion its role, its deltas, and its finish reason."""
        is_first = not self._state.completions
        for completion, part in self._state.parts(output):
            for choice in self._choices(completion, part):
                chunk = self.chunk(choice)
                if is_first and self._has_token_ids:
                    chunk["prompt_token_ids"] = output.prompt_token_ids
                is_first = False
                yield chunk

    def usage(self) -> dict[str, Any]:
        usage = self._state.usage
        details = {"reasoning_tokens": usage.num_reasoning_tokens}
        return {**usage_of(usage), "completion_tokens_details": details}

    def whole(self, *outputs: RequestOutput) -> dict[str, Any]:
        """The answer as one object."""
        [output] = outputs
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
        whole = {**self.head, "choices": choices, "usage": self.usage()}
        if output.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(self.names, output.prompt_logprobs)
        if self._has_token_ids:
            whole["prompt_token_ids"] = output.prompt_token_ids
        return whole

    def _choices(
        self, completion: CompletionState, part: CompletionOutput
    ) -> Iterator[dict[str, Any]]:
        index = completion.index
        if not completion.has_begun:
            yield _choice(index, {"role": "assistant", "content": ""})
        deltas = [delta for each in completion.add(part) if (delta := self._delta(each))]
        extras = self._extras(part) if part.token_ids else {}
        if extras and not deltas:
            deltas = [{}]  # For tokens that do not complete any text yet.
        for delta in deltas:
            yield _choice(index, delta, extras)
            extras = {}
        if completion.finish_reason is not None:
            yield _choice(index, {}, _end(completion))

    def _delta(self, each: BlockEvent) -> dict[str, Any]:
        """The delta of an event; empty if the event has none in this protocol."""
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
        # Most clients use the first name; vLLM now uses the second one.
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
        """The logprobs and the token ids of a part, if requested."""
        extras: dict[str, Any] = {}
        if self._num_top_logprobs is not None:
            extras["logprobs"] = chat_logprobs(
                self.names, part.token_ids, part.logprobs or [], self._num_top_logprobs
            )
        if self._has_token_ids:
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
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


def _call(call: ToolCall, arguments: str = "") -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}
