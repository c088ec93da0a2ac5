"""``ModelProcess``: one model in a process of its own, from its start to its end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpcore

from mlx_paged.cli.streams import say
from mlx_paged.errors import shown, without_room
from mlx_paged.server.errors import ApiError
from mlx_paged.server.http.access import ANONYMOUS
from mlx_paged.server.http.http_server import BACKLOG

logger = logging.getLogger("mlx_paged.server")

State: TypeAlias = Literal["unloaded", "loading", "loaded", "failed"]
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
PROBE_SECONDS = 5.0  # between two probes of a process's health
DEADLINE = 30.0  # seconds for the answer to a probe
SECONDS_BEYOND_DRAIN = 30.0  # for a process to end, after its answers had their time
MAX_BACK_OFF = 60.0  # seconds; a process that has run longer did not fail in a row
_END_SECONDS = 2.0  # for a process to be gone after its connections
_MAX_LINE = 2**20  # bytes of a line of a process's log
# Why a process ended, in its own words: that of a program, and that of the server's log.
_REASON = re.compile(r"^mlx-paged serve: error: (.*)|ERROR - (the engine failed: .*)")
_LOST = (httpcore.NetworkError, httpcore.ProtocolError)


class ModelProcess:
    """A model in a process of its own.

    Args:
        name: for clients, and in the log.
        flags: the server's parsed flags for this model.
        path: where its socket is made: in a folder that only this user can open, with fewer than
            104 bytes, the limit of macOS.

    Attributes:
        names: the name, and aliases.
        max_model_len: the most tokens of a prompt and its answer; ``None`` if there is no limit, or
            the model was never loaded.
        description: what lists say of the model; ``None`` if it was never loaded.
        state: ``"failed"`` if the process ended by itself or could not load the model; like
            ``"unloaded"``, it can be started.
        num_requests: the requests that are being answered.
        loading_since: when the last start began, in seconds of ``time.monotonic``.
    """

    def __init__(self, name: str, flags: Mapping[str, Any], path: Path):
        self.name = name
        self.names = tuple(flags["served_model_name"])
        self.flags = flags
        self.max_model_len: int | None = None
        self.description: dict[str, Any] | None = None
        self.state: State = "unloaded"
        self.num_requests = 0
        self.loading_since = 0.0
        self._path = path
        self._changing = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._said = ""  # by the process, of why it ended
        self._failure: ApiError | None = None
        self._num_failures = 0  # in a row
        self._not_before = 0.0  # of the next start
        # One connection for each request, so that closing it cancels the request.
        self._pool = httpcore.AsyncConnectionPool(
            uds=str(path), max_connections=None, max_keepalive_connections=0
        )

    async def start(self, kv_cache_bytes: int | None = None) -> None:
        """Load the model; returns when it answers. If it is loaded already, does nothing.

        Args:
            kv_cache_bytes: the budget of its K/V, in the place of the flags'; then K/V of preempted
                requests have no host memory beside it, unless the flags say so.

        Raises:
            ApiError: the model can't be loaded, was unloaded meanwhile, or has failed several times
                within a short time.
        """
        async with self._changing:
            if self.state == "loaded":
                return
            if self._failure is not None and time.monotonic() < self._not_before:
                raise self._failure_now()
            self.state, self.loading_since = "loading", time.monotonic()
            try:
                await self._load(kv_cache_bytes)
            except BaseException:
                await self._kill()
                if self.state == "loading":
                    self.state = "unloaded"
                raise

    async def stop(self, seconds: float | None = None) -> bool:
        """Unload the model, or stop loading it; answers have ``--drain-seconds`` to end.

        Args:
            seconds: after which the process is killed; by default after it had the time that it
                may take.

        Returns:
            whether the process has ended by itself.
        """
        if seconds is None:
            seconds = self.flags["drain_seconds"] + SECONDS_BEYOND_DRAIN
        if self.state == "loading" and self._process is not None:
            self._process.terminate()
        self.state = "unloaded"
        async with self._changing:
            process = self._process
            if process is None or process.returncode is not None:
                return True
            self.state = "unloaded"  # also if it was loaded meanwhile
            process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), seconds)
                return True
            logger.error("the process of %s did not end in %g s; it is killed", self.name, seconds)
            await self._kill()
            return False

    async def shrink(self, kv_nbytes: int) -> int:
        """Change what K/V may take, to at most the budget of the start; returns what it is then.
        While requests are answered, it is only raised.
        """
        return int(json.loads(await self.ask(f"/router/budget?nbytes={kv_nbytes}"))["nbytes"])

    async def nbytes(self) -> int:
        """The bytes that the process holds by its own measure; 0 if there is none."""
        if self.state != "loaded":
            return 0
        return int(json.loads(await self.ask("/router/state"))["nbytes"])

    @asynccontextmanager
    async def send(
        self, method: str, target: bytes, headers: Headers, body: bytes = b""
    ) -> AsyncIterator[httpcore.Response]:
        """The response to a request, whose body can be read while the context is open; leaving it
        earlier cancels the request.

        Args:
            target: the path and the query.

        Raises:
            ApiError: the process has ended; also while the body is read.
        """
        self.num_requests += 1
        url = httpcore.URL(scheme=b"http", host=b"localhost", port=None, target=target)
        try:
            async with self._pool.stream(
                method, url, headers=[(b"host", b"localhost"), *headers], content=body
            ) as response:
                yield response
        except _LOST as error:
            raise await self._lost() from error
        finally:
            self.num_requests -= 1

    async def ask(self, target: str, *headers: tuple[bytes, bytes]) -> bytes:
        """The body of the response to a request of the router itself.

        Raises:
            ApiError: it is an error, or the process has ended.
        """
        url = httpcore.URL(scheme=b"http", host=b"localhost", port=None, target=target.encode())
        head = [(b"host", b"localhost"), ANONYMOUS.header(), *headers]
        try:
            response = await self._pool.request(b"GET", url, headers=head)
        except _LOST as error:
            raise await self._lost() from error
        if response.status != 200:
            text = response.content.decode(errors="replace")
            raise ApiError(503, f"the model {shown(self.name)} answers {target} with {text}")
        return response.content

    async def _load(self, kv_cache_bytes: int | None) -> None:
        """Start the process, which listens from the beginning, and wait until it answers."""
        self._said = ""
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._path))
            listener.listen(BACKLOG)
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "mlx_paged.router.child"),
                *(str(listener.fileno()), self.name),
                stdin=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_MAX_LINE,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal is for the router alone.
            )
        assert process.stdin is not None
        flags = dict(self.flags)
        if kv_cache_bytes is not None:
            flags |= {"kv_cache_bytes": kv_cache_bytes, "swap_bytes": flags["swap_bytes"] or "0"}
        process.stdin.write(json.dumps(flags).encode() + b"\n")
        relaying = asyncio.create_task(self._relay(process))
        is_ready = await self._answers(process)
        if self.state != "loading":
            raise ApiError(503, f"the model {shown(self.name)} is being unloaded; retry later")
        if not is_ready:
            await relaying
            reason = self._said or _in_words(process.returncode)
            self._note_failure(
                ApiError(500, f"can't be loaded: {reason}", code="model_load_failed")
            )
            raise self._failure_now()
        self.state = "loaded"
        logger.info("%s was loaded in %.1f s", self.name, time.monotonic() - self.loading_since)
        self._watching = asyncio.create_task(self._watch(process))

    async def _answers(self, process: asyncio.subprocess.Process) -> bool:
        """Wait until the process answers or has ended; returns whether it answers."""
        ending = asyncio.create_task(process.wait())
        # The connection waits in the backlog of the socket until then.
        asking = asyncio.create_task(self.ask("/router/state"))
        try:
            await asyncio.wait({ending, asking}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and asking.exception() is None:
                self.max_model_len = json.loads(asking.result())["max_model_len"]
                self.description = json.loads(await self.ask("/router/description"))
                return True
            await self._kill()
            return False
        finally:
            for task in (ending, asking):
                task.cancel()
            await asyncio.wait({ending, asking})

    async def _relay(self, process: asyncio.subprocess.Process) -> None:
        """Pass on what the process says on stderr, with the model's name in front."""
        assert process.stderr is not None
        while line := await process.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            say(f"{self.name}: {text}")
            if found := _REASON.search(text):
                self._said = without_room(found[1] or found[2])

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Probe the process while it runs; end it if it hangs, and note why it ended."""
        reason = ""
        while process.returncode is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), PROBE_SECONDS)
            if process.returncode is None and not await self._is_healthy():
                reason = f"it did not answer within {DEADLINE:g} s, so it was killed"
                await self._kill()
        if self.state == "loaded":
            what = reason or self._said or _in_words(process.returncode)
            self._note_failure(ApiError(503, f"has ended: {what}", code="model_ended"))

    async def _is_healthy(self) -> bool:
        try:
            async with asyncio.timeout(DEADLINE):
                await self.ask("/health")
        except (TimeoutError, ApiError):
            return False
        return True

    async def _kill(self) -> None:
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def _note_failure(self, error: ApiError) -> None:
        now = time.monotonic()
        if error.status == 503 and now > self.loading_since + MAX_BACK_OFF:
            self._num_failures = 0
        # The first time, it is started again at once.
        seconds = 2**self._num_failures if self._num_failures else 0
        self._not_before = now + min(seconds, MAX_BACK_OFF)
        self._num_failures += 1
        self._failure, self.state = error, "failed"
        logger.error("the model %s %s", self.name, error.message)

    def _failure_now(self) -> ApiError:
        """The error for requests after a failure."""
        assert self._failure is not None
        seconds = max(1, round(self._not_before - time.monotonic()))
        return ApiError(
            self._failure.status,
            f"the model {shown(self.name)} {self._failure.message}",
            code=self._failure.code,
            headers={"Retry-After": str(seconds)},
        )

    async def _lost(self) -> ApiError:
        """The error for requests whose connection was lost."""
        if self._watching is not None and self.state == "loaded":
            await asyncio.wait({self._watching}, timeout=_END_SECONDS)
        if self.state == "failed":
            return self._failure_now()
        return ApiError(503, f"the model {shown(self.name)} is being unloaded; retry later")


def _in_words(status: int | None) -> str:
    """How a process ended, by its exit status."""
    if status == -signal.SIGKILL:
        return "it was killed by signal 9, as the system does when memory runs out"
    if status is not None and status < 0:
        return f"it was killed by signal {-status}"
    return f"its process ended with status {status}"
