"""``Generation``, a request to the engine; ``Answer``, its output in parts; and ``AnswerState``,
the answer so far as blocks and numbers of tokens, which each protocol renders in its own format.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import add
from typing import Literal, NamedTuple

from mlx_paged.answers.dialect import PLAIN, AnswerFormat
from mlx_paged.answers.events import Kind, ToolCall
from mlx_paged.answers.tokens import PartReader
from mlx_paged.engine.options import RequestOptions
from mlx_paged.options.sampling_params import (
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from mlx_paged.request import (
    NO_DRAFTS,
    CompletionOutput,
    RequestOutput,
    SpecDecodingStats,
)
from mlx_paged.server.errors import ApiError, api_error

logger = logging.getLogger("mlx_paged.server")


@dataclass(frozen=True)
class Generation:
    """A request to the engine.

    Args:
        prompt_token_ids: the prompt. It is encoded in another thread beforehand, since encoding a
            long text takes longer than a step.
        params: with ``output_kind`` DELTA for :meth:`Service.start_all`.
        options: the engine's: priority, salt, whether to store, and the name of the user. The salt
            contains the user's.
        answer_format: how the text of an answer is parsed; by default it is plain text.
        when_finished: called with each finished completion, with all of its tokens.
        fields: the client's fields by the names of the parameters that they set, for errors.
        parts: returns what the grammar of the answer is made of, by the client's fields, to find
            out which of them can't be compiled.
        pooling: what it is answered with instead of generated tokens.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    options: RequestOptions = field(default_factory=RequestOptions)
    answer_format: AnswerFormat = PLAIN
    when_finished: Callable[[CompletionOutput], object] | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    parts: Callable[[], Mapping[str, StructuredOutputsParams]] = dict
    pooling: PoolingParams | None = None

    @property
    def user(self) -> str | None:
        return self.options.get("user")

    @property
    def cache_salt(self) -> str | None:
        return self.options.get("cache_salt")

    @property
    def answer_salt(self) -> str | None:
        """Separates its answers from those of others: its salt, and its adapter if it has one."""
        adapter = self.options.get("adapter")
        return self.cache_salt if adapter is None else json.dumps([self.cache_salt, adapter])

    @property
    def no_store(self) -> bool:
        return self.options.get("no_store", False)


class Answer:
    """The parts of a generation as they are produced. Unless it takes too long, the first part has
    arrived already, so that an early failure can be answered with an HTTP status.

        [answer] = await service.start_all([generation], request_id)
        try:
            async for part in answer: ...
        finally:
            await answer.aclose()       # aborts what is not finished

    Args:
        generation: what was requested.
        parts: the engine's output.
        places: places in the queue, released when the first part arrives.
        note: called with each part, and whether it is the first.
    """

    def __init__(
        self,
        generation: Generation,
        parts: AsyncGenerator[RequestOutput, None],
        places: ExitStack,
        note: Callable[[RequestOutput, bool], None],
    ):
        self._when_finished = generation.when_finished
        self._fields = generation.fields
        self._rest = parts
        self._places = places
        self._note = note
        self._first: asyncio.Future[RequestOutput] | None = asyncio.ensure_future(anext(parts))
        self._token_ids: dict[int, list[int]] = {}  # by completion
        self._finished: set[int] = set()

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            is_first = self._first is not None
            output = await (self._first or anext(self._rest))
            if is_first:
                self._first = None
                self._places.close()
            self._note(output, is_first)
            self._collect(output)
            return _check_end(output, self._fields)
        except StopAsyncIteration:
            raise
        except Exception as error:
            await self.aclose()
            raise api_error(error, self._fields) from error

    def _collect(self, output: RequestOutput) -> None:
        """Collect the tokens of each completion, and pass it on when it has finished."""
        if self._when_finished is None:
            return
        for completion in output.outputs:
            token_ids = self._token_ids.setdefault(completion.index, [])
            token_ids += completion.token_ids
            # The last part of a request contains all completions.
            if completion.finish_reason is not None and completion.index not in self._finished:
                self._finished.add(completion.index)
                try:
                    self._when_finished(replace(completion, token_ids=token_ids))
                except Exception:
                    # The client still gets the answer.
                    logger.exception("an answer could not be kept")

    async def wait(self, seconds: float) -> None:
        """Wait for the first part for some seconds; raises an :class:`ApiError` if it failed."""
        if self._first is not None:
            await asyncio.wait({self._first}, timeout=seconds)
            if self._first.done() and (error := self._first.exception()) is not None:
                raise api_error(error, self._fields) from error

    async def aclose(self) -> None:
        """Abort the generation unless it has finished. May be called more than once."""
        with self._places:
            if self._first is not None:
                self._first.cancel()
                await asyncio.gather(self._first, return_exceptions=True)
            await self._rest.aclose()


