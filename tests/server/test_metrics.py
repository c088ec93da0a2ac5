"""``/metrics``: names, values and formats."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
from helpers.asgi import ask, echo
from helpers.engine_runs import between_steps
from helpers.servers import client_of, make_service
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_paged import SamplingParams
from mlx_paged.server.http.logs import RequestLog
from mlx_paged.server.metrics import count_request
from mlx_paged.server.service import Service
from mlx_paged.server.settings import ApiKey, ServerSettings

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
LABELS = {"model_name": 'de"mo', "engine": "0"}


@pytest.fixture
def service() -> Iterator[Service]:
    service = make_service(
        kv_cache_bytes="100blocks", model_names=(LABELS["model_name"],), num_draft_tokens=4
    )
    with service.engine:
        yield service


@pytest.fixture
def client(service: Service) -> TestClient:
    return client_of(service)


def values(text: str) -> dict[str, float]:
    """``name{label="value"}`` without the labels that all have, and the value."""
    found = {}
    for family in parse_text(text):
        for sample in family.samples:
            labels = {name: v for name, v in sample.labels.items() if name not in LABELS}
            shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            found[sample.name + (f"{{{shown}}}" if shown else "")] = sample.value
    return found


def run_two(service: Service) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for _ in range(2):
        for _ in service.engine.stream(
            "Once upon a time, there was a very small dog. " * 4, params
        ):
            pass


def test_what_the_engine_did_is_under_vllms_names(client: TestClient, service: Service):
    run_two(service)
    got = values(client.get("/metrics").text)
    stats = service.engine.stats()
    assert got["vllm:generation_tokens_total"] == 24
    assert got["vllm:prompt_tokens_total"] == stats.num_prompt_tokens > 40
    num_cached = got["vllm:prompt_tokens_cached_total"]
    assert 0 < num_cached == got["vllm:prompt_tokens_by_source_total{source=local_cache_hit}"]
    computed = got["vllm:prompt_tokens_by_source_total{source=local_compute}"]
    assert computed == stats.num_prompt_tokens - num_cached
    assert got["vllm:request_success_total{finished_reason=length}"] == 2
    assert got["vllm:request_success_total{finished_reason=abort}"] == 0
    assert got["vllm:prefix_cache_queries_total"] == stats.num_queried_tokens
    assert got["vllm:prefix_cache_hits_total"] == stats.num_hit_tokens == num_cached
    assert got["vllm:time_to_first_token_seconds_count"] == 2
    assert got["vllm:time_to_first_token_seconds_bucket{le=+Inf}"] == 2
    assert got["vllm:inter_token_latency_seconds_count"] == 22
    assert got["vllm:request_generation_tokens_sum"] == 24
    assert got["vllm:request_generation_tokens_bucket{le=10.0}"] == 0
    assert got["vllm:request_generation_tokens_bucket{le=20.0}"] == 2
    assert got["vllm:num_requests_running"] == got["vllm:num_requests_waiting"] == 0
    assert got["vllm:kv_cache_usage_perc"] == 0
    assert got["mlx_paged:kv_cache_blocks{state=cached}"] == stats.num_cached_blocks
    assert got["mlx_paged:kv_cache_budget_bytes"] == stats.nbytes_budget
    (config,) = [name for name in got if name.startswith("vllm:cache_config_info")]
    assert "block_size=16" in config and "num_gpu_blocks=100" in config


REPETITIVE = "repeat: one two three four. one two three four. one two three four. one two"


def test_drafts_are_in_the_metrics_and_in_the_usage_of_each_protocol(
    client: TestClient, service: Service
):
    fields = {"model": LABELS["model_name"], "temperature": 0}
    chat = {"messages": [{"role": "user", "content": REPETITIVE}], "max_tokens": 40}
    for path, asked, details in (
        ("completions", {"prompt": REPETITIVE, "max_tokens": 40}, "completion_tokens_details"),
        ("chat/completions", chat, "completion_tokens_details"),
        ("messages", chat, "output_tokens_details"),
        ("responses", {"input": REPETITIVE, "max_output_tokens": 40}, "output_tokens_details"),
    ):
        before = service.engine.stats().spec_decoding
        answer = client.post(f"/v1/{path}", json={**fields, **asked}).json()
        after = service.engine.stats().spec_decoding
        num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
        usage = answer["usage"][details]
        assert usage["accepted_prediction_tokens"] == num_accepted > 0, path
        num_drafts = after.num_draft_tokens - before.num_draft_tokens
        assert usage["rejected_prediction_tokens"] == num_drafts - num_accepted
    got = values(client.get("/metrics").text)
    assert got["vllm:spec_decode_num_drafts_total"] == after.num_drafts
    assert got["vllm:spec_decode_num_draft_tokens_total"] == after.num_draft_tokens
    assert got["vllm:spec_decode_num_accepted_tokens_total"] == after.num_accepted_tokens
    for name, counts in (
        ("mlx_paged:spec_decode_num_draft_tokens", after.num_draft_tokens_per_pos),
        ("vllm:spec_decode_num_accepted_tokens", after.num_accepted_tokens_per_pos),
    ):
        found = [got[f"{name}_per_pos_total{{position={position}}}"] for position in range(4)]
        assert found == [*counts, *[0] * (4 - len(counts))]


def test_what_runs_is_seen_while_it_runs(client: TestClient, service: Service):
    stream = service.engine.stream("Hello", SamplingParams(max_tokens=900, ignore_eos=True))
    next(stream)
    got = values(client.get("/metrics").text)
    stream.close()
    assert got["vllm:num_requests_running"] == 1
    assert got["vllm:generation_tokens_total"] >= 1
    assert 0 < got["vllm:kv_cache_usage_perc"] <= 1
    assert got["mlx_paged:kv_cache_blocks{state=held}"] >= 1


def test_all_blocks_are_in_one_state(client: TestClient, service: Service):
    run_two(service)
    got = values(client.get("/metrics").text)
    blocks = [got[f"mlx_paged:kv_cache_blocks{{state={s}}}"] for s in ("held", "cached", "empty")]
    assert sum(blocks) == service.engine.stats().num_usable_blocks


def test_buckets_add_up_and_every_metric_is_explained(client: TestClient, service: Service):
    run_two(service)
    text = client.get("/metrics").text
    for family in parse_text(text):
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            if not family.name.startswith("mlx_paged:http"):
                assert LABELS.items() <= sample.labels.items(), sample.name
        if family.type == "histogram":
            buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
            assert buckets == sorted(buckets)
            (count,) = [s.value for s in family.samples if s.name.endswith("_count")]
            assert buckets[-1] == count > 0, family.name


def test_both_formats_say_the_same(client: TestClient, service: Service):
    run_two(service)
    plain = client.get("/metrics", headers={"Accept": "text/plain;version=0.0.4"})
    assert plain.headers["content-type"].startswith("text/plain; version=")
    openmetrics = client.get("/metrics", headers={"Accept": OPENMETRICS})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")
    names = {s.name for family in parse_openmetrics(openmetrics.text) for s in family.samples}
    plain_names = {s.name for family in parse_text(plain.text) for s in family.samples}
    # The first of the two scrapes was not there yet when it was answered.
    assert names - {"mlx_paged:http_requests_total"} == plain_names


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_own_checker_finds_the_metrics_readable(client: TestClient, service: Service):
    run_two(service)
    text = client.get("/metrics", headers={"Accept": "text/plain"}).text
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True
    )
    # What it says of names alone (vLLM's colons and units) is its taste: status 3.
    assert checked.returncode in (0, 3), checked.stderr


def test_http_requests_are_counted_by_route_method_and_status(service: Service):
    client = client_of(service)
    for path in ("/health", "/health", "/v1/pool?cells=0", "/nothing/here", "/nothing/there"):
        client.get(path)
    client.get("/v1/models/nobody")
    client.post("/health")
    client.request("BREW", "/health")
    got = values(client.get("/metrics").text)
    name = "mlx_paged:http_requests_total{method=%s,path=%s,status=%s}"
    counts = {key: value for key, value in got.items() if key.startswith("mlx_paged:http")}
    assert counts == {
        name % ("GET", "/health", 200): 2,
        name % ("GET", "/v1/pool", 400): 1,
        name % ("GET", "other", 404): 2,
        name % ("GET", "/v1/models/{name:path}", 404): 1,
        name % ("POST", "/health", 405): 1,
        name % ("other", "/health", 405): 1,
    }


def counted(app: ASGIApp, counts: Counter[tuple[str, str, int]]) -> RequestLog:
    return RequestLog(app, partial(count_request, counts, []))


def test_what_ends_without_an_answer_is_counted_too():
    counts: Counter[tuple[str, str, int]] = Counter()

    async def leave(scope: Scope, receive: Receive, send: Send) -> None:
        """The client is gone before there is an answer."""

    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a bug")

    for app in (leave, fail):
        scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
        with contextlib.suppress(RuntimeError):
            asyncio.run(counted(app, counts)(scope, None, None))  # type: ignore[arg-type]
    assert counts == {("GET", "other", 499): 1, ("GET", "other", 500): 1}


def test_an_answer_that_was_broken_off_counts_as_one_of_a_client_that_left():
    counts: Counter[tuple[str, str, int]] = Counter()

    async def cut(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})

    ask(counted(cut, counts), path="/cut")
    ask(counted(echo, counts), path="/whole")
    assert counts == {("GET", "other", 499): 1, ("GET", "other", 200): 1}


def test_requests_that_are_refused_at_the_door_are_counted(service: Service):
    settings = ServerSettings(api_keys=(ApiKey("me", "secret"),))
    client = client_of(service, settings)
    client.get("/v1/pool", headers={"Host": "localhost"})
    got = values(client.get("/metrics", headers={"Host": "localhost", "x-api-key": "secret"}).text)
    assert got["mlx_paged:http_requests_total{method=GET,path=/v1/pool,status=401}"] == 1


def test_servers_in_one_process_have_registries_of_their_own(service: Service):
    client, other = (client_of(service) for _ in range(2))
    client.get("/health")
    assert "/health" not in other.get("/metrics").text
    assert "/health" in client.get("/metrics").text


def test_a_scrape_waits_for_no_step(client: TestClient, service: Service):
    engine = service.engine.engine
    with between_steps(engine):  # as while a step runs
        results: list[int] = []
        thread = threading.Thread(
            target=lambda: results.append(client.get("/metrics").status_code), daemon=True
        )
        thread.start()
        thread.join(20)
        assert results == [200]


def test_scrapes_under_load_are_consistent(client: TestClient, service: Service):
    params = SamplingParams(max_tokens=40, ignore_eos=True)

    def ask() -> None:
        for _ in service.engine.stream("Hello, who are you?", params):
            pass

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    last = 0.0
    end = time.monotonic() + 20
    while last < 240 and time.monotonic() < end:
        got = values(client.get("/metrics").text)
        assert last <= got["vllm:generation_tokens_total"]
        last = got["vllm:generation_tokens_total"]
    for thread in threads:
        thread.join()
    assert last == 240
