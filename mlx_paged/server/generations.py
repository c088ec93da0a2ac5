"""``Generation`` and ``Answer``: a request to the engine, and its output in parts."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from mlx_paged.answers.dialect import PLAIN, AnswerFormat
from mlx_paged.chat_template import ChatTemplateError
from mlx_paged.engine.sampling_state import StructuredOutputError
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
from mlx_paged.sampling_params import SamplingParams, StructuredOutputsParams
from mlx_paged.server.errors import ApiError

logger = logging.getLogger("mlx_paged.server")


@dataclass(frozen=True)
class Generation:
    """A request to the engine.

    Args:
        prompt_token_ids: the prompt. It is encoded in another thread beforehand, since encoding a
            long text takes longer than a step.
        params: with ``output_kind`` DELTA for :meth:`Service.start_all`.
        cache_salt: requests with different salts share no K/V. It contains the user's salt.
        no_store: write none of its K/V to disk.
        answer_format: how the text of an answer is parsed; by default it is plain text.
        when_finished: called with each finished completion, with all of its tokens.
        user: the name of the user.
        fields: the client's fields by the names of the parameters that they set, for errors.
        parts: returns what the grammar of the answer is made of, by the client's fields, to find
            out which of them can't be compiled.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    no_store: bool = False
    answer_format: AnswerFormat = PLAIN
    when_finished: Callable[[CompletionOutput], object] | None = None
    user: str = "-"
    fields: Mapping[str, str] = field(default_factory=dict)
    parts: Callable[[], Mapping[str, StructuredOutputsParams]] = dict

    @property
    def marked_format(self) -> AnswerFormat | None:
        """The format in which the engine is to write marks; ``None`` if there are none."""
        return self.answer_format if self.answer_format.has_marks else None


class Answer:
    """The parts of a generation as they are produced. Unless it takes too long, the first part has
    arrived already, so that an early failure can be answered with an HTTP status.

        [answer] = await service.start_all([generation], request_id)
        try:
            async for part in answer: ...
        finally:
            await answer.aclose()       # aborts what is not finished

    Args:
        parts: the engine's output.
        places: places in the queue, released when the first part arrives.
        note: called with each part, and whether it is the first.
        fields: those of the :class:`Generation`.
    """

    def __init__(
        self,
        parts: AsyncGenerator[RequestOutput, None],
        places: ExitStack,
        note: Callable[[RequestOutput, bool], None],
        fields: Mapping[str, str],
    ):
        self._rest = parts
        self._places = places
        self._note = note
        self._fields = fields
        self._first: asyncio.Future[RequestOutput] | None = asyncio.ensure_future(anext(parts))

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
            return _check_end(output, self._fields)
        except StopAsyncIteration:
            raise
        except Exception as error:
            await self.aclose()
            raise api_error(error, self._fields) from error

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


class CompletionCollector:
    """Collects the tokens of each completion, and passes it on when it has finished."""

    def __init__(self, when_finished: Callable[[CompletionOutput], object]):
        self._when_finished = when_finished
        self._token_ids: dict[int, list[int]] = {}
        self._ended: set[int] = set()

    def add(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            token_ids = self._token_ids.setdefault(completion.index, [])
            token_ids += completion.token_ids
            # The last part of a request contains all completions.
            if completion.finish_reason is not None and completion.index not in self._ended:
                self._ended.add(completion.index)
                try:
                    self._when_finished(replace(completion, token_ids=token_ids))
                except Exception:
                    # The client still gets the answer.
                    logger.exception("an answer could not be kept")


async def parts_of(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The parts of several answers as they arrive, each with the index of its answer.

    Raises:
        ApiError: an answer failed or was aborted.
    """
    if len(answers) == 1:
        async for output in answers[0]:
            yield 0, output
        return
    # Bounded, so that the engine merges parts that are not read in time.
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
    """Put the parts of an answer into an inbox, followed by ``None`` or an error."""
    try:
        async for part in answer:
            await inbox.put((index, part))
    except ApiError as error:
        await inbox.put((index, error))
    else:
        await inbox.put((index, None))


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


def api_error(error: BaseException, fields: Mapping[str, str] | None = None) -> ApiError:
    """The response to an error that ended a generation. Messages of this package's errors are
    shown; for others, which may quote anything, only the type and the place. Frames are logged.

    Args:
        fields: the client's fields by the names of the parameters that they set. An error about a
            parameter names the field instead.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        text = f"prompt is too long: {_words_of(error)}"
        return ApiError(400, text, code="context_length_exceeded")
    if isinstance(error, EngineStoppedError):
        return ApiError(503, _words_of(error), headers={"Retry-After": "5"})
    if isinstance(error, ArgumentError):
        argument, fields = error.argument, {} if fields is None else fields
        words = _in_clients_words(_words_of(error), argument, fields)
        return ApiError(400, words, param=argument and fields.get(argument, argument))
    if isinstance(error, ChatTemplateError):
        return ApiError(400, _words_of(error))
    logger.error("a request failed: %s", type_and_place(error), exc_info=error)
    is_foreseen = isinstance(error, CacheFullError | RequestError | StructuredOutputError)
    words = _words_of(error) if is_foreseen else type_and_place(error)
    return ApiError(500, f"the request failed: {words}")


def _words_of(error: BaseException) -> str:
    """The message of an error on one line, without the ``[module]`` in front."""
    return without_room(one_line(error, 500))


def _in_clients_words(text: str, argument: str | None, fields: Mapping[str, str]) -> str:
    """The text of an error with the client's fields in place of parameters."""
    names = [name for name in fields if name == argument or "_" in name or "." in name]
    if not names:
        return text
    seen: set[str] = set()

    def field_of(match: re.Match[str]) -> str:
        name = match[1]
        # Without "_" it may be an ordinary word, so it is replaced only where it comes first.
        is_name = "_" in name or "." in name or name not in seen
        seen.add(name)
        return fields[name] if is_name else name

    either = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.])({either})(?!\w)", field_of, text)
