"""``IdlePrefill``: prefills the likely beginnings of next prompts while no request runs.

Templates drop the reasoning of a finished answer from the history, so the prompt of a new question
after a loop of tool calls has never been computed. It is computed here once the answer is finished:
in small steps, at the lowest priority, and it is interrupted as soon as a request arrives.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.request import MAX_PRIORITY
from mlx_paged.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger("mlx_paged.server")

MAX_WAITING = 8  # conversations; the oldest ones are dropped
# Tokens computed in one request, so that other requests wait for at most one such step.
PIECE_LEN = 512
MIN_NEW_TOKENS = 64  # fewer are not worth a request
PAUSE = 0.05  # seconds between two checks whether the engine is idle
_ONE_TOKEN = SamplingParams(
    max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
)


Encode: TypeAlias = Callable[[], tuple[Sequence[int], int]]


@dataclass(frozen=True)
class Upcoming:
    """The likely beginning of a next prompt.

    Args:
        encode: returns its tokens, and how many of them are computed already. Called in a thread of
            the tokenizer pool.
        user, cache_salt, no_store: those of the conversation.
    """

    encode: Encode
    user: str
    cache_salt: str | None
    no_store: bool


class IdlePrefill:
    """Prefills expected prompts, one at a time. Used from one event loop.

    Args:
        run: runs a function in the tokenizer pool for a user.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        run: Callable[[str, Encode], Awaitable[tuple[Sequence[int], int]]],
    ):
        self._engine = engine
        self._run_in_thread = run
        self._waiting: OrderedDict[bytes, Upcoming] = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self._request_id: str | None = None  # of the piece being computed
        self._numbers = itertools.count()

    @property
    def is_done(self) -> bool:
        """Whether all expected prompts have been computed."""
        return self._task is None or self._task.done()

    def expect(self, key: bytes, upcoming: Upcoming) -> None:
        """Compute this when the engine is idle.

        Args:
            key: identifies the conversation; a later call with the same key replaces an earlier
                one.
        """
        self._waiting[key] = upcoming
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._run())

    def pause(self) -> None:
        """Interrupt the prefill for a request; it resumes when the engine is idle again."""
        if self._request_id is not None:
            self._engine.abort(self._request_id)

    async def _run(self) -> None:
        while self._waiting:
            await self._until_idle()
            _, upcoming = self._waiting.popitem(last=False)
            try:
                await self._compute(upcoming)
            except Exception as error:
                # For example, it does not fit into the context or the budget.
                logger.debug("a prompt was not computed ahead: %s", type(error).__name__)

    async def _compute(self, upcoming: Upcoming) -> None:
        token_ids, num_known = await self._run_in_thread(upcoming.user, upcoming.encode)
        if len(token_ids) - num_known < MIN_NEW_TOKENS:
            return
        ends = [*range(num_known + PIECE_LEN, len(token_ids), PIECE_LEN), len(token_ids)]
        for end in ends:
            while not await self._compute_piece(upcoming, list(token_ids[:end])):
                pass

    async def _compute_piece(self, upcoming: Upcoming, token_ids: list[int]) -> bool:
        """Compute the beginning of a prompt; returns false if that was interrupted."""
        await self._until_idle()
        self._request_id = f"ahead-{next(self._numbers)}"
        try:
            async for output in self._engine.generate(
                {"prompt_token_ids": token_ids},
                _ONE_TOKEN,
                request_id=self._request_id,
                priority=MAX_PRIORITY,
                cache_salt=upcoming.cache_salt,
                no_store=upcoming.no_store,
                user=upcoming.user,
            ):
                if output.outputs[0].finish_reason == "abort":
                    return False
        finally:
            self._request_id = None
        return True

    async def _until_idle(self) -> None:
        while self._engine.engine.has_unfinished_requests():
            await asyncio.sleep(PAUSE)
