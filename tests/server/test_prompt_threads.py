"""Threads that no user can hold all of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from mlx_paged.server import prompt_threads
from mlx_paged.server.prompt_threads import CancelledWorkError, PromptThreads, Work


def waits_for(event: threading.Event) -> Callable[[Work], None]:
    def call(work: Work) -> None:
        assert event.wait(20)

    return call


def test_one_user_leaves_threads_to_the_others():
    go_on, ran = threading.Event(), []

    async def main() -> None:
        threads = PromptThreads("test", 4, 2)
        held = [asyncio.create_task(threads.run("first", waits_for(go_on))) for _ in range(10)]
        for user in ("second", "third"):
            await threads.run(user, lambda _, user=user: ran.append(user))
        assert ran == ["second", "third"]
        assert not any(each.done() for each in held)
        go_on.set()
        assert await asyncio.gather(*held) == [None] * 10

    asyncio.run(main())


def test_users_take_turns_and_each_is_served_in_its_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_threads, "PAUSE_RATIO", 0)
    go_on, ran = threading.Event(), []

    async def main() -> None:
        threads = PromptThreads("test", 1, 1)
        first = asyncio.create_task(threads.run("first", waits_for(go_on)))
        works = [
            asyncio.create_task(
                threads.run(user, lambda _, user=user, number=number: ran.append((user, number)))
            )
            for user in ("first", "second", "third")
            for number in range(3)
        ]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(first, *works)

    asyncio.run(main())
    for user in ("first", "second", "third"):
        assert [number for name, number in ran if name == user] == [0, 1, 2]
    # No user is served twice before each was served once.
    assert {user for user, _ in ran[:3]} == {"first", "second", "third"}


def test_long_work_is_followed_by_a_pause_while_others_are_there(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        threads, pauses, loop = PromptThreads("test", 2, 2), [], asyncio.get_running_loop()
        monkeypatch.setattr(
            loop, "call_later", lambda seconds, call: pauses.append((seconds, call))
        )

        async def work_of(user: str, seconds: float) -> None:
            while not threads._turns[user].locked():
                await threads._turns[user].acquire()
            threads._last_asked[user] = loop.time()
            threads._end_turn(user, seconds)

        await work_of("first", 5)
        assert pauses == [] and not threads._turns["first"].locked()  # alone
        for seconds in (0.002, 0.102, 5):
            await work_of("second", seconds)
            pause, release = pauses.pop()
            assert pause == pytest.approx(min(6 * (seconds - 0.002), 1))
            assert threads._turns["second"].locked()
            release()
        now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now + 11)
        await work_of("second", 5)
        assert pauses == []  # The other one has left.

    asyncio.run(main())


def test_a_user_keeps_a_turn_until_its_thread_is_free():
    begun, go_on, ended = (threading.Event() for _ in "123")
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
        threads = PromptThreads("test", 1, 1)
        running = asyncio.create_task(threads.run("user", asks))
        await asyncio.to_thread(begun.wait, 20)
        waiting = asyncio.create_task(threads.run("user", lambda _: ran.append("waiting")))
        await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        done = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(each) for each in done] == [asyncio.CancelledError] * 2
        last = asyncio.create_task(threads.run("user", lambda _: 7))
        await asyncio.sleep(0.01)
        assert not last.done()
        go_on.set()
        assert await last == 7

    asyncio.run(main())
    assert ended.is_set() and ran == []


def test_errors_are_those_of_the_work():
    def fails(work: Work) -> None:
        raise KeyError("x")

    async def main() -> int:
        threads = PromptThreads("test", 1, 1)
        with pytest.raises(KeyError, match="x"):
            await threads.run("user", fails)
        return await threads.run("user", lambda _: 1)

    assert asyncio.run(main()) == 1
