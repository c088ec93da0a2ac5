"""Which models are in memory: room, order, time and failures, with processes that only count."""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest

from mlx_paged.router.model_process import PROCESS_NBYTES, Need
from mlx_paged.router.residency import Residency, Resident
from mlx_paged.server.errors import ApiError

MB = 2**20
LOAD_SECONDS, STOP_SECONDS = 3.0, 1.0


class PlantedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves on only when nothing else is to be done."""

    class _Selector(selectors.SelectSelector):
        def select(self, timeout: float | None = None) -> Any:
            assert timeout is not None, "everything waits, and nothing will end that"
            PlantedLoop.now += timeout
            return super().select(0)

    now = 0.0

    def __init__(self) -> None:
        super().__init__(self._Selector())

    def time(self) -> float:
        return PlantedLoop.now


def run(main: Coroutine[Any, Any, None]) -> None:
    PlantedLoop.now = 1000.0
    with asyncio.Runner(loop_factory=PlantedLoop) as runner:
        runner.run(main)


class World:
    """Processes on one machine, and what they hold together."""

    def __init__(self, budget: int = 1000 * MB, **options: Any) -> None:
        self.budget, self.options = budget, options
        self.processes: dict[str, FakeProcess] = {}
        self.log: list[str] = []
        self.most = 0
        self.residents: list[Resident] = []

    def add(self, name: str, weights: int = 100 * MB, **settings: Any) -> FakeProcess:
        """A model that needs 100 MB of K/V at least."""
        process = self.processes[name] = FakeProcess(name, self, weights)
        process.need = settings.pop("need", process.need)
        self.residents.append(Resident(process, **settings))  # type: ignore[arg-type]
        return process

    def residency(self) -> Residency:
        def share_of_kv(weights: int, activations: int) -> int:
            return self.budget - weights - activations

        return Residency(self.residents, self.budget, share_of_kv, **self.options)

    def check(self) -> None:
        """Never above the budget: with all K/V that a process may take."""
        held = sum(each.held for each in self.processes.values())
        self.most = max(self.most, held)
        assert held <= self.budget, self.log


class FakeProcess:
    def __init__(self, name: str, world: World, weights: int) -> None:
        self.name, self.world, self.weights = name, world, weights
        self.need = Need(weights, 0, 100 * MB)
        self.load_seconds = LOAD_SECONDS
        self.state = "unloaded"
        self.kv = self.num_loads = self.num_running = 0
        self.error: Exception | None = None
        self.own = PROCESS_NBYTES
        self.keeps_kv = False

    @property
    def held(self) -> int:
        return self.weights + self.own + self.kv if self.state in ("loading", "loaded") else 0

    async def measure(self) -> Need:
        self.world.log.append(f"measure {self.name}")
        return self.need

    async def start(self, kv_nbytes: int) -> None:
        assert self.state in ("unloaded", "failed")
        self.world.log.append(f"load {self.name}")
        self.state = "loading"
        self.num_loads += 1
        self.world.check()
        self.end = asyncio.Event()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.end.wait(), self.load_seconds)
            self.state = "unloaded"
            raise ApiError(503, "it is being unloaded")
        if self.error is not None:
            self.state = "failed"
            raise self.error
        self.state = "loaded"

    async def stop(self, seconds: float | None = None) -> bool:
        assert not self.num_running, f"{self.name} answers"
        self.end.set()
        self.world.log.append(f"stop {self.name}")
        await asyncio.sleep(STOP_SECONDS)
        self.state, self.kv = "unloaded", 0
        return True

    async def shrink(self, kv_nbytes: int) -> int:
        await asyncio.sleep(0)
        if kv_nbytes > self.kv or not (self.num_running or self.keeps_kv):
            self.kv = kv_nbytes
        self.world.check()
        return self.kv

    async def nbytes(self) -> int:
        return self.weights + self.own


async def ask(residency: Residency, name: str, seconds: float = 10.0, **use: Any) -> str:
    """A request whose answer takes these seconds; its answer."""
    async with residency.use(name, **use) as process:
        fake: Any = process
        assert fake.state == "loaded"
        fake.num_running += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            fake.num_running -= 1
        return f"{name} says"


def test_a_model_is_loaded_once_for_all_that_wait_and_stays():
    world = World()
    a = world.add("a")
    residency = world.residency()

    async def main() -> None:
        assert await asyncio.gather(*(ask(residency, "a") for _ in range(5))) == ["a says"] * 5
        assert PlantedLoop.now == 1000 + LOAD_SECONDS + 10
        await ask(residency, "a", keep_alive=60.0)
        assert world.log == ["measure a", "load a"] and a.kv == 1000 * MB - 356 * MB
        await asyncio.sleep(20)
        assert residency.view(residency.models["a"]) == {
            "bytes": 1000 * MB,
            "bytes_kv_budget": a.kv,
            "idle_seconds": 20,
            "seconds_left": 40,
        }
        with pytest.raises(KeyError):
            await ask(residency, "b")
        await residency.close()
        assert a.state == "unloaded"

    run(main())


def test_idle_models_give_back_kv_first_and_then_the_least_recently_used_one_leaves():
    world = World(1200 * MB)
    a, b, c = (world.add(name) for name in "abc")
    residency = world.residency()

    async def main() -> None:
        await ask(residency, "a")
        assert a.kv == (1200 - 356) * MB
        await ask(residency, "b")
        assert a.kv == b.kv == (1200 - 2 * 356) // 2 * MB
        await ask(residency, "a")
        await ask(residency, "c")
        assert world.log[-2:] == ["stop b", "load c"]
        assert a.kv == c.kv == 244 * MB and b.held == 0
        await residency.unload("a")
        await asyncio.sleep(0.1)
        assert c.kv == (1200 - 356) * MB

    run(main())


def test_what_answers_is_never_put_away_and_new_requests_for_it_wait_their_turn():
    world = World(600 * MB)
    world.add("a")
    world.add("b")
    residency = world.residency()
    ends: list[tuple[str, float]] = []

    async def client(name: str, begin: float, seconds: float) -> None:
        await asyncio.sleep(begin)
        await ask(residency, name, seconds)
        ends.append((name, PlantedLoop.now - 1000))

    async def main() -> None:
        # The second one for "a" comes while "b" waits, and does not keep "a" in memory.
        await asyncio.gather(client("a", 0, 100), client("b", 20, 5), client("a", 30, 1))
        swap = LOAD_SECONDS + STOP_SECONDS
        assert ends == [
            ("a", 103),
            ("b", 103 + swap + 5),
            ("a", 103 + swap + 5 + swap + 1),
        ]

    run(main())


def test_a_request_that_gives_up_leaves_nothing_and_lets_the_others_in():
    world = World(600 * MB)
    a, b = world.add("a"), world.add("b")
    residency = world.residency()

    async def main() -> None:
        first = asyncio.create_task(ask(residency, "a", 100))
        await asyncio.sleep(10)
        waiting = asyncio.create_task(ask(residency, "b"))
        await asyncio.sleep(10)
        behind = asyncio.create_task(ask(residency, "a", 1))
        await asyncio.sleep(10)
        assert not behind.done()
        waiting.cancel()
        assert await behind == "a says" and not first.done()
        await first
        assert b.num_loads == 0 and a.num_loads == 1
        assert all(not model.num_users for model in residency.models.values())

    run(main())


@pytest.mark.parametrize("num_ticks", range(6))
def test_a_request_that_is_cancelled_as_its_turn_comes_holds_nothing(num_ticks: int):
    world = World()
    world.add("a")
    residency = world.residency()

    async def main() -> None:
        task = asyncio.create_task(ask(residency, "a"))
        await asyncio.sleep(LOAD_SECONDS)
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(LOAD_SECONDS)
        assert residency.models["a"].num_users == 0 and not residency._queue
        await residency.unload("a")

    run(main())


def test_no_room_is_refused_with_the_sum():
    world = World(1000 * MB, wait_seconds=60, max_waiting=1)
    world.add("pinned", is_pinned=True, weights=300 * MB)
    world.add("large", weights=2000 * MB)
    world.add("other", weights=300 * MB)
    world.add("third")
    residency = world.residency()

    async def main() -> None:
        await residency.load("pinned")
        with pytest.raises(ApiError) as at_once:
            await ask(residency, "large")
        assert at_once.value.status == 503 and at_once.value.code == "no_room"
        assert "needs 2.4 GB (weights 2.1 GB" in str(at_once.value)
        assert "budget of all models is 1.0 GB" in str(at_once.value)
        assert "others hold pinned 0.7 GB (pinned)" in str(at_once.value)
        with pytest.raises(ApiError, match="no room for the model 'other'"):
            await ask(residency, "other")
        await residency.unload("pinned")
        busy = asyncio.create_task(ask(residency, "other", 100))
        await asyncio.sleep(10)
        waiting = asyncio.create_task(ask(residency, "third"))
        await asyncio.sleep(10)
        with pytest.raises(ApiError, match="1 requests wait for models already") as many:
            await ask(residency, "pinned")
        assert many.value.code == "too_many_waiting"
        with pytest.raises(ApiError, match=r"others hold other 1.0 GB \(answers\); retry later"):
            await waiting
        await busy

    run(main())


def test_models_leave_after_their_own_time_or_that_of_the_last_request():
    world = World()
    a = world.add("a", keep_alive=60.0)
    b = world.add("b", keep_alive=math.inf)
    pinned = world.add("c", keep_alive=1.0, is_pinned=True, weights=MB)
    residency = world.residency()
    world.budget = residency.budget = 3000 * MB

    async def main() -> None:
        for name in "bca":
            await ask(residency, name)
        await asyncio.sleep(50)
        assert a.state == "loaded"
        await asyncio.sleep(12)
        assert [a.state, b.state, pinned.state] == ["unloaded", "loaded", "loaded"]
        await ask(residency, "b", keep_alive=0.0)
        await asyncio.sleep(2)
        assert b.state == "unloaded"
        await ask(residency, "a", keep_alive=math.inf)
        await asyncio.sleep(1000)
        assert a.state == "loaded"
        # One that is still answering keeps it, and the one that began last decides.
        slow = asyncio.create_task(ask(residency, "a", 100, keep_alive=math.inf))
        await asyncio.sleep(1)
        await ask(residency, "a", 1, keep_alive=5.0)
        await asyncio.sleep(50)
        assert a.state == "loaded"
        await slow
        await asyncio.sleep(4)
        assert a.state == "loaded"
        await asyncio.sleep(3)
        assert a.state == "unloaded"

    run(main())


def test_a_load_that_fails_is_an_error_for_its_own_requests_and_leaves_room():
    world = World(600 * MB)
    world.add("a")
    broken = world.add("broken")
    residency = world.residency()

    async def main() -> None:
        await ask(residency, "a")
        broken.error = ApiError(500, "no weights")
        results = await asyncio.gather(
            *(ask(residency, name) for name in ("broken", "a", "broken", "a")),
            return_exceptions=True,
        )
        assert [str(each) for each in results] == ["no weights", "a says"] * 2
        unloading = asyncio.create_task(residency.load("broken"))
        await asyncio.sleep(STOP_SECONDS + 1)
        await residency.unload("broken")  # while it is being loaded
        with pytest.raises(ApiError, match="is being unloaded"):
            await unloading
        broken.error = None
        assert await ask(residency, "broken") == "broken says"

    run(main())


def test_a_load_that_hangs_keeps_no_other_model_out_and_can_be_ended():
    world = World(1000 * MB)
    world.add("a")
    b, c = world.add("b"), world.add("c")
    b.load_seconds = 10**6
    residency = world.residency()

    async def main() -> None:
        hanging = asyncio.create_task(ask(residency, "b"))
        await asyncio.sleep(100)
        assert await ask(residency, "a") == "a says"
        waiting = asyncio.create_task(ask(residency, "c"))
        await asyncio.sleep(100)
        assert await waiting == "c says" and world.log[-2:] == ["stop a", "load c"]
        await residency.unload("b")
        with pytest.raises(ApiError, match="is being unloaded"):
            await hanging
        assert b.held == 0 and c.state == "loaded"

    run(main())


def test_a_process_that_ends_by_itself_is_loaded_again_and_nothing_waits_for_it():
    world = World(600 * MB)
    a = world.add("a")
    world.add("b")
    residency = world.residency()

    async def main() -> None:
        answering = asyncio.create_task(ask(residency, "a", 50))
        await asyncio.sleep(10)
        unloading = asyncio.create_task(residency.unload("a"))
        waiting = asyncio.create_task(ask(residency, "b"))
        await asyncio.sleep(10)
        a.state, a.kv = "failed", 0
        await answering
        await unloading
        assert await waiting == "b says"
        assert await ask(residency, "a") == "a says"

    run(main())


def test_a_model_that_holds_more_than_was_computed_counts_with_that():
    world = World(1000 * MB)
    a, b = world.add("a"), world.add("b")
    a.own += 200 * MB
    residency = world.residency()

    async def main() -> None:
        await ask(residency, "b")
        world.budget = 10**12  # It does not know yet.
        await ask(residency, "a")
        world.budget = 1000 * MB
        await asyncio.sleep(STOP_SECONDS)
        assert [a.state, b.state] == ["loaded", "unloaded"]
        await ask(residency, "b")
        assert a.state == "unloaded"

    residency._share_of_kv = lambda weights, activations: 1000 * MB - weights - activations
    run(main())


def test_kv_that_a_process_does_not_give_back_stay_its_own():
    world = World(1000 * MB)
    a, b = world.add("a"), world.add("b")
    residency = world.residency()

    async def main() -> None:
        await ask(residency, "a")
        a.keeps_kv = True
        await ask(residency, "b")
        assert world.log[-2:] == ["stop a", "load b"] and b.kv == (1000 - 356) * MB

    run(main())


def test_a_process_that_does_not_answer_keeps_its_kv_and_holds_up_no_other_for_long():
    world = World(1200 * MB)
    a = world.add("a")
    world.add("b")
    residency = world.residency()

    async def main() -> None:
        await ask(residency, "a")
        a.shrink = lambda kv_nbytes: asyncio.sleep(10**6)  # type: ignore[assignment,method-assign]
        begin = PlantedLoop.now
        await ask(residency, "b", 1)
        assert world.log[-2:] == ["stop a", "load b"] and PlantedLoop.now < begin + 60

    run(main())


def test_a_budget_that_the_user_has_chosen_is_neither_more_nor_less():
    world = World(3000 * MB)
    chosen = Need(100 * MB, 0, 150 * MB, 150 * MB)
    a, b = world.add("a", need=chosen), world.add("b")
    residency = world.residency()

    async def main() -> None:
        await ask(residency, "a")
        assert a.kv == 150 * MB
        await ask(residency, "b")
        assert (a.kv, b.kv) == (150 * MB, (3000 - 712 - 150) * MB)

    run(main())


def test_all_stop_at_the_end_and_those_that_wait_are_told():
    world = World(600 * MB)
    a, b = world.add("a"), world.add("b")
    residency = world.residency()

    async def main() -> None:
        await ask(residency, "a")
        waiting = asyncio.create_task(ask(residency, "b"))
        await asyncio.sleep(STOP_SECONDS + 1)
        assert b.state == "loading"
        b.state = "unloaded"  # Its start is cancelled, and kills it.
        await residency.close()
        with pytest.raises(ApiError, match="shutting down"):
            await waiting
        assert [a.state, b.state] == ["unloaded", "unloaded"]

    run(main())


@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_requests_for_ten_models_in_any_order_are_all_answered(seed: int):
    """On room for two or three models, with clients that leave and processes that die."""
    rng = random.Random(seed)
    world = World(1100 * MB)
    names = [f"m{index}" for index in range(10)]
    for name in names:
        world.add(name, rng.randrange(10, 250) * MB, keep_alive=rng.choice([0.0, 50.0, math.inf]))
    residency = world.residency()
    outcomes: list[str] = []

    async def client(index: int) -> None:
        name = rng.choice(names)
        await asyncio.sleep(rng.random() * 200)
        task = asyncio.create_task(ask(residency, name, rng.random() * 10))
        if index % 9 == 0:
            await asyncio.sleep(rng.random() * 20)
            task.cancel()
        try:
            answer = await task
        except asyncio.CancelledError:
            outcomes.append("left")
        else:
            assert answer == f"{name} says"
            outcomes.append("answered")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(100):
                group.create_task(client(index))
        assert len(outcomes) == 100 and outcomes.count("answered") >= 88
        await asyncio.sleep(100)
        models = residency.models.values()
        assert not residency._queue and not residency._making_room
        assert all(not (model.num_users or model.waiting) for model in models)
        await residency.close()
        assert {process.state for process in world.processes.values()} == {"unloaded"}
        assert 600 * MB < world.most <= 1100 * MB

    run(main())
