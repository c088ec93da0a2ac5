"""``IdlePrefill``: computes what the next prompts are likely to begin with, while no request runs.

Templates leave the reasoning of a finished answer out of the history, so that a new question after
a loop of tools begins with a prompt that was never computed. Here it is, once its answer is there:
in small steps, at the lowest priority, and given up the moment that a request comes.
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

MAX_WAITING = 8  # conversations; the oldest ones are given up for good
# Tokens that are computed in one request: no other one waits for more than a step of them.
PIECE_LEN = 512
# Fewer than these are not worth a request of their own.
MIN_NEW_TOKENS = 64
PAUSE = 0.05  # seconds between two looks at whether the engine has nothing to do
_ONE_TOKEN = SamplingParams(
    max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
)


Encode: TypeAlias = Callable[[], tuple[Sequence[int], int]]


@dataclass(frozen=True)
class Upcoming:
    """What a next prompt is likely to begin with.

    Args:
        encode: returns its tokens, and how many of them are computed already. Called from a thread
            that encodes prompts.
        user, cache_salt, no_store: of the conversation.
    """

    encode: Encode
    user: str
    cache_salt: str | None
    no_store: bool


class IdlePrefill:
    """Computes what is expected, one after another. All of it from one event loop.

    Args:
        run: runs a function from a thread that encodes prompts: whose, and the function.
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
        self._request_id: str | None = None  # of the piece that is computed
        self._numbers = itertools.count()

    @property
    def is_done(self) -> bool:
        """Whether nothing is expected that was not computed."""
        return self._task is None or self._task.done()

    def expect(self, key: bytes, upcoming: Upcoming) -> None:
        """Compute this when the engine has nothing else to do.

        Args:
            key: of the conversation; of one that is expected twice, the last one counts.
        """
        self._waiting[key] = upcoming
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._run())

    def give_way(self) -> None:
        """A request comes: end what is computed. It goes on when there is nothing to do again."""
        if self._request_id is not None:
            self._engine.abort(self._request_id)

    async def _run(self) -> None:
        while self._waiting:
            await self._until_idle()
            _, upcoming = self._waiting.popitem(last=False)
            try:
                await self._compute(upcoming)
            except Exception as error:
                # It may be too long for the context or for the budget: then no request can have it.
                logger.debug("nothing is computed ahead: %s", type(error).__name__)

    async def _compute(self, upcoming: Upcoming) -> None:
        token_ids, num_known = await self._run_in_thread(upcoming.user, upcoming.encode)
        if len(token_ids) - num_known < MIN_NEW_TOKENS:
            return
        ends = [*range(num_known + PIECE_LEN, len(token_ids), PIECE_LEN), len(token_ids)]
        for end in ends:
            while not await self._compute_piece(upcoming, list(token_ids[:end])):
                pass

    async def _compute_piece(self, upcoming: Upcoming, token_ids: list[int]) -> bool:
        """Compute a prompt up to some place; returns whether that was not given up."""
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
            ):
                if output.outputs[0].finish_reason == "abort":
                    return False
        finally:
            self._request_id = None
        return True

    async def _until_idle(self) -> None:
        while self._engine.engine.has_unfinished_requests():
            await asyncio.sleep(PAUSE)
