"""Ids of requests and the lines of the log."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
from collections.abc import Iterator

import pytest
from helpers.asgi import ask, asked, echo

from mlx_paged.errors import forget_frames
from mlx_paged.server.http.access import Access
from mlx_paged.server.http.logs import (
    LineFormatter,
    RequestLog,
    _current,
    count_tokens,
    logger,
    printable,
    setup_logging,
)
from mlx_paged.server.settings import ServerSettings, read_api_keys

HEAD = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged, from debug on, as it is written."""
    written: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    keeper = Keeper()
    keeper.setFormatter(LineFormatter(log_prompts=False))
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logging.getLogger().addHandler(keeper)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    yield written
    logging.getLogger().removeHandler(keeper)


@pytest.mark.parametrize("given", ["abc-1.2:3_4", "x" * 128])
def test_a_sane_id_of_the_client_is_kept(given: str, lines: list[str]):
    answered = ask(RequestLog(echo), headers={"X-Request-Id": given})
    assert answered.state["request_id"] == given
    assert answered.headers["x-request-id"] == answered.headers["request-id"] == given
    assert f" {given} " in lines[0]


@pytest.mark.parametrize("given", ["", "a b", "a\nb", "x" * 129, "\x1b[2J", "{}", "\u00e9"])
def test_any_other_id_is_replaced(given: str):
    answered = ask(RequestLog(echo), headers={"X-Request-Id": given})
    assert re.fullmatch(r"req_[0-9a-f]{24}", answered.headers["x-request-id"])


def test_an_id_that_is_in_use_is_replaced():
    async def run() -> list[str]:
        both = asyncio.Barrier(2)

        async def waiting(scope, receive, send):
            await both.wait()
            await echo(scope, receive, send)

        app, headers = RequestLog(waiting), {"x-request-id": "same"}
        answers = await asyncio.gather(*[asked(app, headers=headers) for _ in range(2)])
        again = asyncio.create_task(asked(app, headers=headers))
        await both.wait()
        return [each.headers["x-request-id"] for each in [*answers, await again]]

    first, second, third = asyncio.run(run())
    assert first == third == "same" != second


def test_a_line_says_who_asked_for_what_and_what_it_took(lines: list[str]):
    async def answering(scope, receive, send):
        count_tokens(prompt=1204, cached=1024)
        count_tokens(answer=50)
        count_tokens(answer=7)
        await echo(scope, receive, send)

    settings = ServerSettings(api_keys=read_api_keys(["alice sesame"]))
    app = RequestLog(Access(answering, settings))
    headers = {"x-request-id": "id7", "x-api-key": "sesame"}
    ask(app, "POST", "/v1/chat/completions?key=secret", headers)
    ask(app, "POST", "/v1/messages", {"x-request-id": "id8"})
    assert re.fullmatch(
        HEAD + r"INFO id7 alice POST /v1/chat/completions 200 prompt=1204 cached=1024 answer=57 "
        r"\d+\.\d{3}s",
        lines[0],
    )
    assert re.fullmatch(HEAD + r"INFO id8 - POST /v1/messages 401 \d+\.\d{3}s", lines[1])
    assert _current.get() is None


def test_a_client_that_left_and_a_failure_have_lines_too(lines: list[str]):
    async def cut(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})

    async def silent(scope, receive, send):
        pass

    async def failing(scope, receive, send):
        raise KeyError("a prompt")

    ask(RequestLog(cut), "POST", "/cut")
    ask(RequestLog(silent), "POST", "/silent")
    with pytest.raises(KeyError):
        ask(RequestLog(failing), "POST", "/failing")
    assert " - POST /cut 200 disconnected 0." in lines[0]
    assert " - POST /silent - disconnected 0." in lines[1]
    assert " - POST /failing - disconnected 0." in lines[2]


def test_what_uvicorn_says_of_a_request_that_failed_has_its_id(lines: list[str]):
    async def failing(scope, receive, send):
        raise KeyError

    async def run() -> None:
        try:
            await asked(RequestLog(failing), headers={"x-request-id": "id9"})
        except KeyError:
            logging.getLogger("another.library").error("Exception in ASGI application\n")

    asyncio.run(run())
    assert lines[-1].endswith("ERROR id9 Exception in ASGI application")


