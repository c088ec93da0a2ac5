"""Answers of chat: one object, or chunks as the text comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from typing import Any

from mlx_paged.request import CompletionOutput, RequestOutput
from mlx_paged.server.answers.reader import (
    AnswerFormat,
    Event,
    Reasoning,
    Text,
    ToolCallStart,
)
from mlx_paged.server.answers.reasoning_tokens import ReasoningTokens
from mlx_paged.server.generations import Answer, check_end
from mlx_paged.server.http.sse import DONE, event
from mlx_paged.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from mlx_paged.server.openai.options import Options, usage
from mlx_paged.server.service import Service


class ChatAnswers:
    """The completions of a conversation, as far as they have come.

    Args:
        head: what each object begins with.
        answer_format: how the text is read.
        num_top_logprobs: for each token; ``None``: no logprobs.
        has_reasoning: whether reasoning is shown.

    Attributes:
        choices: by their index.
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
        self.head = head
        self.options = options
        self.names = TokenNames(service.token_texts, options.has_tokens_as_ids)
        self.num_top_logprobs = num_top_logprobs
        self.has_reasoning = has_reasoning
        self.choices: dict[int, ChatChoice] = {}
        self._tokenizer = service.tokenizer
        self._format = answer_format
        self._num_prompt_tokens = self._num_cached_tokens = 0

    def choice(self, index: int) -> ChatChoice:
        """The completion with this index."""
        if index not in self.choices:
            reasoning_tokens = ReasoningTokens.of(self._tokenizer, self._format)
            self.choices[index] = ChatChoice(self, index, self._format, reasoning_tokens)
        return self.choices[index]

    def note_prompt(self, output: RequestOutput) -> None:
        """Take the numbers of the prompt's tokens."""
        self._num_prompt_tokens = len(output.prompt_token_ids)
        self._num_cached_tokens = output.num_cached_tokens

    def usage(self) -> dict[str, Any]:
        """The tokens so far."""
        choices = self.choices.values()
        return usage(
            self._num_prompt_tokens,
            self._num_cached_tokens,
            sum(choice.num_tokens for choice in choices),
            sum(choice.reasoning_tokens.count for choice in choices),
        )

    def chunk(self, *choices: Mapping[str, Any]) -> dict[str, Any]:
        """An object of a stream."""
        chunk = {**self.head, "choices": choices}
        if self.options.has_usage:
            chunk["usage"] = self.usage() if self.options.has_usage_always else None
        return chunk


class ChatChoice:
    """One completion: its text told apart, and what was counted.

    Attributes:
        num_tokens: that were generated.
        is_finished: its end was seen.
    """

    def __init__(
        self,
        answers: ChatAnswers,
        index: int,
        answer_format: AnswerFormat,
        reasoning_tokens: ReasoningTokens,
    ):
        self.num_tokens = 0
        self.is_finished = False
        self.reasoning_tokens = reasoning_tokens
        self._answers = answers
        self._index = index
        self._reader = answer_format.reader()

    def add(self, completion: CompletionOutput) -> list[Event]:
        """What the next part of the completion says, as the client wants to see it."""
        self.num_tokens += len(completion.token_ids)
        self.reasoning_tokens.add(completion.token_ids)
        self.is_finished = completion.finish_reason is not None
        events = self._reader.read(completion)
        if self._answers.has_reasoning:
            return events
        return [each for each in events if not isinstance(each, Reasoning)]

    def end(self, completion: CompletionOutput) -> dict[str, Any]:
        """Why it ended."""
        reason = completion.finish_reason
        if reason == "stop" and self._reader.num_tool_calls:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": completion.stop_reason}

    def extras(self, completion: CompletionOutput) -> dict[str, Any]:
        """What was asked for beside the text: logprobs and token ids of a part."""
        extras: dict[str, Any] = {}
        answers = self._answers
        if answers.num_top_logprobs is not None:
            extras["logprobs"] = chat_logprobs(
                answers.names,
                completion.token_ids,
                completion.logprobs or [],
                answers.num_top_logprobs,
            )
        if answers.options.has_token_ids:
            extras["token_ids"] = completion.token_ids
        return extras

    def pieces(self, completion: CompletionOutput) -> Iterator[dict[str, Any]]:
        """The choices of a stream that a part makes."""
        if self.is_finished:
            return  # The last part of a request has all completions.
        if self.num_tokens == 0:
            yield self._piece({"role": "assistant", "content": ""})
        deltas = [delta_of(each) for each in self.add(completion)]
        extras = self.extras(completion) if completion.token_ids else {}
        if extras and not deltas:
            deltas = [{}]  # They are not lost where a token has no text yet.
        for delta in deltas:
            yield self._piece(delta, extras)
            extras = {}
        if self.is_finished:
            yield self._piece({}, self.end(completion))

    def _piece(
        self, delta: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            **(more or {}),
        }


def delta_of(each: Event) -> dict[str, Any]:
    """What an event adds to a message."""
    if isinstance(each, Text):
        return {"content": each.text}
    if isinstance(each, Reasoning):
        # The first name is that of most clients, the second one that of vLLM now.
        return {"reasoning_content": each.text, "reasoning": each.text}
    if isinstance(each, ToolCallStart):
        function = {"name": each.name, "arguments": ""}
        call = {"index": each.index, "id": each.call_id, "type": "function", "function": function}
    else:
        call = {"index": each.index, "function": {"arguments": each.text}}
    return {"tool_calls": [call]}


async def chat_events(answers: ChatAnswers, answer: Answer) -> AsyncGenerator[bytes, None]:
    """The events of a stream: for each completion its role, what comes, and its end."""
    is_first = True
    async for part in answer:
        check_end(part)
        answers.note_prompt(part)
        for completion in part.outputs:
            for piece in answers.choice(completion.index).pieces(completion):
                chunk = answers.chunk(piece)
                if is_first and answers.options.has_token_ids:
                    chunk["prompt_token_ids"] = part.prompt_token_ids
                is_first = False
                yield event(chunk)
    if answers.options.has_usage:
        yield event({**answers.chunk(), "usage": answers.usage()})
    yield DONE


def whole_chat(answers: ChatAnswers, output: RequestOutput) -> dict[str, Any]:
    """The answer as one object."""
    answers.note_prompt(output)
    choices = []
    for completion in output.outputs:
        choice = answers.choice(completion.index)
        message = message_of(choice.add(completion))
        choices.append(
            {
                "index": completion.index,
                "message": message,
                "logprobs": None,
                **choice.end(completion),
                **choice.extras(completion),
            }
        )
    whole = {**answers.head, "choices": choices, "usage": answers.usage()}
    if output.prompt_logprobs is not None:
        whole["prompt_logprobs"] = prompt_logprobs(answers.names, output.prompt_logprobs)
    if answers.options.has_token_ids:
        whole["prompt_token_ids"] = output.prompt_token_ids
    return whole


def message_of(events: Iterable[Event]) -> dict[str, Any]:
    """The message that the events of a whole answer make."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for each in events:
        if isinstance(each, Text):
            texts.append(each.text)
        elif isinstance(each, Reasoning):
            reasoning.append(each.text)
        elif isinstance(each, ToolCallStart):
            function = {"name": each.name, "arguments": ""}
            calls[each.index] = {"id": each.call_id, "type": "function", "function": function}
        else:
            calls[each.index]["function"]["arguments"] += each.text
    content = "".join(texts)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not content else content,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message
