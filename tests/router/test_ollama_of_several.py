"""Ollama's API in front of several models, whose processes are told what to say."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.servers import make_service
from helpers.several_models import flags_of
from starlette.testclient import TestClient

from mlx_paged import demo_model_path
from mlx_paged.router import router as router_module
from mlx_paged.router.app import RouterApp
from mlx_paged.router.model_process import ModelProcess
from mlx_paged.router.residency import Need, Resident
from mlx_paged.router.router import Router
from mlx_paged.server.errors import ApiError
from mlx_paged.server.ollama.listing import VERSION
from mlx_paged.server.ollama.models import describe
from mlx_paged.server.settings import ServerSettings, read_api_keys

DESCRIPTION: dict[str, Any] = {
    "modified_at": "2026-01-01T00:00:00Z",
    "size": 100,
    "digest": "abc",
    "details": {"family": "qwen3"},
    "capabilities": ["completion", "tools"],
    "parameters": "",
    "template": "{{ messages }}",
    "model_info": {"general.architecture": "qwen3", "qwen3.context_length": 4096},
}
LINE = b'{"done": true}\n'


class FakeResidency:
    """Models that are loaded without processes.

    Attributes:
        seconds: of a load.
        failure: of a load.
        sent: what was sent to processes.
    """

    def __init__(self, folder: Path):
        async def measure() -> Need:
            raise AssertionError("nothing is measured")

        self.models = {
            names[0]: Resident(
                ModelProcess(names[0], {"served_model_name": names}, folder / names[0]), measure
            )
            for names in (["one", "org/uno"], ["two:4b"])
        }
        self.seconds, self.failure = 0.0, None
        self.sent: list[tuple[bytes, bytes]] = []

    async def load(self, name: str) -> None:
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        process = self.models[name].process
        process.state, process.description, process.max_model_len = "loaded", DESCRIPTION, 4096

    @asynccontextmanager
    async def use(self, name: str, keep_alive: float | None) -> AsyncIterator[Any]:
        await self.load(name)
        yield SimpleNamespace(send=self._send)

    @asynccontextmanager
    async def _send(
        self, method: str, target: bytes, headers: object, body: bytes
    ) -> AsyncIterator[Any]:
        async def chunks() -> AsyncIterator[bytes]:
            yield LINE

        self.sent.append((target, body))
        headers = [(b"Content-Type", b"application/x-ndjson")]
        yield SimpleNamespace(status=200, headers=headers, aiter_stream=chunks)


@pytest.fixture
def residency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeResidency:
    """Nothing is known of its models before they are loaded, as of GGUF files."""

    async def describe(process: ModelProcess) -> None:
        return

    monkeypatch.setattr(ModelProcess, "describe", describe)
    return FakeResidency(tmp_path)


def client_of(residency: Any, *keys: str) -> TestClient:
    settings = ServerSettings(api_keys=read_api_keys(keys))
    return TestClient(RouterApp(Router(residency), settings), "http://localhost")


def test_models_are_listed_before_they_were_ever_loaded(residency: FakeResidency):
    client = client_of(residency)
    assert client.get("/api/version").json() == {"version": VERSION}
    unknown, _, two = client.get("/api/tags").json()["models"]
    assert (unknown["name"], unknown["size"], unknown["details"]["family"]) == ("one:latest", 0, "")
    assert client.get("/api/ps").json() == {"models": []}
    # Clients whose types are strict read these.
    names = ("format", "family", "parameter_size", "quantization_level")
    texts = (unknown["modified_at"], unknown["digest"], *map(unknown["details"].get, names))
    assert all(isinstance(text, str) for text in texts) and unknown["details"]["families"] == []
    shown = client.post("/api/show", json={"model": "org/uno:latest"}).json()
    assert shown["capabilities"] == DESCRIPTION["capabilities"]
    assert shown["model_info"]["general.basename"] == "org/uno:latest"
    one, uno, other = client.get("/api/tags").json()["models"]
    assert (one["name"], uno["name"]) == ("one:latest", "org/uno:latest")
    assert one["size"] == uno["size"] == 100 and other == two
    # What was once loaded is known from then on.
    residency.models["one"].process.state, residency.failure = "unloaded", ApiError(503, "no room")
    assert client.post("/api/show", json={"name": "one"}).json()["template"] == "{{ messages }}"
    refusal = client.post("/api/show", json={"model": "two:4b"})
    assert (refusal.status_code, refusal.json()) == (503, {"error": "no room"})
    refusal = client.post("/api/show", json={"model": "two"})
    assert refusal.status_code == 404 and "there is no model 'two'" in refusal.json()["error"]
    refusal = client.post("/api/pull", json={"model": "three"})
    assert refusal.status_code == 501 and "mlx-paged pull" in refusal.json()["error"]


def test_a_model_is_described_without_being_loaded(tmp_path: Path):
    process = ModelProcess("demo", flags_of(demo_model_path(), "demo"), tmp_path / "socket")
    asyncio.run(process.describe())
    assert process.state == "unloaded"
    service = make_service()
    with service.engine:
        assert process.description == json.loads(json.dumps(describe(service)))
    missing = ModelProcess("a", flags_of(tmp_path / "missing", "a"), tmp_path / "other")
    asyncio.run(missing.describe())
    assert missing.description is None


@pytest.mark.parametrize(
    ("keep", "year"), [({}, "2300"), ({"expires": 0.0}, "20"), ({"is_pinned": True}, "2300")]
)
def test_what_is_loaded_says_how_long_it_stays(
    residency: FakeResidency, monkeypatch: pytest.MonkeyPatch, keep: dict[str, Any], year: str
):
    async def nbytes(process: ModelProcess) -> int:
        return 7

    monkeypatch.setattr(ModelProcess, "nbytes", nbytes)
    asyncio.run(residency.load("two:4b"))
    model = residency.models["two:4b"]
    assert model.expires == math.inf
    for name, value in keep.items():
        setattr(model, name, value)
    [found] = client_of(residency).get("/api/ps").json()["models"]
    assert (found["name"], found["size_vram"], found["context_length"]) == ("two:4b", 7, 4096)
    assert found["expires_at"].startswith(year)


def test_a_user_sees_the_models_of_the_key(residency: FakeResidency):
    client = client_of(residency, "alice A")
    assert client.get("/api/tags").status_code == client.get("/api/version").status_code == 401
    assert client.get("/api/tags", headers={"authorization": "Bearer A"}).status_code == 200


def test_while_a_model_is_loaded_lines_are_preceded_by_spaces(
    residency: FakeResidency, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(router_module, "FIRST_PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(router_module, "PROGRESS_SECONDS", 0.01)
    residency.seconds = 0.2
    client, body = client_of(residency), {"model": "one:latest", "messages": []}
    answer = client.post("/api/chat", json=body)
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert answer.content.strip() == LINE.strip() and answer.content.startswith(b"  ")
    [(target, sent)] = residency.sent
    assert (target, json.loads(sent)) == (b"/api/chat", body)
    # An error has no status any more, and is a line.
    residency.failure = ApiError(503, "no room")
    assert client.post("/api/chat", json=body).json() == {"error": "no room"}
    # A client that waits for one object gets the status.
    assert client.post("/api/chat", json={**body, "stream": False}).status_code == 503
