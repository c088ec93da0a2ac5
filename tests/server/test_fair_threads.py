"""Threads that no user can hold all of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from helpers.servers import wait_until

from mlx_paged.server.prompt_threads import CancelledWorkError, FairThreads, Work


def waits_for(event: threading.Event) -> Callable[[Work], None]:
    def call(work: Work) -> None:
        assert event.wait(20)

    return call


def test_one_user_leaves_threads_to_the_others():
    threads, go_on, ran = FairThreads("test", 4, 2), threading.Event(), []
    held = [threads.submit("first", waits_for(go_on)) for _ in range(10)]
    # It has more than one as long as it is alone.
    wait_until(lambda: sum(each.future.running() for each in held) == 2)
    for user in ("second", "third"):
        work = threads.submit(user, lambda _, user=user: ran.append(user))
        work.future.result(20)
    assert ran == ["second", "third"]
    assert sum(each.future.running() for each in held) == 2
    go_on.set()
    assert [each.future.result(20) for each in held] == [None] * 10
    wait_until(lambda: not threads._running)
    assert not threads._queues


def test_users_take_turns_and_each_is_served_in_its_order():
    threads, go_on, ran = FairThreads("test", 1, 1), threading.Event(), []
    first = threads.submit("first", waits_for(go_on))
    works = [
        threads.submit(user, lambda _, user=user, number=number: ran.append((user, number)))
        for user in ("first", "second", "third")
        for number in range(3)
    ]
    go_on.set()
    for each in (first, *works):
        each.future.result(20)
    assert ran == [(user, n) for n in range(3) for user in ("first", "second", "third")]


def test_a_user_has_one_thread_while_others_are_there():
    now = [100.0]
    threads, go_on = FairThreads("test", 4, 2, clock=lambda: now[0]), threading.Event()
    threads.submit("second", lambda _: None).future.result(20)
    held = [threads.submit("first", waits_for(go_on)) for _ in range(3)]
    wait_until(lambda: held[0].future.running())
    assert not held[1].future.running()
    now[0] += 11  # The other one has left.
    held.append(threads.submit("first", waits_for(go_on)))
    wait_until(lambda: held[1].future.running())
    assert not held[2].future.running()
    go_on.set()
    assert [each.future.result(20) for each in held] == [None] * 4


def test_long_work_is_followed_by_a_pause_while_others_are_there():
    now, pauses = [100.0], []
    threads = FairThreads("test", 2, 2, clock=lambda: now[0], sleep=pauses.append)

    def takes(seconds: float) -> Callable[[Work], None]:
        def call(work: Work) -> None:
            now[0] += seconds

        return call

    def ask(user: str, seconds: float) -> None:
        threads.submit(user, takes(seconds)).future.result(20)
        wait_until(lambda: not threads._running)

    ask("first", 0.5)  # alone
    ask("second", 0.002)  # short
    assert pauses == []
    ask("first", 0.102)
    ask("first", 5)
    assert pauses == [pytest.approx(0.3), 1.0]


def test_work_that_is_cancelled_is_left_out_or_ends_where_it_asks():
    threads, begun, go_on, ended = FairThreads("test", 1, 1), *(threading.Event() for _ in "123")
    ran = []

    def asks(work: Work) -> None:
        begun.set()
        assert go_on.wait(20)
        try:
            work.check()
        except CancelledWorkError:
            ended.set()
            raise

    async def main() -> None:
        running = asyncio.create_task(threads.run("user", asks))
        await asyncio.to_thread(begun.wait, 20)
        waiting = asyncio.create_task(threads.run("user", lambda _: ran.append("waiting")))
        await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        done = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(each) for each in done] == [asyncio.CancelledError] * 2
        go_on.set()
        assert await threads.run("user", lambda _: 7) == 7

    asyncio.run(main())
    assert ended.is_set() and ran == []


def test_errors_are_those_of_the_work():
    def fails(work: Work) -> None:
        raise KeyError("x")

    threads = FairThreads("test", 1, 1)
    with pytest.raises(KeyError, match="x"):
        asyncio.run(threads.run("user", fails))
    assert asyncio.run(threads.run("user", lambda _: 1)) == 1
