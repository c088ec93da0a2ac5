"""The server as a process: what it says, what it logs, and how signals and failures end it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from helpers.server_programs import Program, running
from helpers.servers import ask, bodies_of, num_cached

from mlx_paged.__main__ import main as run_command
from mlx_paged.errors import STUCK_STATUS

LONG = {
    "prompt": "The code of apple is 4821.",
    "stream": True,
    "ignore_eos": True,
    "temperature": 0,
    "max_tokens": 3500,
}
# Steps are slowed down, so that an answer takes as long as a test needs.
SLOW = """
import sys, time
from mlx_paged.engine.engine import Engine
step = Engine.step
def slow_step(self):
    time.sleep(0.02)
    return step(self)
Engine.step = slow_step
"""
SMALL = """
import sys
from mlx_paged.models import memory
memory.memory_size = lambda: 200_000
"""
# Waits in native code, or in Python code that catches what is raised in it.
HANGING = """
import sys, time
from mlx_paged.engine.model_runner import ModelRunner
from mlx_paged.server.http import http_server
http_server.ABORT_SECONDS = http_server.STEP_SECONDS = 1.0
def launch(self, *arguments):
    print("begun", file=sys.stderr, flush=True)
    while {is_native}:
        time.sleep(600)
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
ModelRunner.launch = launch
"""
FAILING = """
import sys
from mlx_paged.engine.engine import Engine
def step(self):
    raise MemoryError("the GPU is gone")
