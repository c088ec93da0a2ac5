"""A running server for tests: real engine steps, and answers that a test may dictate."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import anyio
import mlx.core as mx
import uvicorn
from anyio.from_thread import BlockingPortal
from mlx.nn import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from mlx_paged import AsyncEngine, SamplingParams, demo_model_path, load
from mlx_paged.loading import read_sampling_defaults
from mlx_paged.request import MAX_PRIORITY
from mlx_paged.server.app import App
from mlx_paged.server.service import Service
from mlx_paged.server.settings import ServerSettings


class ScriptedEngine(AsyncEngine):
    """An engine whose next answers may be dictated. The model runs all the same, so steps, caching,
    stop texts and the end of sequence are real.

    Attributes:
        scripts: the tokens of the answers to the next requests, one entry each, the oldest first.
            Requests that come when it is empty are answered by the model. All completions of a
            request (``n``) are the same.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.scripts: deque[list[int]] = deque()

    def generate(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> Any:
        # What is computed ahead has no answer.
        if self.scripts and options.get("priority") != MAX_PRIORITY:
            params = params or SamplingParams()
            dictate = dictation(self.scripts.popleft(), len(prompt["prompt_token_ids"]))
            params = params.clone(logits_processors=(*params.logits_processors, dictate))
        return super().generate(prompt, params, **options)


def dictation(
    script: Sequence[int], num_prompt_tokens: int
) -> Callable[[mx.array, mx.array], mx.array]:
    """A logits processor that lets only the script's token through, by its place alone, so that
    preempted requests and drafts see the same. After the script, the model goes on.
    """

    def dictate(tokens: mx.array, logits: mx.array) -> mx.array:
        place = tokens.size - num_prompt_tokens
        if place >= len(script):
            return logits
        return mx.where(mx.arange(logits.shape[-1]) == script[place], 0.0, -mx.inf)[None]

    return dictate


def make_service(
    folder: Path | None = None,
    *,
    model: Module | None = None,
    loaded: tuple[Module, TokenizerWrapper] | None = None,
    model_names: Sequence[str] = ("demo",),
    takes_any_name: bool = False,
    **options: Any,
) -> Service:
    """A service with a :class:`ScriptedEngine` on a model folder, by default the demo model.

    Args:
        model: in the place of the folder's, whose tokenizer it gets.
        loaded: what was loaded from the folder before.
        options: of the engine.
    """
    folder = folder or demo_model_path()
    own_model, tokenizer = loaded or load(folder)
    engine = ScriptedEngine(
        model or own_model, tokenizer, **{"kv_cache_bytes": "1000blocks", **options}
    )
    return Service(
        engine,
        tokenizer,
        model_names=tuple(model_names),
        defaults=read_sampling_defaults(folder),
        created=int(time.time()),
        takes_any_name=takes_any_name,
    )


@contextmanager
def serving(app: ASGIApp, port: int = 0, **settings: Any) -> Iterator[str]:
    """Serve an application from a thread; gives its address.

    Args:
        port: 0 is a free one.
        settings: of uvicorn.
    """
    # asyncio sends what there is at once (TCP_NODELAY) only where the protocol is named; or an
    # answer's body would wait for the client's delayed acknowledgement of its head, for 40 ms.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        defaults = {"log_level": "warning", "lifespan": "off", "timeout_graceful_shutdown": 5}
        # Without a log_config: the loggers of the process stay as they are.
        config = uvicorn.Config(app, **{"log_config": None, **defaults, **settings})
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            yield "http://{}:{}".format(*listener.getsockname())
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@contextmanager
def running_service(folder: Path | None = None, **options: Any) -> Iterator[tuple[Service, str]]:
    """A service of its own and its address, for what needs other settings than the shared one."""
    service = make_service(folder, **options)
    with service.engine, serving(App(service)) as url:
        yield service, url


@cache
def _event_loop() -> BlockingPortal:
    """One event loop for all clients of this process: a server has one. A client by itself makes
    one for each request, in which work in the background ends in its middle.
    """
    made: Future[BlockingPortal] = Future()

    async def run() -> None:
        async with BlockingPortal() as portal:
            made.set_result(portal)
            await portal.sleep_until_stopped()

    threading.Thread(target=partial(anyio.run, run), daemon=True).start()
    return made.result()


def client_of(service: Service, settings: ServerSettings | None = None) -> TestClient:
    """A client of the whole application, in this process and under a name that it lets in."""
    app = App(service if settings is None else replace(service, settings=settings))
    client = TestClient(app, "http://localhost", raise_server_exceptions=False)
    client.portal = _event_loop()
    return client


class HttpAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]  # of small letters
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)


def ask(
    url: str, path: str, body: Any = None, method: str | None = None, **headers: str
) -> HttpAnswer:
    """One request, without a client that interprets anything.

    Args:
        body: bytes as they are, or what is sent as JSON.
        method: ``POST`` by default where there is a body.
        headers: with ``_`` for ``-``.
    """
    address = urlsplit(url)
    connection = HTTPConnection(str(address.hostname), address.port, timeout=60)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, data, {"Content-Type": "application/json", **names})
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return HttpAnswer(response.status, found, response.read().decode())
    finally:
        connection.close()


class RawClient:
    """A request on a socket of its own, which can be closed at any moment."""

    def __init__(self, server_url: str, path: str, body: Any):
        address = urlsplit(server_url)
        self.socket = socket.socket()
        self.socket.settimeout(20)
        # Little is on its way to a client that reads nothing.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        self.socket.connect((address.hostname, address.port))
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + data)

    def read_until(self, mark: bytes, seconds: float = 20) -> bytearray:
        end, seen = time.monotonic() + seconds, bytearray()
        while seen.find(mark, max(0, len(seen) - 2**17)) < 0:
            assert time.monotonic() < end
            data = self.socket.recv(2**16)
            assert data, f"the server closed the connection after {seen!r}"
            seen += data
        return seen

    def leave(self) -> None:
        self.socket.close()


def bodies_of(text: str, max_tokens: int) -> dict[str, dict[str, Any]]:
    """A request for an answer to a text, for each path that generates."""
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/completions": {"prompt": text, "max_tokens": max_tokens},
        "/v1/chat/completions": {"messages": messages, "max_tokens": max_tokens},
        "/v1/responses": {"input": text, "max_output_tokens": max_tokens},
        "/v1/messages": {"model": "demo", "messages": messages, "max_tokens": max_tokens},
    }


def num_cached(usage: dict[str, Any]) -> int:
    """The number of cached tokens of an answer of any of these paths."""
    for details in ("prompt_tokens_details", "input_tokens_details"):
        if details in usage:
            return int(usage[details]["cached_tokens"])
    return int(usage["cache_read_input_tokens"])


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.002)


def is_idle(service: Service) -> bool:
    """Nothing runs or waits, no request has a name, and no block is held."""
    stats = service.engine.stats()
    is_quiet = (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    is_quiet = is_quiet and service.idle_prefill.is_done
    return is_quiet and not service.engine.engine.has_unfinished_requests()
