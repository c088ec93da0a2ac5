"""Clients that leave at any moment take everything along; slow readers slow nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from helpers.servers import RawClient, is_idle, make_service, serving, wait_until
from starlette.requests import ClientDisconnect

from mlx_paged.server import routes
from mlx_paged.server.app import App
from mlx_paged.server.errors import ApiError, until_disconnect
from mlx_paged.server.http.sse import EventStream, LineStream, event
from mlx_paged.server.service import MAX_PREPARING

LONG = {"prompt": "One two three", "max_tokens": 4000, "ignore_eos": True}
LONG_CHAT = {
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 4000,
    "ignore_eos": True,
}


def runs(service):
    return service.engine.stats().num_running > 0


def hold_steps(service, monkeypatch):
    """Let no step of the engine run until the event that this returns is set."""
    going_on, steps = threading.Event(), service.engine.engine.steps
    run = steps.run

    def held():
        assert going_on.wait(20)
        return run()

    monkeypatch.setattr(steps, "run", held)
    return going_on


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/completions", {**LONG, "n": 3, "temperature": 1}),
        ("/v1/completions", {**LONG, "prompt": ["One", "two", "three"]}),
        ("/v1/chat/completions", LONG_CHAT),
    ],
)
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_in_the_middle_of_an_answer_aborts_it(
    server_url, service, path, body, is_streamed
):
    client = RawClient(server_url, path, {**body, "stream": is_streamed})
    wait_until(lambda: runs(service))
    if is_streamed:
        client.read_until(b"data: ")
    client.leave()
    # 4,000 tokens would take many seconds.
    wait_until(lambda: is_idle(service), seconds=5)


def test_a_client_that_leaves_while_its_prompt_is_encoded_starts_nothing(
    server_url, service, monkeypatch
):
    begun, go_on = threading.Event(), threading.Event()
    prepare = routes.prepare

    def slow(*arguments):
        begun.set()
        assert go_on.wait(20)
        return prepare(*arguments)

    monkeypatch.setattr(routes, "prepare", slow)
    started = []
    monkeypatch.setattr(
        service.engine, "generate", lambda *arguments, **options: started.append(arguments)
    )
    client = RawClient(server_url, "/v1/chat/completions", LONG_CHAT)
    assert begun.wait(20)
    client.leave()
    time.sleep(0.1)
    go_on.set()
    time.sleep(0.1)
    assert started == []


def test_a_client_that_leaves_before_the_first_token_aborts(server_url, service, monkeypatch):
    going_on = hold_steps(service, monkeypatch)
    client = RawClient(server_url, "/v1/completions", {**LONG, "stream": True})
    wait_until(lambda: service.engine.engine.has_unfinished_requests())
    client.leave()
    time.sleep(0.1)
    going_on.set()
    wait_until(lambda: is_idle(service) and not service.engine._receivers)


def test_a_stream_begins_without_a_first_token_that_takes_long(monkeypatch):
    monkeypatch.setattr(EventStream, "max_pause", 0.02)
    service = replace(make_service(), first_part_seconds=0.02)
    going_on = hold_steps(service, monkeypatch)
    with service.engine, serving(App(service)) as url:
        client = RawClient(url, "/v1/completions", {"prompt": "a", "stream": True})
        begin = client.read_until(b": the answer is on its way")
        assert begin.startswith(b"HTTP/1.1 200") and b"data:" not in begin
        going_on.set()
        client.read_until(b"data: [DONE]")
        client.leave()


def test_clients_that_come_and_vanish_leave_nothing(server_url, service):
    num_threads = threading.active_count()
    for round_ in range(3):
        clients = [
            RawClient(
                server_url,
                "/v1/completions",
                {**LONG, "stream": bool(number % 2), "prompt": f"Text {round_} {number}"},
            )
            for number in range(16)
        ]
        time.sleep(0.02 * round_)
        for client in clients:
            client.leave()
    wait_until(lambda: is_idle(service) and not service.engine._receivers)
    assert threading.active_count() <= num_threads + MAX_PREPARING


@pytest.mark.slow
def test_a_slow_reader_slows_nobody(server_url, service, client):
    # Its answer is longer than what the kernel keeps for it, so the server has to wait with it.
    body = {**LONG, "stream": True, "n": 4, "logprobs": 20, "max_tokens": 400}
    slow = RawClient(server_url, "/v1/completions", body)
    wait_until(lambda: runs(service))
    answers = [
        client.completions.create(
            model="demo", prompt=f"Text {number}", max_tokens=5, extra_body={"ignore_eos": True}
        )
        for number in range(3)
    ]
    assert all(answer.usage.completion_tokens == 5 for answer in answers)
    # The engine is done with the slow one, though nobody has read its answer.
    wait_until(lambda: is_idle(service), seconds=60)
    text = slow.read_until(b"[DONE]", seconds=60)
    assert text.count(b'"finish_reason":"length"') == 4
    slow.leave()


# The parts


def test_work_is_cancelled_when_the_client_leaves_and_not_before():
    async def main():
        left, ended = asyncio.Event(), []

        async def receive():
            await left.wait()
            return {"type": "http.disconnect"}

        async def work():
            try:
                await asyncio.sleep(20)
            finally:
                ended.append("work")

        assert await until_disconnect(receive, asyncio.sleep(0, "done")) == "done"
        with pytest.raises(ZeroDivisionError):
            await until_disconnect(receive, fail())
        asyncio.get_running_loop().call_later(0.01, left.set)
        with pytest.raises(ClientDisconnect):
            await until_disconnect(receive, work())
        assert ended == ["work"]
        outer = asyncio.create_task(until_disconnect(asyncio.Event().wait, work()))
        await asyncio.sleep(0.01)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert ended == ["work"] * 2

    async def fail():
        return 1 // 0

    asyncio.run(main())


class Source:
    def __init__(self):
        self.is_closed = False

    async def aclose(self):
        self.is_closed = True


def send_stream(stream, path="/v1/chat/completions", leaves_at=None, told=None):
    """The bodies that a stream sends, to a client that leaves at a number of them.

    Args:
        told: a list that gets each of them at once.
    """

    async def main():
        left, bodies = asyncio.Event(), [] if told is None else told

        async def receive():
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            bodies.append(message.get("body"))
            if len(bodies) == leaves_at:
                left.set()
                await asyncio.sleep(20)  # until it is cancelled

        await asyncio.wait_for(stream({"path": path}, receive, send), 20)
        return bodies

    return asyncio.run(main())


def test_a_stream_closes_what_it_is_made_of_however_it_ends():
    async def events():
        try:
            for number in range(3):
                await asyncio.sleep(0)
                yield event({"number": number})
        finally:
            closed.append("events")

    for leaves_at, num_bodies in ((None, 5), (2, 2), (1, 1)):
        closed, source = [], Source()
        bodies = send_stream(EventStream(events(), source), leaves_at=leaves_at)
        assert len(bodies) == num_bodies
        assert source.is_closed
        assert closed == ["events"] or leaves_at == 1


@pytest.mark.parametrize(
    ("path", "first_line"),
    [
        ("/v1/completions", b'data: {"error":'),
        ("/v1/messages", b"event: error\ndata: {"),
        ("/v1/responses", b'event: error\ndata: {"type":"error",'),
    ],
)
def test_an_error_in_the_middle_of_a_stream_is_its_last_event(path, first_line):
    async def events(error):
        yield event({"number": 1})
        raise error

    *_, last, end = send_stream(EventStream(events(ApiError(503, "It is over."))), path)
    assert last.startswith(first_line) and b"It is over." in last and end == b""
    *_, last, end = send_stream(EventStream(events(KeyError("a secret"))), path)
    assert last.startswith(first_line) and b"secret" not in last


def test_an_error_in_the_middle_of_lines_is_the_last_of_them():
    async def events():
        yield LineStream.encode({"number": 1})
        raise ApiError(503, "It is over.")

    *_, first, last, end = send_stream(LineStream(events()), "/api/chat")
    assert (first, last, end) == (b'{"number":1}\n', b'{"error":"It is over."}\n', b"")


def test_a_stream_without_events_says_that_it_lives(monkeypatch):
    monkeypatch.setattr(EventStream, "max_pause", 0.02)

    bodies = []

    async def events():
        while len(bodies) < 3:
            await asyncio.sleep(0.01)
        yield event({"number": 1})

    _, *comments, last, end = send_stream(EventStream(events()), told=bodies)
    assert len(comments) >= 2 and all(each.startswith(b": ") for each in comments)
    assert last == b'data: {"number":1}\n\n' and end == b""
    # Where no line may be a comment, spaces come before the next one.
    bodies.clear()
    _, *spaces, last, end = send_stream(LineStream(events()), told=bodies)
    assert len(spaces) >= 2 and set(spaces) == {b" "}


def test_events_are_one_line_each():
    assert event({"a": "x\ny é"}) == 'data: {"a":"x\\ny é"}\n\n'.encode()
    assert event({"type": "ping"}) == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert event({"a": "\ud800"}) == b'data: {"a":"?"}\n\n'
