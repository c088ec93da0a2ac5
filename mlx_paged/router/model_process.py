"""``ModelProcess``: one model in a process of its own, from its start to its end."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpcore

from mlx_paged.cli.streams import say
from mlx_paged.errors import one_line, shown, without_room
from mlx_paged.options.config import DEFAULT_BLOCK_SIZE, KVBudget
from mlx_paged.server.errors import ApiError
from mlx_paged.server.http.access import ANONYMOUS
from mlx_paged.server.http.http_server import BACKLOG
from mlx_paged.server.program import max_adapters_of

logger = logging.getLogger("mlx_paged.server")

State: TypeAlias = Literal["unloaded", "loading", "loaded", "failed"]
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
PROBE_SECONDS = 5.0  # between two probes of a process's health
DEADLINE = 30.0  # seconds for the answer to a probe
SECONDS_BEYOND_DRAIN = 30.0  # for a process to end, after its answers had their time
MAX_BACK_OFF = 60.0  # seconds; a process that has run longer did not fail in a row
# What a process takes beside weights, activations and K/V: Python, its modules, a tokenizer.
PROCESS_NBYTES = 256 * 2**20
# A model is loaded only with room for the K/V of a conversation of this length, or of its context.
LEAST_TOKENS = 32_768
MEASURE_SECONDS = 120.0  # for what a model needs, which may have to ask the hub
_END_SECONDS = 2.0  # for a process to be gone after its connections
_MAX_LINE = 2**20  # bytes of a line of a process's log
# Why a process ended, in its own words: that of a program, and that of the server's log.
_REASON = re.compile(r"^mlx-paged serve: error: (.*)|ERROR - (the engine failed: .*)")
_LOST = (httpcore.NetworkError, httpcore.ProtocolError)


@dataclass(frozen=True)
class Need:
    """The bytes that a model takes.

    Args:
        weights: with those of its draft model.
        activations: of its largest step, an estimate.
        least_kv: K/V and states without which it is not worth loading.
        most_kv: more is of no use to it, because the user has chosen its budget.
    """

    weights: int
    activations: int
    least_kv: int
    most_kv: float = math.inf

    @property
    def nbytes(self) -> int:
        """The least that it takes as a process."""
        return PROCESS_NBYTES + self.weights + self.activations + self.least_kv


class ModelProcess:
    """A model in a process of its own.

    Args:
        name: for clients, and in the log.
        flags: the server's parsed flags for this model.
        path: where its socket is made: in a folder that only this user can open, with fewer than
            104 bytes, the limit of macOS.

    Attributes:
        names: the name, aliases, and those of its adapters.
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
        adapters = [adapter for adapter, _ in flags.get("adapters", ())]
        self.names = (*flags["served_model_name"], *adapters)
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

    async def measure(self) -> Need:
        """What the model needs, computed by ``mlx-paged fit`` from its configuration and the
        headers of its weights, in a process of its own: modules and arrays leave nothing behind.

        Raises:
            ApiError: there is no such model, it can't run here, or the hub does not answer.
        """
        flags = {**self.flags, "max_adapters": max_adapters_of(self.flags)}
        words = ["fit", flags.get("model") or "demo", "--json"]
        for flag, name in (
            ("--draft-model", "draft_model"),
            ("--kv-bits", "kv_format"),
            ("--max-adapters", "max_adapters"),
            ("--max-adapter-rank", "max_adapter_rank"),
        ):
            if flags.get(name) is not None:
                words += [flag, str(flags[name])]
        output, errors = await _written_by("mlx_paged", *words)
        if not output:
            lines = errors.decode(errors="replace").strip().splitlines() or ["it gave no reason"]
            what = without_room(lines[-1].partition("error: ")[2] or lines[-1])
            named = shown(flags["served_model_name"][0])
            raise ApiError(
                500, f"the model {named} can't be loaded: {what}", code="model_load_failed"
            )
        found = json.loads(output)
        num_tokens = min(LEAST_TOKENS, flags.get("max_model_len") or found["context_of_model"])
        least_kv = found["kv_per_token"] * num_tokens + found["states"]
        given = flags.get("kv_cache_bytes")
        if given is not None:
            budget = KVBudget.parse(given)
            block_nbytes = found["kv_per_token"] * flags.get("block_size", DEFAULT_BLOCK_SIZE)
            least_kv = budget.nbytes or ((budget.num_blocks or 0) + 1) * block_nbytes
        most_kv = math.inf if given is None else least_kv
        return Need(found["weights"], found["activations_estimated"], least_kv, most_kv)

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
        limit: float = self.flags["drain_seconds"] + SECONDS_BEYOND_DRAIN
        if seconds is not None:
            limit = seconds
        if self.state == "loading":
            self._terminate()
        self.state = "unloaded"
        async with self._changing:
            process = self._process
            if process is None or process.returncode is not None:
                return True
            self.state = "unloaded"  # also if it was loaded meanwhile
            self._terminate()
            await _end_of(process, limit)
            if process.returncode is not None:
                return True
            logger.error("the process of %s did not end in %g s; it is killed", self.name, limit)
            await self._kill()
            return False

    async def describe(self) -> None:
        """Find out what lists say of the model, without loading it, if that is not known yet. Of a
        GGUF file, or of a model that is not on this machine, it is known once it was loaded.
        """
        if self.description is not None:
            return
        words = ("mlx_paged.router.child", "--describe", "-1", self.name)
        output, _ = await _written_by(*words, given=json.dumps(dict(self.flags)).encode())
        if output:
            self.description = json.loads(output)

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
            raise ApiError(503, f"{target} is answered with {one_line(text)}")
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
        while not process.stderr.at_eof():
            with suppress(ValueError):  # a line beyond _MAX_LINE
                text = (await process.stderr.readline()).decode(errors="replace").rstrip()
                if text:
                    say(f"{self.name}: {text}")
                if found := _REASON.search(text):
                    self._said = without_room(found[1] or found[2])

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Probe the process while it runs; end it if it hangs, and note why it ended."""
        reason = ""
        while process.returncode is None:
            await _end_of(process, PROBE_SECONDS)
            if process.returncode is None and (found := await self._sickness()):
                await _end_of(process, _END_SECONDS)  # It may be about to end.
                if process.returncode is None:
                    reason = f"{found}, so it was killed"
                    await self._kill()
        if self.state == "loaded":
            what = reason or self._said or _in_words(process.returncode)
            self._note_failure(ApiError(503, f"has ended: {what}", code="model_ended"))

    async def _sickness(self) -> str:
        """Why the process should not go on; empty if it should."""
        try:
            async with asyncio.timeout(DEADLINE):
                await self.ask("/health")
        except TimeoutError:
            return f"it did not answer within {DEADLINE:g} s"
        except ApiError as error:
            return error.message
        return ""

    def _terminate(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    async def _kill(self) -> None:
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def _note_failure(self, error: ApiError) -> None:
        now = time.monotonic()
        if now > self.loading_since + MAX_BACK_OFF:
            self._num_failures = 0
        # The first time, it is started again at once.
        seconds = 2**self._num_failures if self._num_failures else 0
        self._not_before = now + min(seconds, MAX_BACK_OFF)
        self._num_failures += 1
        self._failure, self.state = error, "failed"
        logger.error("the model %s %s", self.name, error.message)

    @property
    def failure(self) -> str | None:
        """What happened to the process when it last failed, after its name."""
        return None if self._failure is None else self._failure.message

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
        if self.state == "loaded" and self._watching not in (None, asyncio.current_task()):
            await asyncio.wait({self._watching}, timeout=_END_SECONDS)
        if self.state == "failed":
            return self._failure_now()
        return ApiError(503, f"the model {shown(self.name)} is being unloaded; retry later")


async def _end_of(process: asyncio.subprocess.Process, seconds: float) -> None:
    """Wait for the end of a process, but no longer than this."""
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)


async def _written_by(*words: str, given: bytes = b"") -> tuple[bytes, bytes]:
    """The JSON that a module of this package writes to stdout, nothing if it fails; and stderr.

    Args:
        words: the module and its arguments.
        given: its stdin.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(MEASURE_SECONDS):
            output, errors = await process.communicate(given)
    except TimeoutError:
        return b"", b"its size was not found in time"
    finally:
        if process.returncode is None:
            process.kill()
    begin = output.find(b"{")  # Libraries may have printed something before it.
    return b"" if process.returncode == 2 or begin < 0 else output[begin:], errors


def _in_words(status: int | None) -> str:
    """How a process ended, by its exit status."""
    if status == -signal.SIGKILL:
        return "it was killed by signal 9, as the system does when memory runs out"
    if status is not None and status < 0:
        return f"it was killed by signal {-status}"
    return f"its process ended with status {status}"
