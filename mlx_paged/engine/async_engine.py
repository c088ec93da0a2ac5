"""``AsyncEngine``: an engine that steps by itself, for requests of any thread or event loop."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import queue
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from typing import TypeAlias, Unpack

from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.block_store.worker import SECONDS_AT_EXIT
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.input_processor import Prompt
from mlx_paged.engine.options import RequestOptions, with_step_seconds
from mlx_paged.engine.request import merge_parts
from mlx_paged.engine.stats import EngineStats, EngineView
from mlx_paged.engine.thread import (
    SECONDS_TO_STOP,
    ForkedError,
    StuckStepError,
)
from mlx_paged.errors import AdaptersInUseError, ArgumentError, EngineStoppedError
from mlx_paged.models.adapters import Adapter
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.options.engine_options import EngineOptions
from mlx_paged.options.foreign_arguments import refuse_unknown
from mlx_paged.options.sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from mlx_paged.request import NAME, REQUEST_ID, RequestOutput

# A reader receives outputs or, if the engine stops before the answer is finished, the reason.
News: TypeAlias = RequestOutput | EngineStoppedError
# The interval at which blocks are offered again to a disk that is too slow, while idle.
SAVE_SECONDS = 0.05
# The interval at which a request asks for its adapter again while others use all that fit.
_SECONDS_BETWEEN_TRIES = 0.05

Receiver: TypeAlias = Callable[[News], None]


class AsyncEngine:
    """Streams the answers of any number of concurrent requests::

        async with AsyncEngine(model, tokenizer) as engine:
            async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=100)):
                print(output.outputs[0].text)

        with AsyncEngine(model, tokenizer) as engine:            # the same without asyncio
            for output in engine.stream("Once upon a time"):
                ...

    Each output is a separate value: the whole answer so far, unless ``output_kind`` of the
    parameters says otherwise. A slow reader misses no text, only intermediate outputs. Leaving the
    loop, or cancelling its task, aborts the request.

    With several ranks, only rank 0 can have one; the others make an :class:`Engine` with the same
    options and call :meth:`Engine.follow`.

    Args:
        model, tokenizer, draft_model, engine_options: as :class:`Engine`. If the tokens of a step
            are not given, ``prefill_step_seconds`` is 1 and ``mixed_step_seconds`` is 0.2.
    """

    def __init__(
        self,
        model: Module,
        tokenizer: TokenizerWrapper | None = None,
        *,
        draft_model: Module | None = None,
        **engine_options: Unpack[EngineOptions],
    ):
        refuse_unknown(AsyncEngine, engine_options, EngineOptions.__annotations__)
        group = model.group if isinstance(model, LanguageModel) else None
        if group is not None and group.rank() > 0:
            raise RuntimeError(
                f"[engine] AsyncEngine is for rank 0, and this is rank {group.rank()}: make an "
                "Engine of the same options here, and call its follow()"
            )
        # Made in the caller's thread, so that the caller gets the errors of wrong settings.
        options = with_step_seconds(engine_options)
        self.engine = Engine(model, tokenizer, draft_model=draft_model, **options)
        self._request_ids = map(str, itertools.count())
        self._loop = _EngineLoop(self.engine)
        self._receivers = self._loop.receivers
        # The thread refers to the loop, and only users refer to this object: when they drop it, the
        # thread ends.
        weakref.finalize(self, self.engine.thread.end).atexit = False
        self.engine.thread.run_in_background(self._loop.run, self._loop.end)

    # From any thread

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Iterate over the outputs of a request; the last one has ``finished`` set.

        Args:
            request_id: for :meth:`abort`; must not be in use. By default a new one.
            options: ``priority``, ``cache_salt``, ``no_store``, ``user``, ``adapter`` and
                ``token_rules`` of :meth:`Engine.add_request`. While other requests use all adapters
                that fit, one for another adapter waits for them.

        Raises:
            ValueError, PromptTooLongError: as :meth:`Engine.add_request`.
            EngineStoppedError: the engine was shut down.
            Exception: the error that failed the request, such as that of a logits processor.
        """
        refuse_unknown(AsyncEngine.generate, options, RequestOptions.__annotations__)
        return self._generate(prompt, params, request_id, options)

    async def _generate(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        request_id: str | None,
        options: RequestOptions,
    ) -> AsyncGenerator[RequestOutput, None]:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[News] = asyncio.Queue()
        reader_id = self._id_of(request_id)

        def receive(news: News) -> None:
            try:
                loop.call_soon_threadsafe(inbox.put_nowait, news)
            except RuntimeError:
                # The reader's event loop is closed.
                self._forget(reader_id, receive)

        is_prepared = options.get("token_rules") is not None
        if isinstance(params, SamplingParams) and params.is_slow_to_prepare and not is_prepared:
            # In this thread, the compiler and the tokenizer would block the event loop.
            rules = await asyncio.to_thread(self.engine.prepare, params)
            options = {**options, "token_rules": rules}
        try:
            while True:
                try:
                    await self._have_adapter(options.get("adapter"))
                    self._add(prompt, params, reader_id, options, receive)
                    break
                except AdaptersInUseError:
                    await asyncio.sleep(_SECONDS_BETWEEN_TRIES)
            output: RequestOutput | None = None
            while output is None or not output.finished:
                output = _newest(await inbox.get(), inbox, params)
                yield output
        finally:
            self._forget(reader_id, receive)

    async def _have_adapter(self, name: str | None) -> None:
        """Load an adapter again if others have taken its place, in another thread: reading it and
        waiting for the running step would block the event loop.
        """
        name = NAME.check("engine", "adapter", name)
        if name is not None and self.engine.adapters.find(name) is None:
            await asyncio.to_thread(self.engine.have_adapter, name)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[RequestOutput, None, None]:
        """The same as :meth:`generate`, for threads. It does not wait for an adapter; see
        :meth:`Engine.add_request`.
        """
        refuse_unknown(AsyncEngine.stream, options, RequestOptions.__annotations__)
        request_id = self._id_of(request_id)
        outputs = self._stream(prompt, params, request_id, options)
        # This enters its ``try``, so that a stream that is dropped unread aborts its request.
        next(outputs)
        return outputs

    def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        request_id: str,
        options: RequestOptions,
    ) -> Generator[RequestOutput, None, None]:
        """The outputs of a request, after an empty one that is not for the reader."""
        inbox: queue.SimpleQueue[News] = queue.SimpleQueue()
        receive = inbox.put  # kept, because each access makes another object
        try:
            self._add(prompt, params, request_id, options, receive)
            output = RequestOutput(request_id, None, [], [])
            yield output
            while not output.finished:
                self.engine.thread.check_process()
                output = _newest(inbox.get(), inbox, params)
                yield output
        finally:
            self._forget(request_id, receive)

    def abort(self, request_id: str) -> None:
        """Abort a request; its reader gets a last output with finish reason ``"abort"``."""
        self.engine.abort(request_id)

    def abort_all(self) -> None:
        """Abort all requests."""
        self.engine.abort_all()

    def stopped(self) -> EngineStoppedError | None:
        """The error that new requests get: the engine was shut down, or its thread failed, which is
        then the ``__cause__``; ``None`` while it runs.
        """
        thread = self.engine.thread
        return thread.stopped() if thread.has_ended else None

    def step_seconds(self) -> float:
        """How long the current step has been running; 0 if there is none.

        The steps until the first answer is finished do not count, because compiling, and reading
        the weights for the first time, may take long.
        """
        begin = self._loop.step_begin
        return 0.0 if begin is None else self._loop.clock() - begin

    def __repr__(self) -> str:
        return f"AsyncEngine({self.engine!r})"

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def view(self) -> EngineView:
        """The pool and the requests at this moment; see :meth:`Engine.view`."""
        return self.engine.view()

    def shrink(self) -> int:
        """Free K/V memory that no running request needs; see :meth:`Engine.shrink`."""
        return self.engine.shrink()

    def load_adapter(self, name: str, folder: str | Path) -> Adapter:
        """Load a LoRA adapter; see :meth:`Engine.load_adapter`."""
        return self.engine.load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Refuse further requests for an adapter; see :meth:`Engine.unload_adapter`."""
        self.engine.unload_adapter(name)

    def set_budget(self, nbytes: int) -> int:
        """Change the budget of K/V; see :meth:`Engine.set_budget`."""
        return self.engine.set_budget(nbytes)

    def save_snapshot(
        self,
        path: str | Path,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> int:
        """Write the K/V of a conversation to a file; see :meth:`Engine.save_snapshot`."""
        return self.engine.save_snapshot(path, token_ids, cache_salt=cache_salt, adapter=adapter)

    def load_snapshot(
        self, path: str | Path, *, cache_salt: str | None = None, adapter: str | None = None
    ) -> list[int]:
        """Load the K/V of a file into the prefix cache; see :meth:`Engine.load_snapshot`."""
        return self.engine.load_snapshot(path, cache_salt=cache_salt, adapter=adapter)

    def shutdown(self, timeout: float | None = None) -> bool:
        """Abort all requests, write the blocks that are queued for ``cache_dir``, for a few seconds
        at most, and end the thread; readers get their last outputs. Can be called more than once.

        Args:
            timeout: the most seconds to wait for the step that runs; by default, its end is waited
                for. A step that has not ended by then is abandoned: the engine is stopped, and its
                readers get an :class:`EngineStoppedError`.

        Returns:
            Whether all of this was done. ``False`` if a step was abandoned.
        """
        thread = self.engine.thread
        thread.end()
        if timeout is not None and thread.failure is None and not thread.is_current:
            if self._loop.has_left_steps.wait(timeout):
                timeout = SECONDS_AT_EXIT + timeout
            else:
                thread.stop(StuckStepError("a step did not end when it was shut down"))
                self._loop.report_stopped()
        # One that was stopped may not end.
        has_ended = thread.join(timeout if thread.failure is None else SECONDS_TO_STOP)
        return has_ended and not isinstance(thread.failure, StuckStepError)

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.shutdown)

    def _id_of(self, request_id: str | None) -> str:
        """The given id of a request, checked, or a new one."""
        if request_id is not None:
            return REQUEST_ID.check("engine", "request_id", request_id)
        # The user may have chosen such an id, too.
        return next(
            name for n in self._request_ids if (name := f"request-{n}") not in self._receivers
        )

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        request_id: str,
        options: RequestOptions,
        receiver: Receiver,
    ) -> None:
        if self._receivers.setdefault(request_id, receiver) is not receiver:
            raise ArgumentError(f"[engine] request {request_id!r} exists already")
        try:
            # The order matters: a thread that ends now notifies this receiver, or refuses this.
            self.engine.add_request(request_id, prompt, params, **options)
        except BaseException:
            self._receivers.pop(request_id, None)
            raise

    def _forget(self, request_id: str, receiver: Receiver) -> None:
        """Abort a request whose reader has left, unless it is finished."""
        if self._receivers.get(request_id) is receiver:
            # The order matters: while the id has a receiver, no other request can use it.
            with contextlib.suppress(ForkedError):
                self.abort(request_id)
            self._receivers.pop(request_id, None)


class _EngineLoop:
    """Steps an engine in its thread while there is work.

    Attributes:
        receivers: of the outputs, by request id.
        clock: in seconds.
        step_begin: the start time of the current step; ``None`` if no step runs, or before the
            first answer is finished.
    """

    def __init__(self, engine: Engine):
        self.receivers: dict[str, Receiver] = {}
        self.clock: Callable[[], float] = time.monotonic
        self.step_begin: float | None = None
        self.has_left_steps = threading.Event()  # the thread is about to end
        self._has_answered = False
        self._engine = engine
        self._thread = engine.thread

    def run(self) -> float | None:
        """Run a step; returns the seconds until the next call, or ``None`` without work."""
        if self._engine.has_unfinished_requests():
            self._step()
            return 0.0
        return SAVE_SECONDS if self._engine.save_more() else None

    def report_stopped(self) -> None:
        """Tell all readers that the engine has stopped."""
        # Readers of finished requests get their last output first.
        for receive in list(self.receivers.values()):
            receive(self._thread.stopped())

    def end(self) -> None:
        """Abort all requests and tell their readers, at the end of the thread."""
        self.has_left_steps.set()
        try:
            if self._thread.failure is None:
                steps = self._engine.steps
                steps.add_new()
                for request in list(self._engine.reports.requests.values()):
                    steps.abort(request)
                self._step()
                self._engine.close()
        finally:
            self.report_stopped()

    def _step(self) -> None:
        self.step_begin = self.clock() if self._has_answered else None
        outputs = self._engine.step()
        self.step_begin = None
        for output in outputs:
            ends = {completion.finish_reason for completion in output.outputs}
            self._has_answered = self._has_answered or not ends.isdisjoint(("stop", "length"))
            receive = self.receivers.get(output.request_id)
            if receive is not None:
                receive(_copied(output))


def _copied(output: RequestOutput) -> RequestOutput:
    """A copy, since the engine's own output grows until it is finished."""
    copied = copy.copy(output)
    copied.outputs = [copy.copy(completion) for completion in output.outputs]
    for completion in copied.outputs:
        completion.token_ids = list(completion.token_ids)
        if completion.logprobs is not None:
            completion.logprobs = list(completion.logprobs)
    return copied


def _newest(
    news: News,
    inbox: asyncio.Queue[News] | queue.SimpleQueue[News],
    params: SamplingParams | PoolingParams | None,
) -> RequestOutput:
    """The newest output of a reader, joined with the parts that it has not read yet; raises the
    error of a request that failed.
    """
    is_delta = isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
    while isinstance(news, RequestOutput) and not news.finished and not inbox.empty():
        later = inbox.get_nowait()
        if is_delta and isinstance(later, RequestOutput):
            later = merge_parts(news, later)
        news = later
    if isinstance(news, EngineStoppedError):
        raise news
    news.raise_if_failed()
    return news
