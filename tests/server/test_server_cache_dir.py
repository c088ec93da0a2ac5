"""``--cache-dir``: what a server that starts again finds, for whom, and what it says."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.disk_tiers import block_files
from helpers.server_programs import running
from helpers.servers import ask as ask_url
from helpers.servers import bodies_of, client_of, make_service, num_cached, wait_until
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

TEXT = "The code of apple is 4821. The code of pear is 1234. " * 4
BODIES = bodies_of(TEXT, 2)


@contextmanager
def started(folder: Path) -> Iterator[TestClient]:
    """A server on a folder of K/V, until it has ended."""
    service = make_service(cache_dir=folder, num_history_tokens=10_000)
    with service.engine:
        yield client_of(service)


def ask(client: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    answer = client.post(path, json=BODIES[path] | {"temperature": 0} | fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_a_server_that_starts_again_finds_what_the_last_one_left(tmp_path: Path):
    cold: dict[str, dict[str, Any]] = {}
    for path in BODIES:
        # Each alone: protocols of chat have one prompt for these messages.
        with started(tmp_path / path.replace("/", "-")) as client:
            cold[path] = ask(client, path)
            assert num_cached(cold[path]["usage"]) == 0
    for path in BODIES:
        with started(tmp_path / path.replace("/", "-")) as client:
            warm = ask(client, path)
            assert num_cached(warm["usage"]) >= 64
            for field in ("choices", "output", "content"):
                assert texts_of(warm.get(field)) == texts_of(cold[path].get(field))


def texts_of(answer: Any) -> list[str]:
    """All texts in an answer, without ids."""
    if isinstance(answer, dict):
        return [
            text
            for name, each in answer.items()
            for text in ([each] if name in ("text", "content") and isinstance(each, str) else [])
            or texts_of(each)
        ]
    return [text for each in answer for text in texts_of(each)] if isinstance(answer, list) else []


def metrics_of(client: TestClient) -> dict[tuple[str, str | None], float]:
    return {
        (sample.name, sample.labels.get("source") or sample.labels.get("event")): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }


def test_metrics_and_reports_tell_disk_from_memory(tmp_path: Path):
    path = "/v1/completions"
    with started(tmp_path) as client:
        ask(client, path)
    with started(tmp_path) as client:
        for _ in range(2):
            ask(client, path)
        ask(client, path, prompt="Something else altogether, which nobody asked before.")
        written = "mlx_paged:disk_cache_block_events_total", "written"
        wait_until(lambda: metrics_of(client)[written] > 0)
        metrics = metrics_of(client)
        cache = client.get("/v1/cache").json()
        pool = client.get("/v1/pool").json()
    num_tokens = metrics["vllm:prompt_tokens_total", None]
    num_read = metrics["vllm:external_prefix_cache_hits_total", None]
    num_in_memory = metrics["vllm:prompt_tokens_by_source_total", "local_cache_hit"]
    assert num_read == metrics["vllm:prompt_tokens_by_source_total", "external_kv_transfer"] >= 64
    assert num_in_memory == num_read, "the second one finds in memory what the first one read"
    assert metrics["vllm:external_prefix_cache_queries_total", None] == num_tokens - num_in_memory
    assert metrics["mlx_paged:disk_cache_block_events_total", "read"] == num_read // 16
    assert metrics["mlx_paged:disk_cache_up", None] == 1
    assert metrics["mlx_paged:disk_cache_blocks", None] >= num_read // 16
    assert metrics["mlx_paged:disk_cache_bytes", None] > 0
    new, memory, disk = cache["reports"]
    assert (new["cached_tokens"], new["read_tokens"]) == (0, 0)
    assert (memory["cached_tokens"], memory["read_tokens"]) == (num_read, 0)
    assert (disk["cached_tokens"], disk["read_tokens"]) == (num_read, num_read)
    assert f"cached, {num_read:.0f} of them on disk" in disk["explanation"]
    assert cache["disk"]["num_read_tokens"] == pool["stats"]["num_read_prompt_tokens"] == num_read
    assert pool["stats"]["disk_tier"] == cache["disk"]


def test_a_server_without_a_folder_says_nothing_of_one():
    service = make_service()
    with service.engine:
        client = client_of(service)
        assert "disk_cache" not in client.get("/metrics").text
        assert "external_prefix" not in client.get("/metrics").text
        assert client.get("/v1/cache").json()["disk"] is None


def test_no_store_of_a_body_or_a_header_leaves_no_file(tmp_path: Path):
    with started(tmp_path) as client:
        for path in BODIES:
            ask(client, path, no_store=True)
        answer = client.post(
            "/v1/completions",
            json=BODIES["/v1/completions"] | {"prompt": f"Another. {TEXT}"},
            headers={"Cache-Control": "no-store"},
        )
        assert answer.status_code == 200
    assert block_files(tmp_path) == []
    with started(tmp_path) as client:
        ask(client, "/v1/completions")
    assert block_files(tmp_path) != []


@pytest.mark.slow
def test_users_find_their_own_prompts_after_a_restart_and_a_failure_is_a_line_of_the_log(
    tmp_path: Path,
):
    folder = tmp_path / "kv"
    flags = ["--cache-dir", str(folder), "--cache-dir-size", "1G"]
    # Without names; they come in another order at the second start.
    keys = ["--api-key", "first-key", "--api-key", "second-key"]

    def ask_program(url: str, key: str, text: str = TEXT) -> int:
        answer = ask_url(
            url, "/v1/completions", bodies_of(text, 2)["/v1/completions"], x_api_key=key
        )
        assert answer.status == 200, answer.text
        return num_cached(answer.body["usage"])

    with running(*flags, *keys) as program:
        assert f"disk: up to 1.1 GB, in {folder} |" in program.said[1]
        assert ask_program(program.url, "first-key") == 0
        program.signal(signal.SIGTERM)
        assert program.end() == 0
    assert not any(
        b"first-key" in file.read_bytes() for file in folder.rglob("*") if file.is_file()
    )
    with running(*flags, *keys[2:], *keys[:2]) as program:
        assert ask_program(program.url, "second-key") == 0
        assert ask_program(program.url, "first-key") >= 64
        shutil.rmtree(folder)
        folder.write_text("mine")
        for number in range(3):
            ask_program(program.url, "first-key", f"{number} {TEXT}")
            time.sleep(0.5)  # A thread writes; what fails is said in the step after that.
        program.signal(signal.SIGTERM)
        assert program.end() == 0
    said = [line for line in program.said if "from now on K/V are kept in memory only" in line]
    assert len(said) == 1 and " WARNING " in said[0]
