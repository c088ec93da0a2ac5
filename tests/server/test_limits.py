"""Bodies, heads and JSON that are too large, too deep, too slow or broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any

import pytest
from helpers.asgi import ask, asked, echo

from mlx_paged.server import schemas
from mlx_paged.server.errors import ApiError
from mlx_paged.server.http import limits
from mlx_paged.server.http.access import Principal
from mlx_paged.server.http.limits import Limits
from mlx_paged.server.schemas import check_json, parse_json


def test_a_body_passes_as_it_came_in_any_chunks():
    app = Limits(echo, max_body_bytes=1000)
    body = json.dumps({"text": 'a "quoted" \\ text', "numbers": [1, -2.5e3]}).encode()
    for size in (1, 7, 1000):
        chunks = [body[start : start + size] for start in range(0, len(body), size)]
        assert ask(app, "POST", "/", {}, chunks).body == body
    assert ask(app, "POST", "/", {"content-length": str(len(body))}, [body]).body == body
    assert ask(app, "POST", "/", {}, [b""]).body == b""
    assert app._nbytes_held.total() == 0


@pytest.mark.parametrize(
    ("headers", "chunks"),
    [
        ({"content-length": "1001"}, [b"x"]),
        ({"content-length": "9" * 5000}, [b"x"]),
        ({"content-length": "-1"}, [b"x"]),
        ({}, [b"x" * 500] * 3),
        ({"transfer-encoding": "chunked"}, [b"x"] * 1001),
    ],
)
def test_a_body_that_is_too_large_is_refused_before_it_is_whole(
    headers: dict[str, str], chunks: list[bytes]
):
    app = Limits(echo, max_body_bytes=1000)
    answered = ask(app, "POST", "/v1/messages", headers, chunks, leaves=True)
    assert answered.status == 413
    assert answered.json["error"] == {
        "type": "request_too_large",
        "message": "the body of a request may have at most 1,000 bytes; the server's "
        "--max-body-bytes changes that",
    }
    assert app._nbytes_held.total() == 0


def test_a_client_that_leaves_in_its_body_is_not_answered():
    app = Limits(echo, max_body_bytes=1000)
    answered = ask(app, "POST", "/", {}, [b"[1,"], leaves=True)
    assert answered.status == 0
    assert app._nbytes_held.total() == 0


def test_a_slow_body_is_given_up_and_many_large_ones_take_turns(monkeypatch):
    monkeypatch.setattr(limits, "MAX_BODIES", 2)

    async def run() -> list[int]:
        app = Limits(echo, max_body_bytes=1000, body_seconds=0.2)
        slow = [
            asyncio.create_task(waits_in_body(app)) for _ in range(3)
        ]  # two thirds of what may be held
        await asyncio.sleep(0.05)
        refused = (await asked(app, "POST", "/", {}, [b" " * 900])).status
        answered = (await asked(app, "POST", "/", {}, [b" " * 100])).status
        return [refused, answered, *[await each for each in slow]]

    async def waits_in_body(app: Limits) -> int:
        statuses = []
        messages = [{"type": "http.request", "body": b" " * 500, "more_body": True}]

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.Event().wait()

        async def send(message):
            statuses.append(message.get("status"))

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "query_string": b"",
            "headers": [],
        }
        await app(scope, receive, send)
        return statuses[0]

    assert asyncio.run(run()) == [503, 200, 408, 408, 408]


@pytest.mark.parametrize(
    ("names", "statuses"),
    [
        # Alone, a user has all of it; beside others, half of it.
        (["-", "-", "-"], [200, 200, 503]),
        (["first", "first"], [200, 503]),
        (["first", "second", "third"], [200, 200, 503]),
    ],
)
def test_a_body_counts_until_it_is_answered_and_no_user_takes_all_of_it(
    monkeypatch: pytest.MonkeyPatch, names: list[str], statuses: list[int]
):
    monkeypatch.setattr(limits, "MAX_BODIES", 2)

    async def run() -> None:
        answering, app = asyncio.Event(), Limits(echo, max_body_bytes=1000)

        async def send_all(name: str) -> Any:
            principal = Principal(name, is_alone=name == "-")
            return await asked(app, "POST", "/", {}, [b" " * 900], state={"principal": principal})

        async def answer_when_told(scope: Any, receive: Any, send: Any) -> None:
            await answering.wait()
            await echo(scope, receive, send)

        app._app = answer_when_told
        tasks = [asyncio.create_task(send_all(name)) for name in names]
        refused = [task for task, status in zip(tasks, statuses, strict=True) if status == 503]
        await asyncio.wait(refused)
        assert not any(task.done() for task in set(tasks) - set(refused))
        answering.set()
        assert [(await task).status for task in tasks] == statuses
        assert app._nbytes_held.total() == 0
        assert (await send_all(names[0])).status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({f"x-{n}": "1" for n in range(limits.MAX_HEADERS)}, "/", 431),
        ({"x": "1" * limits.MAX_HEAD_BYTES}, "/", 431),
        ({}, "/" + "a" * limits.MAX_PATH_BYTES, 414),
        ({f"x-{n}": "1" for n in range(90)}, "/", 200),
    ],
)
def test_heads_are_limited(headers: dict[str, str], path: str, status: int):
    assert ask(Limits(echo, 1000), "GET", path, headers).status == status


# JSON


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (nested(schemas.MAX_JSON_DEPTH + 1), "nested deeper than 64"),
        (b'{"a":' * 100_000, "nested deeper than 64"),
        (b'{"a": "' + b"\\" * 6 + b'" , "b": ' + nested(65), "nested deeper than 64"),
        (b"[" + b"1," * schemas.MAX_JSON_VALUES + b"1]", "more than 524,288 values"),
        (b'"' * (2**21 + 1), "more than 524,288 values"),
        (b"[" + b"{}," * schemas.MAX_JSON_OBJECTS + b"1]", "more than 65,536 objects and lists"),
        (b"[1" + b" " * (2**17 - 4) + b"1" * 65 + b"]", "a number with more than 64 characters"),
        (b"[" + b"1" * 65 + b"]", "a number with more than 64 characters"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8 at byte 0"),
    ],
)
def test_json_that_is_dear_to_parse_is_refused(body: bytes, message: str):
    with pytest.raises(ApiError, match=message) as raised:
        check_json(body)
    assert raised.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        nested(schemas.MAX_JSON_DEPTH),
        b"[" + b"[],{}," * 1000 + b"[]]",
        json.dumps(["[" * 1000, '"' * 1000, "\\" * 999, "1" * 1000, "NaN", "," * 2**21]).encode(),
        b"[" + b"1" * 64 + b"]",
        b'{"a": "\\',  # broken, which the parser says
        b'"' * 3,
        b"",
    ],
)
def test_json_that_is_only_long_or_looks_odd_passes(body: bytes):
    check_json(body)


def test_the_depth_of_json_is_what_python_finds():
    choice = random.Random(0)

    def made(depth: int) -> object:
        if depth == 0:
            return choice.choice(['"[{', "\\", '\\"', 1, None, "\u2028", "]}"])
        inner = [made(depth - 1), *[made(choice.randrange(depth)) for _ in range(2)]]
        return inner if choice.random() < 0.5 else {f'k"{n}\\[': v for n, v in enumerate(inner)}

    for depth in (1, 3, 6):
        for _ in range(20):
            value = made(depth)
            for _ in range(schemas.MAX_JSON_DEPTH - depth):
                value = [value]
            body = json.dumps(value, ensure_ascii=choice.random() < 0.5).encode()
            check_json(body)
            with pytest.raises(ApiError, match="nested deeper"):
                check_json(b"[" + body + b"]")


@pytest.mark.parametrize(
    "unit", [b'"', b'\\"', b"\\", b'"\\', b"[]", b"{", b"1", b'"a":', b"1,", b"\\u0022", b"x"]
)
def test_no_body_is_looked_at_twice(unit: bytes):
    """If each of these were, this would take hours."""
    with contextlib.suppress(ApiError):
        check_json(b'"' + unit * (2**20 // len(unit)))


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"a": 1, "b": 2, "a": 1}', "'a'"),
        (b'{"x": [{"a": 1}, {"b": {"": 1, "": 2}}]}', "''"),
        (b'{"a": 1, "\\u0061": 2}', "'a'"),
    ],
)
def test_a_name_that_an_object_has_twice_is_refused(body: bytes, name: str):
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert caught.value.message == f"the body contains the name {name} twice in an object"
    assert caught.value.status == 400


def test_a_name_may_be_in_several_objects():
    body = {"a": {"a": [{"a": 1}, {"a": 1}]}, "b": 1}
    assert parse_json(json.dumps(body).encode()) == body
