"""``Residency``: which models are in memory, within one budget for all of them.

A model counts with its weights, the activations of its largest step, and its K/V. Weights and
activations are computed before it is loaded (:class:`Need`), and K/V get what they leave: each
model at least what a conversation of ``LEAST_TOKENS`` takes, and the rest in equal shares. A model
that is needed and has no room takes first the K/V that idle models have beyond that, then the place
of the model that was used least recently. What answers is never put away, and what is pinned is
not either.

Nothing here is about HTTP or arrays. All of it runs in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_paged.errors import one_line, shown
from mlx_paged.models.memory import MIN_KV_CACHE_BYTES, format_nbytes
from mlx_paged.router.model_process import PROCESS_NBYTES, ModelProcess, Need
from mlx_paged.server.errors import ApiError

logger = logging.getLogger("mlx_paged.server")

MAX_WAITING = 256  # requests that wait for models, all together
WAIT_SECONDS = 600.0  # for a model to be loaded, or for room
_SECONDS_TO_CHANGE = 20.0  # for a process to change its K/V, between two steps
_TICK = 0.01  # seconds; timers may be early by less


@dataclass(eq=False)
class Resident:
    """A model that may be in memory.

    Args:
        process: loads it and puts it away.
        keep_alive: how many seconds it stays without a request; infinity: until others need its
            memory.
        is_pinned: whether it is never put away for others or after a time.

    Attributes:
        need: ``None`` until it was measured.
        kv_nbytes: what its K/V may take now.
        kept_kv: what of that it did not give back when it was asked to.
        num_users: requests that use it, which are not answered yet.
        used: when its last request began or ended, in seconds of the event loop's clock.
        expires: when it is put away unless it is used before; of the last request that began.
        is_leaving: whether it is put away, or will be when it has answered.
        is_loading: from the decision to load it until its requests begin.
        task: measures it, or starts its process.
        waiting: requests that wait for it.
    """

    process: ModelProcess
    keep_alive: float = math.inf
    is_pinned: bool = False
    need: Need | None = None
    kv_nbytes: int = 0
    kept_kv: int = 0
    num_users: int = 0
    used: float = 0.0
    expires: float = math.inf
    seconds_kept: float = math.inf
    is_leaving: bool = False
    is_loading: bool = False
    task: asyncio.Task[None] | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def is_in_memory(self) -> bool:
        return self.is_loading or self.process.state in ("loading", "loaded")

    @property
    def is_loaded(self) -> bool:
        return self.process.state == "loaded" and not self.is_loading

    @property
    def is_idle(self) -> bool:
        return self.is_loaded and not self.num_users

    @property
    def nbytes(self) -> int:
        """The bytes that it counts with; 0 if it was not measured."""
        need = self.need
        return 0 if need is None else need.nbytes - need.least_kv + self.kv_nbytes

    @property
    def least_kv(self) -> int:
        """What its K/V can't be made smaller than now: unfinished requests need what they have."""
        assert self.need is not None, "a model is measured before it is loaded"
        if not self.is_in_memory:
            return self.need.least_kv
        return max(self.need.least_kv, self.kept_kv if self.is_idle else self.kv_nbytes)


