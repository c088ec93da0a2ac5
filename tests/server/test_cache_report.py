"""``/v1/cache``: what it says of the last prompts, and to whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.adapted_models import adapted_model
from helpers.engine_runs import prompt
from helpers.servers import client_of as client_with
from helpers.servers import make_service
from starlette.testclient import TestClient

from mlx_paged.server.service import Service
from mlx_paged.server.settings import ServerSettings, read_api_keys

SECRET = "My secret is the code of apple, which is 4821. "


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = make_service(num_history_tokens=2**16)
    with service.engine:
        yield service


def client_of(service: Service, *keys: str) -> TestClient:
    return client_with(service, replace(service.settings, api_keys=read_api_keys(keys)))


def say_secret(client: TestClient, key: str, path: str = "/v1/completions") -> None:
    is_ollama = path.startswith("/api")
    limit = {"raw": True, "options": {"num_predict": 1}} if is_ollama else {"max_tokens": 1}
    body = {"prompt": SECRET * 4, **limit}
    assert client.post(path, json=body, headers={"x-api-key": key}).status_code == 200


@pytest.mark.parametrize("keys", [(), ("alice A", "B")])
def test_texts_of_prompts_are_refused_unless_they_were_allowed_at_start(
    service: Service, keys: tuple[str, ...]
):
    client = client_of(service, *keys)
    say_secret(client, "A")
    answer = client.get("/v1/cache?text=true", headers={"x-api-key": "A"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (403, "text", "texts_not_allowed")
    assert "--allow-cache-texts" in error["message"]
    without = client.get("/v1/cache?text=false", headers={"x-api-key": "A"})
    assert without.status_code == 200
    assert all("text" not in report for report in without.json()["reports"])
    assert "secret" not in answer.text + without.text


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("limit=x", "limit must be a whole number, got 'x'"),
        ("limit=-1", "limit must be at least 0, got '-1'"),
        ("text=maybe", "text must be true or false, got 'maybe'"),
        ("limits=1", "limits is not supported; leave it out"),
    ],
)
def test_a_parameter_that_makes_no_sense_is_refused_by_name(
    service: Service, query: str, message: str
):
    answer = client_of(service).get(f"/v1/cache?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == message
    assert answer.json()["error"]["param"] == query.partition("=")[0]


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        (("key2 A", "B"), "/v1/completions"),
        (("A", "key1 B"), "/v1/completions"),
        (("alice A", "bob B"), "/v1/completions"),
        (("ann A", "ben B"), "/api/generate"),
    ],
)
def test_allowed_texts_are_shown_to_the_user_whose_they_are_alone(
    service: Service, keys: tuple[str, str], path: str
):
    client = client_of(replace(service, settings=ServerSettings(allow_cache_texts=True)), *keys)
    say_secret(client, "A", path)
    own, others = (
        client.get("/v1/cache?text=true", headers={"x-api-key": key}) for key in ("A", "B")
    )
    assert own.status_code == others.status_code == 200
    shown = own.json()["reports"][0]["text"]["prompt"]
    assert len(shown) > 5 and shown in SECRET * 4
    assert others.json()["reports"] == []


def test_a_state_that_was_missing_is_told_apart_from_missing_kv():
    """A prompt leaves another one in its middle, where no state of a hybrid model was kept."""
    model, shared = adapted_model("qwen3_next"), prompt(50, 1)
    service = make_service(
        model=model, block_size=8, num_history_tokens=1000, kv_cache_bytes="100blocks"
    )
    with service.engine:
        client = client_of(service)
        for tokens in (shared, [*shared[:30], *prompt(9, 5)]):
            body = {"prompt": tokens, "max_tokens": 1, "temperature": 0}
            assert client.post("/v1/completions", json=body).status_code == 200
        body = client.get("/v1/cache").json()
    report = body["reports"][0]
    assert (report["reason"], report["position"], report["cached_tokens"]) == ("no_state", 0, 0)
    assert "its K/V are there, and the recurrent state was not kept" in report["explanation"]
    assert body["num_missed_tokens"]["no_state"] == 39
    assert body["num_stateless_tokens"] == 24
    # At the end of the last block of each prompt, and where they part.
    assert body["num_checkpoints"] == 3
    assert body["bytes_checkpoints"] == 3 * model.state_nbytes
