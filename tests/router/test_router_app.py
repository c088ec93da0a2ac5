"""The router's application on processes that only look like some: who may ask what, what is read of
a request, and what a client sees while its model is being loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from helpers.servers import ask, serving

from mlx_paged.router import router as router_module
from mlx_paged.router.app import RouterApp, merge_metrics
from mlx_paged.router.residency import Need, Residency, Resident
from mlx_paged.router.router import Router
from mlx_paged.server.settings import ServerSettings, read_api_keys

EVENT = b'data: {"choices": []}\n\n'


class Answer:
    """A response that a test has prepared."""

    def __init__(self, status: int, kind: str, body: bytes):
        self.status, self.headers, self._body = status, [(b"Content-Type", kind.encode())], body

    async def aread(self) -> bytes:
        return self._body

    async def aiter_stream(self) -> AsyncIterator[bytes]:
        yield self._body


class ToldProcess:
    """A process that loads when it may, and answers as it is told."""

    def __init__(self, *names: str):
        self.name, self.names = names[0], names
        self.state, self.num_requests = "unloaded", 0
        self.max_model_len = self.description = None
        self.answer = Answer(200, "application/json", b'{"id": 1}')
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.seen: list[tuple[bytes, dict[bytes, bytes], bytes]] = []

    async def measure(self) -> Need:
        return Need(1, 1, 1)

    async def start(self, kv_cache_bytes: int) -> None:
        self.state = "loading"
        await self.may_load.wait()
        self.state = "loaded"

    async def stop(self, seconds: float | None = None) -> bool:
        self.state = "unloaded"
        return True

    async def shrink(self, kv_nbytes: int) -> int:
        return kv_nbytes

    async def nbytes(self) -> int:
        return 0

    async def ask(self, target: str, *headers: Any) -> bytes:
        return b""

    @asynccontextmanager
    async def send(self, method: str, target: bytes, headers: Any, body: bytes) -> Any:
        self.seen.append((target, dict(headers), body))
        yield self.answer


@pytest.fixture
def one() -> ToldProcess:
    return ToldProcess("one", "uno")


def app_of(*processes: ToldProcess, is_loopback: bool = True, **settings: Any) -> RouterApp:
    residents = [Resident(each, 60) for each in processes]  # type: ignore[arg-type]
    residency = Residency(residents, 10**12, lambda weights, more: 10**12 - weights - more)
    return RouterApp(Router(residency), ServerSettings(**settings), is_loopback)


@pytest.fixture
def url(one: ToldProcess) -> Iterator[str]:
    with serving(app_of(one, ToldProcess("two"))) as url:
        yield url


def test_a_request_is_passed_on_as_it_came_without_what_is_for_the_router(url, one):
    body = b'{"model": "uno",  "prompt": "\\u00e9"}'
    headers = {"authorization": "Bearer x", "x_mlx_paged_user": "[]", "x_other": "y"}
    answer = ask(url, "/v1/completions?a=%20b", body, x_request_id="mine", **headers)
    assert (answer.status, answer.text) == (200, '{"id": 1}')
    assert answer.headers["x-request-id"] == "mine"
    [(target, passed, content)] = one.seen
    assert (target, content) == (b"/v1/completions?a=%20b", body)
    assert passed[b"x-mlx-paged-user"] == b'["-", null, true, null, true]'
    assert passed[b"x-request-id"] == b"mine" and passed[b"x-other"] == b"y"
    assert not passed.keys() & {b"authorization", b"host"}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "the body is not valid JSON: "),
        (b"[]", 400, "the body must be an object, got []"),
        (b'{"model": 5}', 400, "model must be a text, got 5"),
        (b'{"model": "x"}', 404, "there is no model 'x'; this server has 'one', 'two'"),
        (b'{"keep_alive": "soon"}', 400, "keep_alive must be 0, seconds"),
        (b'{"keep_alive": true}', 400, "keep_alive must be 0, seconds"),
    ],
)
def test_a_body_without_a_usable_model_is_refused_and_loads_nothing(url, one, body, status, said):
    answer = ask(url, "/v1/completions", body)
    assert answer.status == status
    assert answer.body["error"]["message"].startswith(said)
    assert one.state == "unloaded"


def test_an_encoded_body_is_refused(url):
    assert ask(url, "/v1/completions", b"x", content_encoding="gzip").status == 415


def test_pages_of_other_sites_and_other_names_are_refused_on_all_paths(url, one):
    for path in ("/v1/models/one/load", "/v1/completions", "/model/one/v1/completions"):
        assert ask(url, path, {}, origin="http://evil.example").status == 403
        assert ask(url, path, {}, host="evil.example").status == 421
    assert one.state == "unloaded"


def test_models_are_changed_by_administrators_or_without_keys_from_this_machine():
    keys = read_api_keys(["bob b", "root r admin"])
    load = "/v1/models/one/load"
    with serving(app_of(ToldProcess("one"), api_keys=keys)) as url:
        assert ask(url, load, {}, x_api_key="b").status == 403
        longer = {"model": "one", "keep_alive": 61}
        refused = ask(url, "/v1/completions", longer, x_api_key="b")
        assert refused.status == 403 and "over 60 s" in refused.body["error"]["message"]
        # Clients of Ollama send a time by themselves: the model's own counts.
        assert ask(url, "/api/chat", longer, x_api_key="b").status == 200
        assert ask(url, "/v1/completions", longer, x_api_key="r").status == 200
        assert ask(url, load, {}, x_api_key="r").body["success"] is True
    with serving(app_of(ToldProcess("one"), is_loopback=False)) as url:
        assert ask(url, load, {}).status == 403
    with serving(app_of(ToldProcess("one"))) as url:
        assert ask(url, load, {"pin": True}).body["is_pinned"] is True
        assert ask(url, "/models/unload", {"model": "one"}).body["state"] == "unloaded"
        assert ask(url, "/models/unload", {}).body["error"]["param"] == "model"


def test_ollamas_clients_find_the_models_before_they_are_loaded(url, one):
    names = [each["name"] for each in ask(url, "/api/tags").body["models"]]
    assert names == ["one:latest", "uno:latest", "two:latest"]
    assert ask(url, "/api/version").body["version"] and ask(url, "/api/ps").body == {"models": []}
    assert one.state == "unloaded"
    assert ask(url, "/api/chat", {"model": "uno:latest"}).status == 200


@pytest.mark.parametrize(
    ("path", "answer", "last"),
    [
        ("/v1/completions", Answer(200, "text/event-stream; charset=utf-8", EVENT), EVENT.decode()),
        (
            "/v1/completions",
            Answer(400, "application/json", b'{"error": {"message": "no", "param": "top_p"}}'),
            'data: {"error":{"message":"no","type":"invalid_request_error","param":"top_p",'
            '"code":null}}\n\n',
        ),
        (
            "/v1/messages",
            Answer(503, "application/json", b'{"type": "error", "error": {"message": "full"}}'),
            'event: error\ndata: {"type":"error","error":{"type":"overloaded_error",'
            '"message":"full"},"request_id":null}\n\n',
        ),
    ],
)
def test_a_stream_shows_that_its_model_is_being_loaded(
    monkeypatch, path: str, answer: Answer, last: str
):
    monkeypatch.setattr(router_module, "FIRST_PROGRESS_SECONDS", 0.02)
    monkeypatch.setattr(router_module, "PROGRESS_SECONDS", 0.02)
    one = ToldProcess("one")
    one.answer = answer
    one.may_load.clear()
    with (
        serving(app_of(one)) as url,
        httpx.stream("POST", f"{url}{path}", json={"stream": True}) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        chunks = response.iter_text()
        for _ in range(2):
            assert next(chunks).startswith(": waiting for one, 0 s\n\n")
        one.may_load._loop.call_soon_threadsafe(one.may_load.set)  # type: ignore[attr-defined]
        text = "".join(chunks)
    assert text.endswith(last)
    assert text.count("data: ") == 1


def test_expositions_are_merged_by_metric():
    one = '# HELP a A.\n# TYPE a gauge\na{m="1"} 1\n# TYPE b counter\nb_total{m="1"} 2\n# EOF\n'
    two = one.replace('"1"', '"2"')
    assert merge_metrics([one, two]) == (
        '# HELP a A.\n# TYPE a gauge\na{m="1"} 1\na{m="2"} 1\n'
        '# TYPE b counter\nb_total{m="1"} 2\nb_total{m="2"} 2\n'
    )
    assert merge_metrics([]) == ""