async def parts_of(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The parts of several answers as they arrive, each with the index of its answer.

    Raises:
        ApiError: an answer failed or was aborted.
    """
    if len(answers) == 1:
        async for output in answers[0]:
            yield 0, output
        return
    # At most one part of each is taken before it is needed, so that the engine merges parts that
    # are not read in time.
    waiting = {asyncio.ensure_future(anext(each)): index for index, each in enumerate(answers)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                if isinstance(task.exception(), StopAsyncIteration):
                    continue
                yield index, task.result()
                waiting[asyncio.ensure_future(anext(answers[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _check_end(output: RequestOutput, fields: Mapping[str, str]) -> RequestOutput:
    """Return the output, or raise an :class:`ApiError` if one of its completions was aborted or
    failed: no protocol has a finish reason for that.
    """
    for completion in output.outputs:
        if completion.finish_reason == "abort":
            raise ApiError(503, "the server aborted this answer", code="aborted")
        if completion.finish_reason == "error":
            raise api_error(output.error or RuntimeError("an unknown error"), fields)
    return output


@dataclass
class AnswerBlock:
    """A contiguous part of an answer of one kind.

    Args:
        index: the block's index in the answer.
        call: the index, id and name of a call.
        pieces: the pieces of its text.
    """

    index: int
    kind: Kind
    call: ToolCall | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far: reasoning, text, or the arguments of a call."""
        return "".join(self.pieces)


class BlockEvent(NamedTuple):
    """A block begins, its text continues, or it ends. ``block`` is in its state after all events of
    the same part.
    """

    what: Literal["start", "delta", "end"]
    block: AnswerBlock
    text: str = ""


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    spec_decoding: SpecDecodingStats = NO_DRAFTS

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(add, vars(self).values(), vars(other).values()))

    def output_details(self, reasoning: str = "") -> dict[str, int]:
        """The number of tokens of reasoning, if the name of its field is given, and OpenAI's fields
        for drafts, if there were some.
        """
        details = {reasoning: self.num_reasoning_tokens} if reasoning else {}
        drafts, num_accepted = self.spec_decoding, self.spec_decoding.num_accepted_tokens
        if drafts.num_drafts:
            details["accepted_prediction_tokens"] = num_accepted
            details["rejected_prediction_tokens"] = drafts.num_draft_tokens - num_accepted
        return details


class CompletionState:
    """One completion.

    Attributes:
        blocks: its blocks so far.
        num_tokens: the number of generated tokens.
        part, num_parts: the last part, and how many there were.
        finish_reason: ``"stop"``, ``"length"``, or ``"tool_calls"`` if it stopped after calls;
            ``None`` before the end.
        reader: reads its parts.
    """

    def __init__(self, index: int, answer_format: AnswerFormat):
        self.index = index
        self.blocks: list[AnswerBlock] = []
        self.num_tokens = 0
        self.part = CompletionOutput(index)
        self.num_parts = 0
        self.finish_reason: str | None = None
        self._open_block: AnswerBlock | None = None
        self.reader = PartReader(answer_format)

    def read(self, part: CompletionOutput) -> list[BlockEvent]:
        """Read the next part; returns its events."""
        self.part = part
        self.num_parts += 1
        self.num_tokens += len(part.token_ids)
        self.finish_reason = part.finish_reason
        events: list[BlockEvent] = []
        for kind, text, call in self.reader.read(part):
            block = self._open_block
            if block is None or block.kind != kind or call is not None:
                self._end_block(events)
                block = self._open_block = AnswerBlock(len(self.blocks), kind, call)
                self.blocks.append(block)
                events.append(BlockEvent("start", block))
            if not text:
                continue
            block.pieces.append(text)
            if events and events[-1].what == "delta":  # of the same block
                text = events.pop().text + text
            events.append(BlockEvent("delta", block, text))
        if self.finish_reason is not None:
            self._end_block(events)
            if self.finish_reason == "stop" and self.reader.num_tool_calls:
                self.finish_reason = "tool_calls"
        return events

    def _end_block(self, events: list[BlockEvent]) -> None:
        block, self._open_block = self._open_block, None
        if block is not None:
            events.append(BlockEvent("end", block))


class AnswerState:
    """The answer to one prompt, with one or more completions.

    Args:
        answer_format: how the text is parsed.

    Attributes:
        completions: those that have begun, by index.
    """

    def __init__(self, answer_format: AnswerFormat):
        self.completions: dict[int, CompletionState] = {}
        self._format = answer_format
        self._num_prompt_tokens = self._num_cached_tokens = 0

    def parts(self, output: RequestOutput) -> Iterator[tuple[CompletionState, CompletionOutput]]:
        """The completions in a part of the answer, for :meth:`CompletionState.read`."""
        self._num_prompt_tokens = len(output.prompt_token_ids)
        self._num_cached_tokens = output.num_cached_tokens
        for part in output.outputs:
            completion = self.completions.get(part.index)
            if completion is None:
                completion = CompletionState(part.index, self._format)
                self.completions[part.index] = completion
            # The last part of a request contains all completions, finished ones included.
            if completion.finish_reason is None:
                yield completion, part

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        completions = self.completions.values()
        return Usage(
            self._num_prompt_tokens,
            self._num_cached_tokens,
            sum(each.num_tokens for each in completions),
            sum(each.reader.num_reasoning_tokens for each in completions),
            sum((each.part.spec_decoding for each in completions), NO_DRAFTS),
        )
