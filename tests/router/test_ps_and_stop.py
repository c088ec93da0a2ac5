"""``mlx-paged ps`` and ``stop``: what they print of what a server answers."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mlx_paged.router.client import main_of_ps, main_of_stop

CARDS = [
    {
        "id": "qwen",
        "state": "loaded",
        "num_requests": 2,
        "idle_seconds": None,
        "seconds_left": None,
        "is_pinned": True,
    },
    {
        "id": "a/b",
        "state": "loaded",
        "num_requests": 0,
        "idle_seconds": 61.4,
        "seconds_left": 238.6,
        "is_pinned": False,
    },
    {"id": "gone", "state": "unloaded", "num_requests": 0},
]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    """The address of a server that answers as a router does, and the requests that it got."""
    got: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            loaded = [{"model": "qwen:latest", "size": 5 * 10**9}, {"model": "a/b", "size": 10**9}]
            self._answer(200, {"data": CARDS} if self.path == "/v1/models" else {"models": loaded})

        def do_POST(self) -> None:
            error = {"error": {"message": "there is no model 'nope'"}}
            self._answer(*((404, error) if "nope" in self.path else (200, {"success": True})))

        def _answer(self, status: int, body: Any) -> None:
            got.append(
                f"{self.command} {self.path} {self.headers.get('Authorization', '')}".strip()
            )
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.server_port}", got
    listener.shutdown()
    listener.server_close()
    thread.join()


def test_ps_lists_states_memory_and_times(
    server: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
):
    assert main_of_ps(["--url", server[0]]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "NAME  STATE     REQUESTS  MEMORY  IDLE FOR  UNLOADED IN",
        "qwen  loaded    2         5.0 GB            never, it is pinned",
        "a/b   loaded    0         1.0 GB  61 s      239 s",
        "gone  unloaded  0",
    ]
    assert main_of_ps(["--url", server[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"data": CARDS}


def test_stop_unloads_with_the_key_of_a_file(
    server: tuple[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    url, got = server
    keys = tmp_path / "keys"
    keys.write_text("# of this machine\nroot secret admin\nother second\n")
    keys.chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert main_of_stop(["a/b", "--url", f"{url}/", "--api-key-file", str(keys)]) == 0
    assert got == ["POST /v1/models/a/b/unload Bearer secret"]
    assert capsys.readouterr().out == "unloaded a/b\n"
    assert main_of_stop(["nope", "--url", url]) == 2
    assert "the server refuses: there is no model 'nope'" in capsys.readouterr().err
    keys.chmod(0o644)
    assert main_of_stop(["a/b", "--url", url, "--api-key-file", str(keys)]) == 2
    assert "chmod 600" in capsys.readouterr().err and len(got) == 2


def test_a_server_that_does_not_answer_is_one_line(capsys: pytest.CaptureFixture[str]):
    for url, why in (("http://127.0.0.1:1", "no server answers"), ("file:///etc", "must begin")):
        assert main_of_ps(["--url", url]) == 2
        said = capsys.readouterr()
        assert why in said.err and (said.err.count("\n"), said.out) == (1, "")
