"""The log: one line per request, and lines with the id of the request that they belong to.

No line contains the texts of a user unless ``--log-prompts`` is given. Line ends and control
characters are escaped, so that no value can forge a line.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged.cli.streams import say
from mlx_paged.errors import frames_of
from mlx_paged.server.errors import CLIENT_LEFT

logger = logging.getLogger("mlx_paged.server")
_texts = logging.getLogger("mlx_paged.texts")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Polled by monitoring, or asked by a router.
_WATCHING_PATHS = frozenset(
    {"/health", "/metrics", "/v1/pool", "/router/state", "/router/budget", "/router/description"}
)
_MAX_LINE = 2**16  # characters
_NO_TEXT = "(its message may contain the text of a user; --log-prompts shows it)"


@dataclass
class RequestLine:
    """The contents of a request's line.

    Attributes:
        request_id: taken from the header ``x-request-id``, or generated.
        user: the name of the API key.
        status: the HTTP status; 0 before the response.
        is_complete: whether the whole response was sent.
        tokens: numbers of tokens by their kind: prompt, cached, answer.
    """

    request_id: str
    user: str = "-"
    status: int = 0
    is_complete: bool = False
    tokens: Counter[str] = field(default_factory=Counter)
    start: float = field(default_factory=time.perf_counter)

    def text(self, method: str, path: str) -> str:
        tokens = ""
        if self.tokens["prompt"]:
            tokens = "".join(f" {kind}={number}" for kind, number in self.tokens.items())
        end = "" if self.is_complete else " disconnected"
        seconds = time.perf_counter() - self.start
        return f"{self.user} {method} {path} {self.status or '-'}{end}{tokens} {seconds:.3f}s"


# The request of the current task.
_current: ContextVar[RequestLine | None] = ContextVar("mlx_paged_request", default=None)


def count_tokens(prompt: int = 0, cached: int = 0, answer: int = 0) -> None:
    """Add numbers of tokens to the line of this task's request."""
    line = _current.get()
    if line is not None:
        line.tokens.update(prompt=prompt, cached=cached, answer=answer)


def log_text(what: str, text: Callable[[], object]) -> None:
    """Log the text of a user if ``--log-prompts`` is given; only then ``text`` is called."""
    if _texts.isEnabledFor(logging.INFO):
        _texts.info("%s: %s", what, text())


class RequestLog:
    """Middleware that gives each request an id, and counts and logs it when it ends.

    The id is in ``scope["state"]["request_id"]``, in the response's headers ``x-request-id`` and
    ``request-id``, where OpenAI's and Anthropic's clients look for it, and in each line logged for
    the request.

    Args:
        count: called with each request and its status, which is 499 if the client disconnected, or
            was disconnected, before the response was complete.
    """

    def __init__(
        self, app: ASGIApp, count: Callable[[Scope, int], None] = lambda scope, status: None
    ):
        self._app = app
        self._count = count
        self._ids_in_use: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = RequestLine(self._id_of(dict(scope["headers"])))
        state = scope.setdefault("state", {})
        state["request_id"] = line.request_id
        # Not reset: each request has its own task, and uvicorn logs what fails here in it.
        _current.set(line)
        self._ids_in_use.add(line.request_id)
        id_bytes = line.request_id.encode()
        id_headers = [(b"x-request-id", id_bytes), (b"request-id", id_bytes)]

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *id_headers]}
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last and "connection" in state:
                line.is_complete = await state["connection"].has_sent(send, message)
            else:
                await send(message)
                line.is_complete = is_last

        failure = 0
        try:
            await self._app(scope, receive, send_noting)
        except Exception:
            failure = 500
            raise
        finally:
            self._count(scope, failure or (line.status if line.is_complete else CLIENT_LEFT))
            if "principal" in state:
                line.user = state["principal"].name
            is_quiet = line.status == 200 and scope["path"] in _WATCHING_PATHS
            is_quiet = is_quiet or "is_logged" in state  # by the process of a model
            level = logging.DEBUG if is_quiet else logging.INFO
            raw_path = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
            # Without the query, which may contain anything.
            path = raw_path.decode("latin-1").partition("?")[0]
            logger.log(level, "%s", line.text(scope["method"], path))
            self._ids_in_use.discard(line.request_id)

    def _id_of(self, headers: Mapping[bytes, bytes]) -> str:
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        if _REQUEST_ID.fullmatch(given) and given not in self._ids_in_use:
            return given
        return f"req_{secrets.token_hex(12)}"


class LineFormatter(logging.Formatter):
    """One line for each record, with the frames of an error indented below.

    Args:
        log_prompts: whether messages of unexpected errors are shown, which may contain anything.
    """

    default_msec_format = "%s.%03d"

    def __init__(self, log_prompts: bool):
        super().__init__()
        self._log_prompts = log_prompts

    def format(self, record: logging.LogRecord) -> str:
        line, error = _current.get(), record.exc_info and record.exc_info[1]
        message = record.getMessage().rstrip()
        # asyncio's messages quote the error and the arguments of a callback.
        if record.name == "asyncio" and record.exc_info and not self._log_prompts:
            message = "an error in the event loop"
        request_id = "-" if line is None else line.request_id
        head = f"{self.formatTime(record)} {record.levelname} {request_id}"
        frames = self._frames(error) if error else []
        return "\n    ".join((f"{head} {printable(message)}", *frames))

    def _frames(self, error: BaseException) -> list[str]:
        lines = []
        for each in reversed(_causes(error)):
            for frame in frames_of(each):
                lines.append(printable(f"{frame.filename}:{frame.lineno} {frame.name}"))
            what = str(each) if self._log_prompts else _NO_TEXT
            lines.append(printable(f"{type(each).__name__}: {what}"))
        return lines


def _causes(error: BaseException) -> list[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def printable(text: str) -> str:
    """The text on one line, with control characters escaped."""
    if len(text) > _MAX_LINE:
        text = text[: _MAX_LINE - 3] + "..."
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class _Stderr(logging.Handler):
    """Writes to stderr, and ignores failures to write there."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            say(text)


def setup_logging(log_level: str, log_prompts: bool) -> None:
    """Log to stderr: this package from ``log_level`` on, uvicorn and other libraries from warnings
    on.
    """
    handler = _Stderr()
    handler.setFormatter(LineFormatter(log_prompts))
    level: Any = log_level.upper()
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("mlx_paged").setLevel(level)
    _texts.setLevel(logging.INFO if log_prompts else logging.CRITICAL)
    for name in ("uvicorn", "uvicorn.error"):
        each = logging.getLogger(name)
        each.handlers, each.propagate = [], True
        each.setLevel(max(logging.getLevelName(level), logging.WARNING))
