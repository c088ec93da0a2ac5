"""``Service``: what the endpoints know, and how they start a generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.async_engine import AsyncEngine, EngineStoppedError
from mlx_paged.errors import PromptTooLongError, one_line
from mlx_paged.loading import SamplingDefaults
from mlx_paged.request import RequestOutput
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server.errors import ApiError


@dataclass(frozen=True)
class Generation:
    """What the engine is asked for.

    Args:
        prompt_token_ids: the prompt. Encoded before, in a thread of its own: a long text takes a
            tokenizer longer than a step.
        params: with ``output_kind`` DELTA.
        cache_salt: requests with different salts share no K/V. The salt of the user's key is in it.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


class Answer:
    """The parts of a generation as they come, the first of which is there already, so that an error
    can still be an answer of HTTP.

        answer = await service.start(generation, request_id)
        try:
            async for part in answer: ...
        finally:
            await answer.aclose()       # aborts what is not finished
    """

    def __init__(self, first: RequestOutput, rest: AsyncGenerator[RequestOutput, None]):
        self._first: RequestOutput | None = first
        self._rest = rest

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await anext(self._rest)

    async def aclose(self) -> None:
        await self._rest.aclose()


@dataclass(frozen=True)
class Service:
    """What the endpoints know.

    Args:
        engine: runs the generations.
        tokenizer: of its model, with or without a chat template.
        model_names: that clients may use, the first of which is said in answers.
        defaults: of the model's ``generation_config.json``, or of flags.
        max_tokens: of an answer, where a request does not say; ``None``: what the context leaves.
        template_options: variables of the chat template, where a request does not say.
        created: when the server started, in seconds since the epoch.
    """

    engine: AsyncEngine
    tokenizer: TokenizerWrapper
    model_names: tuple[str, ...]
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    max_tokens: int | None = None
    template_options: dict[str, object] = field(default_factory=dict)
    created: int = 0

    async def start(self, generation: Generation, request_id: str | None = None) -> Answer:
        """Ask the engine, and wait for the first part.

        Raises:
            ApiError: what the engine refuses is 400, with its words; an engine that stopped is 503.
        """
        outputs = self.engine.generate(
            {"prompt_token_ids": generation.prompt_token_ids},
            generation.params,
            request_id=request_id,
            priority=generation.priority,
            cache_salt=generation.cache_salt,
        )
        try:
            return Answer(await anext(outputs), outputs)
        except BaseException as error:
            await outputs.aclose()
            raise api_error(error) from error


def api_error(error: BaseException) -> BaseException:
    """What is said of an error that ended a generation before its first part."""
    if isinstance(error, ApiError | asyncio.CancelledError) or not isinstance(error, Exception):
        return error
    if isinstance(error, PromptTooLongError):
        return ApiError(400, one_line(error, 500), code="context_length_exceeded")
    if isinstance(error, EngineStoppedError):
        return ApiError(503, one_line(error, 500), headers={"Retry-After": "5"})
    if isinstance(error, ValueError):
        return ApiError(400, one_line(error, 500), param=getattr(error, "argument", None))
    return ApiError(500, f"the request failed: {one_line(error, 500)}")
