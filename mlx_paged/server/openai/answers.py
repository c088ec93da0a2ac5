"""``POST /v1/chat/completions``: answers as one object or as chunks; and what completions have in
common with it, with log-probabilities.
"""

from __future__ import annotations

import codecs
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from starlette.responses import Response

import mlx_paged
from mlx_paged.answers.events import Kind, ToolCall
from mlx_paged.engine.text_stream import TokenTexts
from mlx_paged.request import CompletionOutput, Logprob, RequestOutput
from mlx_paged.server.generations import (
    Answer,
    BlockEvent,
    CompletionState,
    Generation,
    Usage,
    parts_of,
)
from mlx_paged.server.http.sse import DONE, event
from mlx_paged.server.openai.chat import ChatRequest, OpenAIFields, UsageOptions, read_chat
from mlx_paged.server.routes import Renderer, RequestContext

F = TypeVar("F", bound=OpenAIFields)
MIN_LOGPROB = -9999.0  # instead of minus infinity, which JSON can't represent


async def chat_completions(context: RequestContext[ChatRequest]) -> Response:
    """The answer to a conversation, as one object or as events."""
    return await context.respond(ChatRenderer(context, *await context.prepare_chat(read_chat)))


class OpenAIRenderer(Renderer[F]):
    """Renders the answers to a request.

    Attributes:
        prefix: the beginning of the answer's id, before the id in the body or else that of the
            request.
        kind, kind_of_chunk: the field ``object`` of the answer and of its chunks.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    kind_of_chunk: ClassVar[str]

    def __init__(self, context: RequestContext[F], body: F, *generations: Generation):
        super().__init__(context, body, *generations)
        self.request_id = body.request_id or context.request_id
        self.head = {
            "id": f"{self.prefix}-{self.request_id}",
            "object": self.kind_of_chunk if body.stream else self.kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": f"mlx_paged-{mlx_paged.__version__}",
        }
        self.options = body.stream_options or UsageOptions()
        self.names = TokenNames(context.service.token_texts, body.return_tokens_as_token_ids)

    @abstractmethod
    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The chunks for a part of the answer to a prompt."""

    @abstractmethod
    def usage(self) -> dict[str, Any]:
        """The usage so far."""

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The chunk for a choice."""
        chunk = {**self.head, "choices": [choice]}
        if self.options.include_usage:
            chunk["usage"] = self.usage() if self.options.continuous_usage_stats else None
        return chunk

    async def events(self, *answers: Answer) -> AsyncGenerator[bytes, None]:
        async for prompt_index, output in parts_of(answers):
            for chunk in self.chunks(prompt_index, output):
                yield event(chunk)
        if self.options.include_usage:
            yield event({**self.head, "choices": [], "usage": self.usage()})
        yield DONE


def usage_of(usage: Usage, reasoning: str = "") -> dict[str, Any]:
    """The field ``usage``; ``reasoning`` as of :meth:`Usage.output_details`."""
    details = usage.output_details(reasoning)
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        **({"completion_tokens_details": details} if details else {}),
    }


class ChatRenderer(OpenAIRenderer[ChatRequest]):
    """Renders the completions of a conversation."""

    prefix, kind, kind_of_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """For each completion its role, its deltas, and its finish reason."""
        is_first = not self.states[0].completions
        for completion, part in self.states[0].parts(output):
            for choice in self._choices(completion, part):
                chunk = self.chunk(choice)
                if is_first and self.body.return_token_ids:
                    chunk["prompt_token_ids"] = output.prompt_token_ids
                is_first = False
                yield chunk

    def usage(self) -> dict[str, Any]:
        return usage_of(self.states[0].usage, "reasoning_tokens")

    def whole(self, *outputs: RequestOutput) -> dict[str, Any]:
        [output] = outputs
        choices = []
        for completion, part in self.states[0].parts(output):
            completion.read(part)
            choice = {"index": completion.index, "message": self._message(completion)}
            choices.append({**choice, "logprobs": None, **_end(completion), **self._extras(part)})
        whole = {**self.head, "choices": choices, "usage": self.usage()}
        if output.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(self.names, output.prompt_logprobs)
        if self.body.return_token_ids:
            whole["prompt_token_ids"] = output.prompt_token_ids
        return whole

    def _choices(
        self, completion: CompletionState, part: CompletionOutput
    ) -> Iterator[dict[str, Any]]:
        index = completion.index
        if not completion.num_parts:
            yield _choice(index, {"role": "assistant", "content": ""})
        deltas = [delta for each in completion.read(part) if (delta := self._delta(each))]
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
        return {"reasoning_content": text, "reasoning": text} if self.body.include_reasoning else {}

    def _message(self, completion: CompletionState) -> dict[str, Any]:
        reasoning = [block.text for block in completion.blocks if block.kind == "reasoning"]
        content = "".join(block.text for block in completion.blocks if block.kind == "text")
        calls = [_call(block.call, block.text) for block in completion.blocks if block.call]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if reasoning:
            message |= self._text("reasoning", "".join(reasoning))
        if calls:
            message["tool_calls"] = calls
        return message

    def _extras(self, part: CompletionOutput) -> dict[str, Any]:
        """The logprobs and the token ids of a part, if requested."""
        extras: dict[str, Any] = {}
        num_top = self.body.num_top_logprobs
        if num_top is not None:
            content = chat_logprobs(self.names, part, num_top)
            extras["logprobs"] = {"content": content, "refusal": None}
        if self.body.return_token_ids:
            extras["token_ids"] = part.token_ids
        return extras


def _choice(
    index: int, delta: Mapping[str, Any], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **(more or {})}


def _end(completion: CompletionState) -> dict[str, Any]:
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.part.stop_reason}


def _call(call: ToolCall, arguments: str = "") -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}


class TokenNames:
    """The names of tokens in logprobs.

    Args:
        as_ids: use ``"token_id:17"`` instead of their texts.
    """

    def __init__(self, texts: TokenTexts, as_ids: bool = False):
        self.texts = texts
        self._as_ids = as_ids

    def __getitem__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.texts.text_of(token_id)


def chat_logprobs(names: TokenNames, part: CompletionOutput, num_top: int) -> list[dict[str, Any]]:
    """An entry for each token of a part of the answer, including marks of reasoning and tool
    calls.
    """
    return [
        {
            **_chat_token(names, token, entry[token]),
            "top_logprobs": [_chat_token(names, *each) for each in most_likely(entry, num_top)],
        }
        for token, entry in zip(part.token_ids, part.logprobs or [], strict=True)
    ]


def _chat_token(names: TokenNames, token_id: int, entry: Logprob) -> dict[str, Any]:
    return {
        "token": names[token_id],
        "logprob": max(entry.logprob, MIN_LOGPROB),
        "bytes": list(names.texts.bytes_of(token_id)),
    }


def most_likely(entry: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The ``num_top`` most likely tokens of a position; ``entry`` may also have the sampled one."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= num_top][:num_top]


class CompletionLogprobs:
    """``logprobs`` of a completions choice, with the text offset of each token.

    Args:
        num_top: the number of alternatives per position.
    """

    def __init__(self, names: TokenNames, num_top: int):
        self._names = names
        self._num_top = num_top
        self._num_characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(
        self, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob] | None]
    ) -> dict[str, Any]:
        """The logprobs of the next tokens. The first token of a prompt has none."""
        offsets = []
        for token in token_ids:
            offsets.append(self._num_characters)
            self._num_characters += len(self._decoder.decode(self._names.texts.bytes_of(token)))
        pairs = list(zip(token_ids, entries, strict=True))
        return {
            "tokens": [self._names[token] for token in token_ids],
            "token_logprobs": [
                None if entry is None else max(entry[token].logprob, MIN_LOGPROB)
                for token, entry in pairs
            ],
            "top_logprobs": [self._top(token, entry) for token, entry in pairs],
            "text_offset": offsets,
        }

    def _top(self, token: int, entry: Mapping[int, Logprob] | None) -> dict[str, float] | None:
        if entry is None:
            return None
        # The token itself is always included, as in OpenAI's API.
        likely = dict(most_likely(entry, self._num_top)) | {token: entry[token]}
        return {self._names[each]: max(likely[each].logprob, MIN_LOGPROB) for each in likely}


def prompt_logprobs(
    names: TokenNames, entries: Sequence[Mapping[int, Logprob] | None]
) -> list[dict[str, Any] | None]:
    """vLLM's field: a dictionary by token id for each token of the prompt."""
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": max(each.logprob, MIN_LOGPROB),
                "rank": each.rank,
                "decoded_token": names.texts.text_of(token),
            }
            for token, each in entry.items()
        }
        for entry in entries
    ]
