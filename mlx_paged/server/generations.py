"""``Generation`` and ``Answer``: what the engine is asked for, and what comes back in parts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from mlx_paged.chat_template import ChatTemplateError
from mlx_paged.engine.grammar import StructuredOutputError
from mlx_paged.engine.thread import EngineStoppedError
from mlx_paged.errors import (
    ArgumentError,
    CacheFullError,
    PromptTooLongError,
    RequestError,
    one_line,
    type_and_place,
    without_room,
)
from mlx_paged.request import CompletionOutput, RequestOutput
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server.answers.reader import PLAIN, AnswerFormat
from mlx_paged.server.errors import ApiError

logger = logging.getLogger("mlx_paged.server")


@dataclass(frozen=True)
class Generation:
    """What the engine is asked for.

    Args:
        prompt_token_ids: the prompt. Encoded before, in a thread of its own: a long text takes a
            tokenizer longer than a step.
        params: with ``output_kind`` DELTA for :meth:`Service.start_all`.
        cache_salt: requests with different salts share no K/V. The salt of the user's key is in it.
        no_store: write none of its K/V to disk.
        answer_format: how the text of an answer is read; by default it is text as it is.
        when_finished: is told of each completion that ended, with all of its tokens.
        user: who asks.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    no_store: bool = False
    answer_format: AnswerFormat = PLAIN
    when_finished: Callable[[CompletionOutput], object] | None = None
    user: str = "-"


class Answer:
    """The parts of a generation as they come, the first of which is there already, so that an error
    can still be an answer of HTTP, unless it takes long.

        [answer] = await service.start_all([generation], request_id)
        try:
            async for part in answer: ...
        finally:
            await answer.aclose()       # aborts what is not finished

    Args:
        parts: of the engine.
        places: in the queue, which are given back when it begins.
        note: told of each part as it comes, and whether it is the first.
    """

    def __init__(
        self,
        parts: AsyncGenerator[RequestOutput, None],
        places: ExitStack,
        note: Callable[[RequestOutput, bool], None],
    ):
        self._rest = parts
        self._places = places
        self._note = note
        self._first: asyncio.Task[RequestOutput] | None = asyncio.create_task(_first_of(parts))

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            if self._first is not None:
                output = await self._first
                self._first = None
                self._places.close()
                self._note(output, True)
            else:
                output = await anext(self._rest)
                self._note(output, False)
            return _check_end(output)
        except StopAsyncIteration:
            raise
        except Exception as error:
            await self.aclose()
            raise api_error(error) from error

    async def wait(self, seconds: float) -> None:
        """Wait for the first part, for some time; raises what kept it from coming."""
        if self._first is not None:
            await asyncio.wait({self._first}, timeout=seconds)
            if self._first.done() and (error := self._first.exception()) is not None:
                raise api_error(error) from error

    async def aclose(self) -> None:
        """Abort what is not finished. More than once is harmless."""
        with self._places:
            if self._first is not None:
                self._first.cancel()
                await asyncio.gather(self._first, return_exceptions=True)
            await self._rest.aclose()


class CompletionCollector:
    """Gathers the tokens of each completion, and hands it on when it has ended."""

    def __init__(self, when_finished: Callable[[CompletionOutput], object]):
        self._when_finished = when_finished
        self._token_ids: dict[int, list[int]] = {}
        self._ended: set[int] = set()

    def add(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            token_ids = self._token_ids.setdefault(completion.index, [])
            token_ids += completion.token_ids
            # The last part of a request has all completions.
            if completion.finish_reason is not None and completion.index not in self._ended:
                self._ended.add(completion.index)
                try:
                    self._when_finished(replace(completion, token_ids=token_ids))
                except Exception:
                    # The answer is there all the same.
                    logger.exception("what follows an answer failed")


async def parts_of(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The parts of several answers as they come, each with its answer's index.

    Raises:
        ApiError: why an answer ended before its end.
    """
    if len(answers) == 1:
        async for output in answers[0]:
            yield 0, output
        return
    # With a bound, so that parts that no task waits for are merged where they come from.
    inbox: asyncio.Queue[tuple[int, RequestOutput | ApiError | None]] = asyncio.Queue(len(answers))
    readers = [asyncio.create_task(_read(*each, inbox)) for each in enumerate(answers)]
    try:
        num_open = len(answers)
        while num_open:
            index, part = await inbox.get()
            if isinstance(part, ApiError):
                raise part
            if part is None:
                num_open -= 1
            else:
                yield index, part
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    index: int, answer: Answer, inbox: asyncio.Queue[tuple[int, RequestOutput | ApiError | None]]
) -> None:
    """Put the parts of an answer into an inbox, and then ``None``, or why there are no more."""
    try:
        async for part in answer:
            await inbox.put((index, part))
    except ApiError as error:
        await inbox.put((index, error))
    else:
        await inbox.put((index, None))


def _check_end(output: RequestOutput) -> RequestOutput:
    """The output; raises an :class:`ApiError` where one of its completions ended before its end:
    no protocol has a word for that.
    """
    for completion in output.outputs:
        if completion.finish_reason == "abort":
            raise ApiError(503, "the server ended this answer before its end", code="aborted")
        if completion.finish_reason == "error":
            raise api_error(output.error or RuntimeError("an unknown error"))
    return output


async def _first_of(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    return await anext(outputs)


def api_error(error: BaseException) -> ApiError:
    """What is said of an error that ended a generation: the words of this package's errors, and of
    others, whose message may quote anything, the type and the place. The log has the frames.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        text = f"prompt is too long: {_words_of(error)}"
        return ApiError(400, text, code="context_length_exceeded")
    if isinstance(error, EngineStoppedError):
        return ApiError(503, _words_of(error), headers={"Retry-After": "5"})
    if isinstance(error, ArgumentError | ChatTemplateError):
        return ApiError(400, _words_of(error), param=getattr(error, "argument", None))
    logger.error("a request failed: %s", type_and_place(error), exc_info=error)
    is_foreseen = isinstance(error, CacheFullError | RequestError | StructuredOutputError)
    words = _words_of(error) if is_foreseen else type_and_place(error)
    return ApiError(500, f"the request failed: {words}")


def _words_of(error: BaseException) -> str:
    """The text of an error on one line, without the module that it comes from."""
    return without_room(one_line(error, 500))
