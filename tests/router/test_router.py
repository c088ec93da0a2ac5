"""A router and the processes of its models: whom it lets ask what, and what is left when a process
or the router itself ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.routers import (
    LONG,
    errors_of,
    is_running,
    pids_below,
    running_router,
    streaming,
    write_config,
)
from helpers.server_programs import Program
from helpers.servers import HttpAnswer, RawClient, ask, num_cached, wait_until

KEYS = """
alice a-key models=one
bob b-key
root r-key admin
"""
# A process that hangs is found within seconds.
IMPATIENT = """
from mlx_paged.router import model_process
model_process.PROBE_SECONDS, model_process.DEADLINE = 0.5, 6.0
"""


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A router with keys, that all tests of this module share."""
    folder = tmp_path_factory.mktemp("router")
    keys = folder / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    config = write_config(folder, f'api-key-file = "{keys}"')
    with running_router(config, patch=IMPATIENT) as program:
        yield program


@pytest.fixture
def complete(router: Program) -> Callable[..., HttpAnswer]:
    """Ask for a completion; the status must be 200 unless another one is expected."""

    def ask_for(
        model: str | None, key: str = "b-key", status: int = 200, **fields: Any
    ) -> HttpAnswer:
        headers = {name: fields.pop(name) for name in ("x_mlx_paged_user",) if name in fields}
        body = {"prompt": "The cat", "max_tokens": 4, "temperature": 0, **fields}
        body |= {} if model is None else {"model": model}
        answer = ask(router.url, "/v1/completions", body, x_api_key=key, **headers)
        assert answer.status == status, answer.text
        return answer

    return ask_for


def test_requests_choose_a_model_by_its_name_or_an_alias(complete):
    with ThreadPoolExecutor() as pool:
        names = ["one", "two", "uno", "1st/one", None]
        answers = list(pool.map(complete, names))
    assert [each.body["model"] for each in answers] == ["one", "two", "uno", "1st/one", "one"]
    assert len({each.body["choices"][0]["text"] for each in answers}) == 1
    text = "there is no model 'three'; this server has 'one', 'two', 'broken'"
    assert complete("three", status=404).body["error"]["message"] == text


def test_models_are_listed_with_their_states(router, complete):
    complete("one")
    listed = ask(router.url, "/v1/models", x_api_key="b-key").body["data"]
    assert [each["id"] for each in listed] == ["one", "two", "broken"]
    one = listed[0]
    assert one["aliases"] == ["uno", "1st/one"] and one["max_model_len"] == 4096
    assert one["state"] == "loaded" and one["status"] == {"value": "loaded", "failed": False}
    assert ask(router.url, "/v1/models/1st/one", x_api_key="b-key").body == one


def test_a_key_is_checked_once_and_may_be_bound_to_models(router, complete):
    assert complete("one", "wrong", status=401).body["error"]["code"] == "invalid_api_key"
    complete("uno", "a-key")
    refused = complete("two", "a-key", status=404).body["error"]
    assert refused["message"] == "there is no model 'two'; this server has 'one'"
    listed = ask(router.url, "/v1/models", x_api_key="a-key").body["data"]
    assert [each["id"] for each in listed] == ["one"]
    assert ask(router.url, "/model/two/v1/pool", x_api_key="a-key").status == 404


def test_users_share_no_cached_prompt_and_can_not_pretend_to_be_others(router, complete):
    prompt = "The code of pear is 1234. " * 8

    def found(key: str, **headers: str) -> int:
        return num_cached(complete("one", key, prompt=prompt, **headers).body["usage"])

    assert found("b-key") == 0
    assert found("b-key") > 0
    # Bob's header, as the router would write it.
    assert found("r-key", x_mlx_paged_user='["bob", null, true]') == 0
    router.wait_for(r"one: .* root POST /v1/completions 200 ")


def test_only_administrators_load_and_unload_models(router, complete):
    path = "/v1/models/two/load"
    refused = ask(router.url, path, b"", "POST", x_api_key="b-key")
    assert refused.status == 403 and refused.body["error"]["code"] == "admin_needed"
    assert complete("two", keep_alive="1h").status == 200  # not beyond its own time
    loaded = ask(router.url, path, {"pin": True}, x_api_key="r-key")
    assert loaded.body["state"] == "loaded" and loaded.body["is_pinned"]
    unloaded = ask(router.url, "/models/unload", {"model": "two"}, x_api_key="r-key")
    assert unloaded.body["state"] == "unloaded" and not unloaded.body["is_pinned"]
    # Reading loads nothing.
    answer = ask(router.url, "/model/two/v1/pool", x_api_key="r-key")
    assert answer.status == 503 and "'two' is not loaded" in answer.text


def test_a_model_that_can_not_be_loaded_is_one_error_and_harms_no_other(router, complete):
    body = {"model": "broken", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    answer = ask(router.url, "/v1/messages", body, x_api_key="b-key")
    assert answer.status == 500 and answer.body["type"] == "error"
    assert answer.body["error"]["message"].startswith("the model 'broken' can't be loaded: ")
    complete("one")


def test_what_is_asked_of_all_models_is_put_together(router, complete):
    complete("one"), complete("two")
    metrics = ask(router.url, "/metrics", x_api_key="b-key").text
    for name in ("one", "two"):
        assert f'vllm:generation_tokens_total{{engine="0",model_name="{name}"}}' in metrics
        assert f'http_requests_total{{method="POST",model_name="{name}"' in metrics
    assert metrics.count("# TYPE vllm:generation_tokens_total ") == 1
    paths = ask(router.url, "/openapi.json", x_api_key="b-key").body["paths"]
    assert {"/v1/completions", "/v1/models/{name}/load"} <= set(paths)
    assert "<h1>mlx_paged</h1>" in ask(router.url, "/").text
    assert "v1/pool?cells=" in ask(router.url, "/model/1st/one/").text
    pool = ask(router.url, "/model/1st/one/v1/pool?cells=1", x_api_key="b-key").body
    assert pool["model"] == "one"
    assert ask(router.url, "/v1/responses/resp_1", x_api_key="b-key").status == 404


def test_a_client_that_leaves_ends_its_answer_in_the_process(router, complete):
    complete("one")
    client = RawClient(router.url, "/v1/completions?model=one", LONG)
    assert b" 401 " in client.read_until(b"\r\n\r\n")  # it has no key
    client.leave()
    with streaming(router, "one", "b-key") as answer:
        next(answer.iter_lines())
    router.wait_for(r"one: .* bob POST /v1/completions 200 disconnected ")

    def is_idle() -> bool:
        metrics = ask(router.url, "/metrics", x_api_key="b-key").text
        return 'vllm:num_requests_running{engine="0",model_name="one"} 0.0' in metrics

    wait_until(is_idle)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_or_hangs_is_replaced_and_its_streams_end_with_an_error(
    router, complete, number: signal.Signals
):
    complete("one"), complete("two")
    before = pids_below(router)
    with streaming(router, "one", "b-key") as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(before["one"], number)
        (error,) = errors_of(lines)
    assert error["code"] == "model_ended"
    assert "the model 'one' has ended: " in error["message"]
    # The second time in a row, it is started again after some seconds.
    path, body = "/v1/completions", {"model": "one", "prompt": "a", "max_tokens": 1}
    wait_until(lambda: ask(router.url, path, body, x_api_key="b-key").status == 200, 60)
    after = pids_below(router)
    assert after["one"] != before["one"] and after["two"] == before["two"]
    assert not is_running(before["one"])
    listed = ask(router.url, "/v1/models", x_api_key="b-key").body["data"]
    assert listed[0]["status"] == {"value": "loaded", "failed": False}