Engine.step = step
"""


def events_of(response: httpx.Response) -> Iterator[object]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            text = line.removeprefix("data: ")
            yield text if text == "[DONE]" else json.loads(text)


@contextmanager
def streaming(
    *flags: str, max_tokens: int = 3500, key: str = "none"
) -> Iterator[tuple[Program, Iterator[object]]]:
    """A slow server process in the middle of an answer, and the events that are left of it."""
    body = LONG | {"max_tokens": max_tokens}
    with (
        running(*flags, patch=SLOW) as program,
        httpx.stream(
            "POST", f"{program.url}/v1/completions", json=body, headers={"x-api-key": key}
        ) as answer,
    ):
        events = events_of(answer)
        next(events)
        yield program, events


def test_a_server_says_what_it_serves_and_logs_what_it_was_asked():
    with running("--api-key", "alice sesame", "--log-cache") as program:
        assert "[loading the bundled demo model ...]" in program.said[0]
        assert re.search(r"for K/V, 8,000 tokens \| .* \| 1 key\]", program.said[1])
        assert "Authorization: Bearer KEY" in program.wait_for(r"try: curl .*")
        answer = httpx.post(
            f"{program.url}/v1/completions",
            headers={"x-api-key": "sesame", "x-request-id": "mine"},
            json={"prompt": "A secret prompt", "max_tokens": 5, "ignore_eos": True},
        )
        usage = answer.json()["usage"]
        assert answer.headers["x-request-id"] == "mine"
        assert usage["completion_tokens"] == 5
        assert "mine cache: 0 of " in program.wait_for(r"INFO mine cache: .*")
        line = program.wait_for(r"mine alice POST .*")
        assert line.startswith(
            f"mine alice POST /v1/completions 200 prompt={usage['prompt_tokens']} cached=0 "
            "answer=5 "
        )
        assert httpx.get(f"{program.url}/v1/models").status_code == 401
        assert httpx.get(f"{program.url}/health").status_code == 200
        program.signal(signal.SIGTERM)
        assert program.end() == 0
    assert "secret" not in "".join(program.said)


@pytest.mark.slow
def test_a_server_says_that_its_model_does_not_fit_and_the_context_that_its_budget_holds():
    with running("--kv-cache-bytes", "20blocks", "--force", patch=SMALL) as program:
        _, warning, start, *_ = program.said
    assert warning.startswith("[engine] the model does not fit into this machine: its weights")
    assert "holds 320 of its 4,096 tokens of context" in warning
    assert "| context: 320 of 4,096 tokens, as many as the K/V budget holds |" in start


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_answers_end_and_takes_no_others(number: signal.Signals):
    with streaming("--log-prompts", "--log-cache", max_tokens=25) as (program, events):
        program.signal(number)
        program.wait_for("shutting down")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{program.url}/health")
        *_, last_choice, done = events
        assert done == "[DONE]"
        assert last_choice["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
        assert program.end() == 0
    assert "prompt: The code of apple is 4821." in "".join(program.said)
    assert re.search(r"prompt=\d+ cached=0 answer=25 ", "".join(program.said))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("alice old\n")
    file.chmod(0o600)
    return file


@pytest.mark.slow
def test_hanging_up_reads_keys_again_and_ends_no_answer(key_file: Path):
    flags = ("--api-key-file", str(key_file))
    with streaming(*flags, max_tokens=60, key="old") as (program, events):
        key_file.write_text("alice new\n")
        program.signal(signal.SIGHUP)
        program.wait_for("the API keys were reread: 1 key")
        statuses = [
            httpx.get(f"{program.url}/v1/models", headers={"x-api-key": key}).status_code
            for key in ("old", "new")
        ]
        assert statuses == [401, 200]
        assert [*events][-1] == "[DONE]"
        key_file.write_text("alice newer\n")  # without a signal
        program.wait_for("the API keys were reread: 1 key")
        program.signal(signal.SIGTERM)
        assert program.end() == 0


@pytest.mark.slow
def test_the_end_of_its_terminal_ends_a_server_also_with_a_file_of_keys(key_file: Path):
    master, slave = os.openpty()
    in_terminal = f"""
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(os.open({os.ttyname(slave)!r}, os.O_RDWR), termios.TIOCSCTTY, 0)
"""
    with running("--api-key-file", str(key_file), patch=in_terminal) as program:
        program.signal(signal.SIGHUP)
        program.wait_for("the API keys were reread")
        os.close(slave)
        os.close(master)
        program.wait_for("shutting down")
        assert program.end() == 0


@pytest.mark.slow
def test_what_still_runs_after_the_drain_is_told_that_it_was_aborted():
    with streaming("--drain-seconds", "0.3") as (program, events):
        program.signal(signal.SIGTERM)
        error = [event for event in events if isinstance(event, dict) and "error" in event]
        assert [each["error"]["code"] for each in error] == ["aborted"]
        assert program.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_native", [True, False])
def test_a_step_that_hangs_is_abandoned_with_a_status_of_its_own(is_native: bool):
    with running("--drain-seconds", "0.3", patch=HANGING.format(is_native=is_native)) as program:
        with ThreadPoolExecutor() as pool:
            url = f"{program.url}/v1/completions"
            answer = pool.submit(httpx.post, url, json={"prompt": "a"}, timeout=60)
            program.wait_for("begun")
            program.signal(signal.SIGTERM)
            told = answer.result()
        assert program.end() == STUCK_STATUS == 70
    assert "a step of the engine did not end; it is abandoned" in program.said[-1]
    assert told.status_code == 503
    assert "a step did not end when it was shut down" in told.json()["error"]["message"]


@pytest.mark.slow
def test_the_second_interrupt_ends_at_once_while_a_step_that_hangs_is_waited_for():
    patch = HANGING.format(is_native=True) + "http_server.STEP_SECONDS = 600.0\n"
    with running(patch=patch) as program:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{program.url}/v1/completions", json={"prompt": "a"}, timeout=2)
        program.wait_for(" disconnected ")
        program.signal(signal.SIGINT)
        program.wait_for("shutting down; 0 requests")
        time.sleep(1)  # By then, the end of the step is waited for.
        program.signal(signal.SIGINT)
        assert program.end() == 130


@pytest.mark.slow
def test_the_second_interrupt_ends_at_once():
    with streaming() as (program, events):
        program.signal(signal.SIGINT)
        program.wait_for("Ctrl-C again to end at once")
        next(events)
        program.signal(signal.SIGINT)
        with pytest.raises(httpx.TransportError):
            list(events)
        assert program.end() == 130


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--log-prompts",)])
def test_an_engine_that_fails_ends_the_server_after_it_said_where(flags: tuple[str, ...]):
    with running(*flags, patch=FAILING) as program:
        answer = httpx.post(f"{program.url}/v1/completions", json={"prompt": "a"}, timeout=30)
        assert answer.status_code == 503
        assert re.search("it stopped: MemoryError at <string>:5", answer.json()["error"]["message"])
        assert program.end() == 1
    said = "".join(program.said)
    assert re.search(r"ERROR - the engine failed: \[engine\] it stopped: MemoryError at ", said)
    # Its message may hold a text of a user's.
    assert ("the GPU is gone" in said) == bool(flags)


def test_serve_is_a_command_and_the_help_names_it(capsys: pytest.CaptureFixture):
    assert run_command(["serve", "--version"]) == 0
    assert run_command(["--help"]) == 0
    assert "  serve  " in capsys.readouterr().out
    assert run_command(["serve", "--port", "x"]) == 2
    assert " serve: error: argument --port" in capsys.readouterr().err


@pytest.mark.slow
def test_users_share_no_cached_prompt_on_any_path_and_see_no_reports_of_others():
    with running("--api-key", "key2 a", "--api-key", "b") as program:

        def found(key: str, path: str) -> int:
            # They differ from the first token on, as a user's own prompts are shared.
            text = f"{path.rpartition('/')[2]}: the code of apple is 4821. " * 6
            answer = ask(program.url, path, bodies_of(text, 2)[path], x_api_key=key)
            assert answer.status == 200, answer.text
            return num_cached(answer.body["usage"])

        def reports(key: str) -> list[dict[str, object]]:
            return list(ask(program.url, "/v1/cache?limit=100", x_api_key=key).body["reports"])

        for path in bodies_of("", 2):
            first, again, others = (found(key, path) for key in ("a", "a", "b"))
            assert first == others == 0 < again, path
        assert (len(reports("a")), len(reports("b"))) == (8, 4)
        program.signal(signal.SIGTERM)
        assert program.end() == 0
