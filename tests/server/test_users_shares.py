"""The users of a server, known by the names of their keys, share its engine and its queue."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from helpers.fast_lane import mostly_slow
from helpers.servers import make_service, serving, wait_until

from mlx_paged.engine.stats import SequenceCounts
from mlx_paged.server.app import App
from mlx_paged.server.http.limits import QueueLimit
from mlx_paged.server.service import Service
from mlx_paged.server.settings import ServerSettings, read_api_keys

ANN, BOB = "Bearer A", "Bearer B"
STEP_SECONDS = 0.02
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
LONG = "the end of the story " * 60  # some 250 tokens


class Steps:
    """Slows each step of an engine down, and counts them.

    Attributes:
        num_read: steps whose tokens were read.
        waited: how many steps were read between the arrival of each of Bob's requests and its first
            token.
    """

    def __init__(self, service: Service):
        self.num_read = 0
        self.waited: list[int] = []
        engine = service.engine.engine
        launch, end_step = engine.runner.launch, engine.steps.budgets.end_step
        add, append = engine.add_request, engine.scheduler.append_token
        arrived: dict[str, int] = {}

        def slow_launch(batch: Any, awaited: Any) -> Any:
            time.sleep(STEP_SECONDS)
            return launch(batch, awaited)

        def counted_end(batch: Any, num_tokens: int) -> None:
            self.num_read += 1
            end_step(batch, num_tokens)

        def noted_add(request_id: str, *arguments: Any, **options: Any) -> None:
            arrived[request_id] = self.num_read
            add(request_id, *arguments, **options)

        def noted_append(completion: Any, *arguments: Any) -> None:
            append(completion, *arguments)
            if completion.request.user == "bob" and completion.num_output_tokens == 1:
                self.waited.append(self.num_read - arrived[completion.request_id])

        engine.runner.launch = slow_launch  # type: ignore[method-assign]
        engine.steps.budgets.end_step = counted_end  # type: ignore[method-assign]
        engine.add_request = noted_add  # type: ignore[method-assign]
        engine.scheduler.append_token = noted_append  # type: ignore[method-assign]


@contextmanager
def server_of_two(max_queue_len: int = 256, **options: Any) -> Iterator[tuple[Service, str, Steps]]:
    keys = read_api_keys(["ann A", "ann A2", "bob B"])
    service = make_service(kv_cache_bytes="3000blocks", seed=0, **options)
    scheduler = service.engine.engine.scheduler
    counts = partial(SequenceCounts.of, scheduler)
    admission = QueueLimit(max_queue_len, scheduler.config.max_num_seqs, counts)
    settings = ServerSettings(api_keys=keys, no_idle_prefill=True)
    service = replace(service, settings=settings, admit=admission.admit)
    with service.engine, serving(App(service)) as url:
        yield service, url, Steps(service)


def send(url: str, key: str, path: str, body: dict[str, Any]) -> HTTPConnection:
    address = urlsplit(url)
    connection = HTTPConnection(str(address.hostname), address.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": key}
    connection.request("POST", path, json.dumps({"model": "demo", **body}), headers)
    return connection


def chat(url: str) -> None:
    """Bob's small chat, from its request to its end."""
    response = send(url, BOB, "/v1/chat/completions", CHAT).getresponse()
    assert response.status == 200, response.read()
    assert response.read().endswith(b"data: [DONE]\n\n")


def many_completions(url: str) -> list[HTTPConnection]:
    body = {"prompt": "Once", "n": 64, "max_tokens": 2000, "ignore_eos": True, "temperature": 1}
    return [send(url, ANN, "/v1/completions", {**body, "stream": True}) for _ in range(2)]


def long_prompts(url: str) -> list[HTTPConnection]:
    body = {"max_tokens": 200, "ignore_eos": True, "stream": True}
    return [
        send(url, ANN, "/v1/completions", {**body, "prompt": f"{number} {LONG}"})
        for number in range(64)
    ]


def full_queue(url: str) -> list[HTTPConnection]:
    """More requests than may wait, of two keys of one user."""
    body = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "priority": -(2**31) + 1}
    return [
        send(url, (ANN, "Bearer A2")[number % 2], "/v1/completions", body) for number in range(100)
    ]


def slow_readers(url: str) -> list[HTTPConnection]:
    """Streams whose clients read nothing, through buffers that are soon full."""
    body = {"prompt": "Once", "n": 16, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    connections = [send(url, ANN, "/v1/completions", {**body, "logprobs": 5}) for _ in range(4)]
    for connection in connections:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return connections


@pytest.mark.timeout(240)
@pytest.mark.parametrize("load", [many_completions, long_prompts, full_queue, slow_readers])
@mostly_slow("run_ahead", [False, True], quick=(1,))
def test_a_small_chat_has_its_token_within_three_steps_whatever_another_user_asks_for(
    load: Callable[[str], Sequence[HTTPConnection]], run_ahead: bool
):
    with server_of_two(max_queue_len=20, run_ahead=run_ahead) as (service, url, steps):
        chat(url)
        assert steps.waited == [1]  # alone
        connections = load(url)
        stats = service.engine.stats
        wait_until(lambda: stats().num_running >= 64 or stats().num_waiting > 0)
        begin = steps.num_read
        wait_until(lambda: steps.num_read > begin + 5)
        for _ in range(4):
            chat(url)
        # One step is running when it comes, and with steps ahead another one is launched.
        assert max(steps.waited) <= 3 and len(steps.waited) == 5
        for connection in connections:
            connection.close()
        service.engine.abort_all()


def test_a_full_queue_refuses_the_user_who_filled_it_and_no_other():
    with server_of_two(max_queue_len=4, max_num_seqs=2) as (service, url, _):
        body = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True}
        connections = [send(url, ANN, "/v1/completions", body) for _ in range(6)]
        wait_until(lambda: service.engine.stats().num_waiting == 4)
        refused = send(url, "Bearer A2", "/v1/completions", body).getresponse()
        assert refused.status == 503 and json.loads(refused.read())["error"]["code"] == "queue_full"
        # A client's own names of users are nothing.
        refused = send(url, ANN, "/v1/chat/completions", {**CHAT, "user": "bob"}).getresponse()
        assert refused.status == 503
        answer = send(url, BOB, "/v1/chat/completions", {**CHAT, "stream": False}).getresponse()
        assert answer.status == 200 and answer.read()
        for connection in connections:
            connection.close()
        service.engine.abort_all()


def test_the_users_of_an_engine_are_the_names_of_keys_or_one_without_keys():
    with server_of_two() as (service, url, _):
        asked: list[Any] = []
        add = service.engine.engine.add_request

        def spied(*arguments: Any, **options: Any) -> None:
            asked.append(options["user"])
            add(*arguments, **options)

        service.engine.engine.add_request = spied  # type: ignore[method-assign]
        body = {"prompt": "Once", "max_tokens": 1, "user": "eve"}
        for key in (ANN, "Bearer A2", BOB):
            assert send(url, key, "/v1/completions", body).getresponse().status == 200
        assert asked == ["ann", "ann", "bob"]
        open_to_all = replace(service, settings=ServerSettings(no_idle_prefill=True))
        with serving(App(open_to_all)) as open_url:
            for user in ("eve", "mallory"):
                answer = send(open_url, ANN, "/v1/completions", {**body, "user": user})
                assert answer.getresponse().status == 200
        assert asked[3:] == ["-", "-"]