class Residency:
    """Loads models for the requests that use them, and puts others away for their room::

        async with residency.use("qwen") as process:
            ...  # process answers; it is not put away before the end of this block

    Changes are made one at a time, in the order in which models were first asked for; what takes
    long, measuring a model and starting its process, goes on beside them. While the next model
    waits for answers of others to end, new requests for these wait behind it.

    Args:
        models: by name.
        budget: bytes for all of them together.
        share_of_kv: the bytes that K/V may take in all beside weights and activations of these
            sizes; negative if they leave nothing.
        wait_seconds: the most that a request waits.
        max_waiting: the most requests that wait.
    """

    def __init__(
        self,
        models: Iterable[Resident],
        budget: int,
        share_of_kv: Callable[[int, int], int],
        wait_seconds: float = WAIT_SECONDS,
        max_waiting: int = MAX_WAITING,
    ):
        self.models: Mapping[str, Resident] = {model.name: model for model in models}
        self.budget = budget
        self._share_of_kv = share_of_kv
        self._wait_seconds, self._max_waiting = wait_seconds, max_waiting
        self._queue: dict[Resident, None] = {}  # with requests that wait, in order
        self._making_room: list[Resident] = []  # that answer, and leave when they have
        self._changing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._is_shared_out = True  # K/V, among the models in memory
        self._is_closed = False

    @asynccontextmanager
    async def use(self, name: str, keep_alive: float | None = None) -> AsyncIterator[ModelProcess]:
        """Have a model in memory, loaded if necessary.

        Args:
            keep_alive: how many seconds the model stays after this request, in the place of its
                own time.

        Raises:
            KeyError: there is no such model.
            ApiError: 503 with the sum if there is no room, or too many requests wait; or as
                :meth:`ModelProcess.start`.
        """
        model = self.models[name]
        if self._is_open(model):
            self._admit(model)
        else:
            await self._wait_for(model)
        model.seconds_kept = model.keep_alive if keep_alive is None else keep_alive
        try:
            yield model.process
        finally:
            self._end_use(model)

    async def load(self, name: str, keep_alive: float | None = None) -> None:
        """Load a model; arguments and errors as :meth:`use`."""
        async with self.use(name, keep_alive):
            pass

    async def unload(self, name: str) -> None:
        """Put a model away when it has answered what it answers now, or end its loading."""
        model = self.models[name]
        if model.is_loading:
            await model.process.stop()
        model.is_leaving = model.is_in_memory
        self._wake()
        while model.is_leaving:
            await self._changed.wait()

    async def close(self, seconds: float | None = None) -> bool:
        """Put all models away, all at once; requests that wait get an error.

        Args:
            seconds: after which processes are killed; by default as of :meth:`ModelProcess.stop`.

        Returns:
            whether all have ended by themselves.
        """
        self._is_closed = True
        tasks = [self._changing, *(model.task for model in self.models.values())]
        for task in (running := [task for task in tasks if task is not None]):
            task.cancel()
        if running:
            await asyncio.wait(running)
        for model in list(self._queue):
            self._refuse(model, ApiError(503, "the server is shutting down; retry later"))
        in_memory = [model for model in self.models.values() if model.is_in_memory]
        stops = [model.process.stop(seconds) for model in in_memory]
        return all(await asyncio.gather(*stops))

    def view(self, model: Resident) -> dict[str, Any]:
        """What a model counts with, what its K/V may take, how long it has been idle and when it is
        put away; ``None`` where that does not apply.
        """
        now, is_idle = asyncio.get_running_loop().time(), model.is_idle
        ends = is_idle and not model.is_pinned and model.expires < math.inf
        return {
            "bytes": model.nbytes if model.is_in_memory else 0,
            "bytes_kv_budget": model.kv_nbytes if model.is_in_memory else 0,
            "idle_seconds": round(now - model.used, 1) if is_idle else None,
            "seconds_left": max(0.0, round(model.expires - now, 1)) if ends else None,
        }

    # Requests

    def _is_open(self, model: Resident) -> bool:
        """Whether a request may begin now."""
        return model.is_loaded and not model.is_leaving and model not in self._making_room

    def _admit(self, model: Resident) -> None:
        model.num_users += 1
        model.used = asyncio.get_running_loop().time()

    def _end_use(self, model: Resident) -> None:
        loop = asyncio.get_running_loop()
        model.num_users -= 1
        model.used = loop.time()
        if not model.num_users:
            model.expires = model.used + model.seconds_kept
            if 0 < model.seconds_kept < math.inf:
                loop.call_at(model.expires + _TICK, self._wake)
            self._wake()

    async def _wait_for(self, model: Resident) -> None:
        num_waiting = sum(len(each.waiting) for each in self._queue)
        if num_waiting >= self._max_waiting:
            what = f"{num_waiting} requests wait for models already; retry later"
            raise ApiError(503, what, code="too_many_waiting", headers={"Retry-After": "5"})
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiting.append(turn)
        self._queue.setdefault(model)
        self._wake()
        limit = asyncio.timeout(self._wait_seconds)
        try:
            async with limit:
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._end_use(model)  # It had its turn in the moment in which it gave up.
            self._wake()
            if limit.expired():
                raise self._no_room(model) from None
            raise

    def _refuse(self, model: Resident, error: BaseException) -> None:
        for turn in model.waiting:
            if not turn.done():
                turn.set_exception(error)
        model.waiting.clear()
        self._queue.pop(model, None)

    # Changes

    def _wake(self) -> None:
        """Make the changes that are due."""
        if not self._is_closed and (self._changing is None or self._changing.done()):
            # Outside of the request that has caused it, of which log lines would have the id.
            self._changing = asyncio.create_task(self._change(), context=Context())

    async def _change(self) -> None:
        while (change := self._next_change()) is not None:
            await change
            self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed.clear()

    def _next_change(self) -> Coroutine[Any, Any, None] | None:
        """The next change to be made; ``None`` if there is none, or it has to wait for answers."""
        for model in self.models.values():
            if model.is_leaving and not model.is_in_memory:  # Its process has ended by itself.
                model.is_leaving = False
                self._note_change()
            if model.is_loading and model.task is None:
                return self._end_load(model)
        if (excess := self._next_excess()) is not None:
            return self._put_away(*excess)
        self._let_all_in()
        # Which models have to make room is decided again: the others may go on.
        self._making_room = []
        for model in list(self._queue):
            if (change := self._way_in(model)) is not None or self._making_room:
                return change
        return None if self._is_shared_out else self._share_out()

    def _next_excess(self) -> tuple[Resident, str] | None:
        """A model that is to be put away although no other one waits for its room, and why."""
        idle = [each for each in self.models.values() if each.is_idle]
        now = asyncio.get_running_loop().time()
        for model in idle:
            if model.is_leaving:
                return model, "as asked"
            if model.expires <= now and not model.is_pinned:
                return model, "its time is over"
        in_memory = [each for each in self.models.values() if each.is_in_memory]
        unpinned = [each for each in idle if not each.is_pinned]
        if unpinned and len(in_memory) > 1 and not self._fits(in_memory):
            return min(unpinned, key=lambda each: each.used), "models take more than the budget"
        return None

    def _way_in(self, model: Resident) -> Coroutine[Any, Any, None] | None:
        """The next change on the way to a model that requests wait for; ``None`` if there is none,
        or others have to make room and answer.
        """
        if self._is_open(model):
            self._let_in(model)
        if model.is_in_memory or model.task is not None or not model.waiting:
            return None  # It may be leaving, and is loaded again afterwards.
        if model.need is None:
            model.task = asyncio.create_task(self._measure(model))
            return None
        leaving = self._those_that_leave(model)
        if leaving is None:
            self._refuse(model, self._no_room(model))
            return None
        if idle := [each for each in leaving if each.is_idle]:
            return self._put_away(idle[0], f"{model.name} needs its room")
        self._making_room = leaving
        return None if leaving else self._begin_load(model)

    def _let_all_in(self) -> None:
        """Let requests begin whose models are there, and forget models that none waits for."""
        for model in list(self._queue):
            model.waiting = [turn for turn in model.waiting if not turn.done()]
            if self._is_open(model) or not model.waiting:
                self._let_in(model)

    def _let_in(self, model: Resident) -> None:
        """Let the requests that wait for a model begin."""
        for turn in model.waiting:
            if not turn.done():
                self._admit(model)
                turn.set_result(None)
        model.waiting.clear()
        self._queue.pop(model, None)

    async def _measure(self, model: Resident) -> None:
        try:
            need = await model.process.measure()
            # One that has the memory for itself may have less K/V than others are given.
            most = max(self._kv_beside([need]), MIN_KV_CACHE_BYTES)
            model.need = replace(need, least_kv=min(need.least_kv, most))
        except Exception as error:
            self._refuse(model, error)
        finally:
            model.task = None
            self._wake()

    async def _put_away(self, model: Resident, why: str) -> None:
        model.is_leaving = True
        logger.info("%s is put away: %s", model.name, why)
        try:
            await model.process.stop()
        except Exception as error:
            logger.error("%s could not be put away: %s", model.name, one_line(error))
        finally:
            model.is_leaving = self._is_shared_out = False
            model.kv_nbytes, model.kept_kv, model.expires = 0, 0, math.inf

    async def _begin_load(self, model: Resident) -> None:
        """Take from idle models the K/V that a model needs, and begin to load it."""
        assert model.need is not None, "it was measured"
        others = [each for each in self.models.values() if each.is_in_memory]
        shares = self._shares([*others, model])
        for each in others:
            if each.is_loaded and shares[each] < each.kv_nbytes:
                await self._set_kv(each, shares[each])
        least = sum(each.kv_nbytes for each in others) + model.need.least_kv
        if least > self._kv_of([*others, model]):
            return  # A request has begun meanwhile, which keeps its K/V: see again who leaves.
        # No more until it is loaded, which may take long.
        model.is_loading, model.kv_nbytes, model.kept_kv = True, model.need.least_kv, 0
        model.task = asyncio.create_task(self._start(model))

    async def _start(self, model: Resident) -> None:
        assert model.need is not None, "it was measured"
        try:
            # What it may have alone is the limit of later changes.
            alone = self._kv_beside([model.need])
            await model.process.start(int(min(model.need.most_kv, alone)))
        except BaseException as error:
            model.is_loading, model.need, model.kv_nbytes = False, None, 0
            if not isinstance(error, Exception):
                raise
            self._refuse(model, error)
        finally:
            model.task, self._is_shared_out = None, False
            self._wake()

    async def _end_load(self, model: Resident) -> None:
        """Give a model that is loaded its share of K/V, and let its requests begin."""
        assert model.need is not None, "it was measured"
        await self._set_kv(model, model.kv_nbytes)
        await self._share_out()
        with suppress(ApiError, TimeoutError):  # It has ended; its requests see why.
            # By its own measure it may hold more than was computed.
            async with asyncio.timeout(_SECONDS_TO_CHANGE):
                held = await model.process.nbytes()
            weights = max(model.need.weights, held - PROCESS_NBYTES)
            model.need = replace(model.need, weights=weights)
            size, kv = format_nbytes(held), format_nbytes(model.kv_nbytes)
            logger.info("%s holds %s, and may have %s for K/V", model.name, size, kv)
        model.is_loading, model.expires = False, math.inf
        self._let_in(model)

    # Bytes

    def _kv_beside(self, needs: Iterable[Need]) -> int:
        """What K/V may take beside the weights and the activations of these models."""
        needs = list(needs)
        weights = sum(need.weights + PROCESS_NBYTES for need in needs)
        return self._share_of_kv(weights, sum(need.activations for need in needs))

    def _kv_of(self, models: Iterable[Resident]) -> int:
        return self._kv_beside(model.need for model in models if model.need is not None)

    def _fits(self, models: Iterable[Resident]) -> bool:
        models = list(models)
        return self._kv_of(models) >= sum(model.least_kv for model in models)

    def _those_that_leave(self, model: Resident) -> list[Resident] | None:
        """The models that have to leave for another, those that do not answer first, then the least
        recently used; ``None`` if that is not enough.
        """
        kept = [each for each in self.models.values() if each.is_in_memory]
        leaving: list[Resident] = []
        for each in sorted(kept, key=lambda each: (not each.is_idle, each.used)):
            if not each.is_pinned and not self._fits([*kept, model]):
                kept.remove(each)
                leaving.append(each)
        if not self._fits([*kept, model]):
            return None
        for each in reversed(leaving):  # Without a later one, an earlier one may not be enough.
            if self._fits([*kept, each, model]):
                kept.append(each)
        return [each for each in leaving if each not in kept]

    def _shares(self, models: Iterable[Resident]) -> dict[Resident, int]:
        """What the K/V of each of these models may take: the same, but at least what it needs and
        at most what is of use to it.
        """
        most_kv = [(model, model.need.most_kv) for model in models if model.need is not None]
        total = self._kv_of(model for model, _ in most_kv)

        def shares_of(level: int) -> list[int]:
            return [int(max(model.least_kv, min(level, most))) for model, most in most_kv]

        levels = range(max(0, total) + 1)
        level = bisect_right(levels, total, key=lambda level: sum(shares_of(level))) - 1
        return dict(zip((model for model, _ in most_kv), shares_of(level), strict=True))

    async def _share_out(self) -> None:
        """Give models in memory their shares: first those that lose something by it."""
        self._is_shared_out = True
        for gains in (False, True):
            shares = self._shares(each for each in self.models.values() if each.is_in_memory)
            for model, nbytes in shares.items():
                is_due = nbytes > model.kv_nbytes if gains else nbytes < model.kv_nbytes
                if is_due and model.process.state == "loaded":
                    await self._set_kv(model, nbytes)

    async def _set_kv(self, model: Resident, nbytes: int) -> None:
        """Set what the K/V of a model may take. It keeps more while requests need it."""
        try:
            async with asyncio.timeout(_SECONDS_TO_CHANGE):
                model.kv_nbytes = await model.process.shrink(nbytes)
        except Exception as error:
            # One that has ended holds nothing; another one may do it later, or may not.
            model.kv_nbytes = max(model.kv_nbytes, nbytes)
            what = one_line(error) or "it did not answer"
            logger.warning("the K/V of %s could not be changed: %s", model.name, what)
        model.kept_kv = model.kv_nbytes if model.kv_nbytes > nbytes else 0

    def _no_room(self, model: Resident) -> ApiError:
        """The error for a model that has no room, with the sum."""
        need = model.need
        if model.is_in_memory or need is None:
            what = f"{shown(model.name)} was not loaded within {self._wait_seconds:g} s"
            return ApiError(503, f"the model {what}; retry later", code="model_loading")
        others = [
            each
            for each in self.models.values()
            if each is not model and each.is_in_memory and (each.is_pinned or not each.is_idle)
        ]
        held = [
            f"{each.name} {format_nbytes(each.nbytes - each.kv_nbytes + each.least_kv)} "
            f"({'pinned' if each.is_pinned else 'answers' if each.num_users else 'is loading'})"
            for each in others
        ]
        left = format_nbytes(max(0, self._kv_of([*others, model])))
        what = (
            f"there is no room for the model {shown(model.name)}: it needs "
            f"{format_nbytes(need.nbytes)} (weights {format_nbytes(need.weights)}, activations "
            f"{format_nbytes(need.activations)}, its process {format_nbytes(PROCESS_NBYTES)}, K/V "
            f"at least {format_nbytes(need.least_kv)}), and the budget of all models is "
            f"{format_nbytes(self.budget)}, of which K/V may take {left} in all"
            f"{'; others hold ' if held else ''}{', '.join(held)}; retry later, or raise "
            "--memory-limit"
        )
        return ApiError(503, what, code="no_room", headers={"Retry-After": "10"})