def test_what_watches_the_server_is_logged_only_to_debug_it(lines: list[str]):
    ask(RequestLog(echo), "GET", "/health")
    ask(RequestLog(echo), "GET", "/metrics")
    ask(RequestLog(echo), "GET", "/v1/models")
    assert [line.split()[2] for line in lines] == ["DEBUG", "DEBUG", "INFO"]


def test_no_value_makes_a_line_of_its_own(lines: list[str]):
    ask(RequestLog(echo), "GET\r\nX", "/a\nINFO fake\x1b[2J\u2028b")
    logger.info("one %s", "two\n2026-01-01 INFO fake")
    assert len(lines) == 2
    assert not any(re.search(r"[\x00-\x1f\u2028]", line) for line in lines)
    assert r"GET\r\nX /a\nINFO fake\x1b[2J" in lines[0]
    assert lines[1].endswith(r"one two\n2026-01-01 INFO fake")
    assert len(printable("x" * 100_000)) == 2**16
    assert printable("gr\u00fc\u00df dich, \u4f60\u597d") == "gr\u00fc\u00df dich, \u4f60\u597d"


def test_an_error_has_its_frames_and_no_text_of_a_users():
    def fail() -> None:
        try:
            raise KeyError("my secret prompt")
        except KeyError as error:
            raise ValueError("my secret prompt\nfake line") from error

    def written(log_prompts: bool) -> list[str]:
        try:
            fail()
        except ValueError as error:
            record = logger.makeRecord(
                "x", logging.ERROR, "", 0, "it failed", (), (type(error), error, None)
            )
        return LineFormatter(log_prompts).format(record).split("\n")

    lines = written(log_prompts=False)
    assert lines[0].endswith("ERROR - it failed")
    assert all(line.startswith("    ") for line in lines[1:])
    assert any("KeyError: (its message may contain" in line for line in lines)
    assert any("ValueError: (its message may contain" in line for line in lines)
    assert any(line.endswith(" fail") for line in lines)  # where it came from
    assert "secret" not in "".join(lines)
    assert lines != written(log_prompts=True)
    assert written(log_prompts=True)[-1] == r"    ValueError: my secret prompt\nfake line"


def test_asyncio_quotes_no_error_and_no_argument_of_a_callback(lines: list[str]):
    def fail(text: str) -> None:
        raise ValueError(f"{text} and more")

    async def forgotten() -> None:
        fail("my secret prompt")

    async def run() -> None:
        asyncio.get_running_loop().call_soon(fail, "my secret prompt")
        task = asyncio.create_task(forgotten())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del task
        gc.collect()

    asyncio.run(run())
    assert len(lines) == 2
    for line in lines:
        assert "ERROR - an error in the event loop\n" in line and "secret" not in line
        assert line.splitlines()[-1].startswith("    ValueError: (its message may contain")


def test_an_error_of_a_step_has_frames_though_it_holds_none():
    def fail() -> None:
        raise ValueError("my secret prompt")

    try:
        fail()
    except ValueError as error:
        forget_frames(error, "In a step of the engine")
        record = logger.makeRecord(
            "x", logging.ERROR, "", 0, "it failed", (), (type(error), error, None)
        )
        assert error.__traceback__ is None
    lines = LineFormatter(log_prompts=False).format(record).splitlines()
    assert [line.rpartition(" ")[2] for line in lines[1:3]] == [
        "test_an_error_of_a_step_has_frames_though_it_holds_none",
        "fail",
    ]
    assert "secret" not in "".join(lines)


def test_lines_of_others_are_shown_from_warnings_on(capsys: pytest.CaptureFixture):
    root = logging.getLogger()
    before = root.handlers[:], root.level, logger.parent.level  # type: ignore[union-attr]
    try:
        setup_logging("info", log_prompts=False)
        for name in ("mlx_paged.server", "uvicorn.error", "huggingface_hub"):
            for level in (logging.DEBUG, logging.INFO, logging.WARNING):
                logging.getLogger(name).log(level, "%s %d", name, level)
    finally:
        root.handlers[:], root.level = before[0], before[1]
        logger.parent.setLevel(before[2])  # type: ignore[union-attr]
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split(" - ")[1] for line in said.err.splitlines()] == [
        "mlx_paged.server 20",
        "mlx_paged.server 30",
        "uvicorn.error 30",
        "huggingface_hub 30",
    ]
