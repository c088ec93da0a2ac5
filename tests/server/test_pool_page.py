"""``/v1/pool`` and the page at ``/`` as HTTP answers."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator

import numpy as np
import pytest
from helpers.servers import client_of, is_idle, make_service, wait_until
from starlette.testclient import TestClient

from mlx_paged import SamplingParams
from mlx_paged.engine.stats import CACHED, EngineView
from mlx_paged.server.http.access import security_policy
from mlx_paged.server.page import MAX_CELLS
from mlx_paged.server.service import Service


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = make_service(kv_cache_bytes="100blocks")
    with service.engine:
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> TestClient:
    return client_of(service)


def decoded(cells: dict[str, object], name: str) -> list[int]:
    return list(base64.b64decode(str(cells[name])))


def test_a_cell_per_block_says_who_holds_it_and_what_is_cached():
    blocks = bytes([0, CACHED, 1, 3 | CACHED, 127])
    blocks_per_cell, cells = EngineView(16, blocks, []).cells(5)
    assert blocks_per_cell == 1
    assert list(cells["held"]) == [0, 0, 255, 255, 255]
    assert list(cells["cached"]) == [0, 255, 0, 0, 0]
    assert list(cells["holders"]) == [0, 0, 1, 3, 127]


def test_cells_of_several_blocks_have_their_shares_and_the_last_has_what_is_left():
    blocks = bytes([0, CACHED, 1, 2, 2 | CACHED, 0, 0])
    blocks_per_cell, cells = EngineView(16, blocks, []).cells(2)
    assert blocks_per_cell == 4
    assert list(cells["held"]) == [128, 85]
    assert list(cells["cached"]) == [64, 0]
    assert list(cells["holders"]) == [2, 2]


@pytest.mark.parametrize("num_blocks", [0, 1, 4096, 4097, 100_000])
def test_no_block_is_lost_in_cells(num_blocks: int):
    blocks = np.random.default_rng(num_blocks).choice([0, 1, 2, CACHED], num_blocks)
    blocks_per_cell, cells = EngineView(16, blocks.astype(np.uint8).tobytes(), []).cells(4096)
    held = np.array(list(cells["held"]))
    assert len(held) == -(-num_blocks // blocks_per_cell) <= 4096
    if num_blocks:
        # A share is rounded up by less than one part in 255.
        share = np.isin(blocks, (1, 2)).mean()
        assert share * 255 <= held.mean() * 1.05 and held.mean() <= share * 255 + 1


def test_the_pool_is_reported_with_requests_and_figures(client: TestClient, service: Service):
    stream = service.engine.stream(
        "Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True), request_id="told"
    )
    next(stream)
    report = client.get("/v1/pool").json()
    stream.close()
    (row,) = report["requests"]
    assert (row["request_id"], row["state"]) == ("told", "running")
    assert row["num_output_tokens"] >= 1 and row["num_blocks"] >= 1
    assert (report["object"], report["model"], report["block_size"]) == ("pool", "demo", 16)
    assert report["num_requests"] == 1 and report["max_num_blocks"] == 100
    assert len(decoded(report["cells"], "held")) == report["num_blocks"]
    assert sum(decoded(report["cells"], "held")) == 255 * row["num_blocks"]
    assert report["stats"]["num_generation_tokens"] >= 1
    first = report["latencies"]["time_to_first_token"]
    assert sum(first["counts"]) == 1 and len(first["counts"]) == len(first["bounds"]) + 1


def test_many_requests_are_counted_and_the_first_ones_listed(client: TestClient, service: Service):
    wait_until(lambda: is_idle(service))
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    streams = [service.engine.stream("Hello", params) for _ in range(230)]
    report = client.get("/v1/pool").json()
    for stream in streams:
        stream.close()
    assert report["num_requests"] == 230 and len(report["requests"]) == 200
    states = [row["state"] for row in report["requests"]]
    assert states == sorted(states, key=["running", "preempted", "waiting"].index)


@pytest.mark.parametrize("cells", ["0", "-1", "1.5", "", "x", "9" * 400, str(MAX_CELLS + 1), "²"])
def test_a_number_of_cells_that_makes_no_sense_is_refused(client: TestClient, cells: str):
    response = client.get("/v1/pool", params={"cells": cells})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cells"
    message = response.json()["error"]["message"]
    words = "cells must be (a whole number|at least 1|at most 16384), got '"
    assert re.match(words, message), message


def test_the_page_may_run_its_own_script_and_ask_its_own_server_only(client: TestClient):
    response = client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.strip().split(" ", 1)
        for part in response.headers["content-security-policy"].split(";")
    )
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert client.post("/").status_code == 405


def test_the_page_names_no_other_host_and_inserts_text_as_text(client: TestClient):
    html = client.get("/").text
    # The name of a namespace is asked for by nobody.
    assert set(re.findall(r"https?://[\w./]+", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", html)
    assert not re.search(r"<\w+[^>]*\s(on\w+|style)=", html)


def test_a_page_without_its_script_has_no_policy():
    with pytest.raises(ValueError):
        security_policy("<style></style>")
