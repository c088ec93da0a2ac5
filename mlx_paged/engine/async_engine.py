"""`AsyncEngine`: an engine that steps in a thread of its own; requests come and go from any thread or event loop."""

from __future__ import annotations

import asyncio
import atexit
import copy
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from mlx_paged.engine.engine import Engine, EngineStats, Prompt
from mlx_paged.memory import wired_limit
from mlx_paged.request import RequestOutput, SamplingParams

Receiver = Callable[[RequestOutput | Exception], None]


class EngineStoppedError(RuntimeError):
    """The engine was shut down, or its thread failed; the message says which."""


class AsyncEngine:
    """Tokens as they come, for any number of requests at once.

        async with AsyncEngine(model, tokenizer) as engine:
            async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=100)):
                print(output.outputs[0].text)

        with AsyncEngine(model, tokenizer) as engine:            # the same without asyncio
            for output in engine.stream("Once upon a time"):
                ...

    Each output is a value of its own: the whole answer so far. A slow reader misses no text, only intermediate
    outputs. Leaving the loop, or cancelling its task, aborts the request.

    Args:
        model, tokenizer, engine_options: as :class:`Engine`.
    """

    def __init__(self, model: Any, tokenizer: Any = None, **engine_options: Any):
        # Made here, so that wrong settings are the caller's to see.
        self.engine = Engine(model, tokenizer, **engine_options)
        self._receivers: dict[str, Receiver] = {}
        self._request_ids = map(str, itertools.count())
        self._work = threading.Condition()
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mlx_paged engine", daemon=True)
        self._thread.start()
        # Python must not end in the middle of a step.
        atexit.register(self.shutdown)

    # From any thread

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """An asynchronous iterator of the answer so far, at each new token; the last one has ``finished`` set.

        Args:
            request_id: for :meth:`abort`; must not be in use. By default a number.
            options: ``priority`` and ``cache_salt`` of :meth:`Engine.add_request`.

        Raises:
            ValueError, PromptTooLongError: as :meth:`Engine.add_request`.
            EngineStoppedError: the engine was shut down.
            Exception: what failed the request, such as its logits processor.
        """
        return self._generate(prompt, params, request_id, options)

    async def _generate(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, options: dict[str, Any]
    ) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

        def receive(output: RequestOutput | Exception) -> None:
            try:
                loop.call_soon_threadsafe(news.put_nowait, output)
            except RuntimeError:
                # The reader's loop is closed: nobody waits.
                self._forget(request_id)

        request_id = self._new_id() if request_id is None else request_id
        self._add(prompt, params, request_id, options, receive)
        try:
            while True:
                output = await news.get()
                while not _is_last(output) and not news.empty():
                    output = news.get_nowait()
                yield _checked(output)
                if output.finished:
                    return
        finally:
            self._forget(request_id)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, **options: Any
    ) -> Iterator[RequestOutput]:
        """As :meth:`generate`, for threads."""
        news: queue.SimpleQueue[RequestOutput | Exception] = queue.SimpleQueue()
        request_id = self._new_id() if request_id is None else request_id
        self._add(prompt, params, request_id, options, news.put)
        outputs = self._stream(request_id, news)
        # Into its `try`, so that a stream that nobody reads ends its request, too, when it is dropped.
        next(outputs)
        return outputs

    def _stream(self, request_id: str, news: queue.SimpleQueue) -> Iterator[Any]:
        try:
            yield None
            while True:
                output = news.get()
                while not _is_last(output) and not news.empty():
                    output = news.get()
                yield _checked(output)
                if output.finished:
                    return
        finally:
            self._forget(request_id)

    def abort(self, request_id: str) -> None:
        """End a request; its reader gets a last output with finish reason ``"abort"``."""
        self.engine.abort(request_id)
        self._wake()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def shrink(self) -> int:
        """Give back K/V memory that no running request needs, between two steps; see :meth:`Engine.shrink`."""
        return self.engine.shrink()

    def shutdown(self) -> None:
        """Abort all requests and end the thread; their readers get their last outputs. More than once is harmless."""
        with self._work:
            self._is_stopping = True
            self._work.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.shutdown)

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.shutdown)

    def _new_id(self) -> str:
        return f"request-{next(self._request_ids)}"

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str,
        options: dict[str, Any],
        receiver: Receiver,
    ) -> None:
        with self._work:
            if self._is_stopping:
                raise self._stopped()
            if request_id in self._receivers:
                raise ValueError(f"[engine] request {request_id!r} exists already")
            self._receivers[request_id] = receiver
        try:
            self.engine.add_request(request_id, prompt, params, **options)
        except BaseException:
            self._receivers.pop(request_id, None)
            raise
        self._wake()

    def _forget(self, request_id: str) -> None:
        """The reader left; a request that is not done is not wanted any more."""
        # In this order: as long as it has a receiver, no other request gets its id.
        self.abort(request_id)
        self._receivers.pop(request_id, None)

    def _stopped(self) -> EngineStoppedError:
        error = EngineStoppedError(f"[engine] it stopped: {self._failure or 'it was shut down'}")
        error.__cause__ = self._failure
        return error

    def _wake(self) -> None:
        with self._work:
            self._work.notify()

    # The engine's thread

    def _run(self) -> None:
        try:
            with wired_limit(self.engine.model):
                while self._wait_for_work():
                    self._step()
                self.engine.abort_all()
                self._step()
        except BaseException as error:
            self._failure = error
        finally:
            with self._work:
                self._is_stopping = True
            # Those that are done have read their last output by then, or will read it first.
            for receive in list(self._receivers.values()):
                receive(self._stopped())

    def _wait_for_work(self) -> bool:
        with self._work:
            self._work.wait_for(lambda: self._is_stopping or self.engine.has_unfinished_requests())
            return not self._is_stopping

    def _step(self) -> None:
        for output in self.engine.step():
            receive = self._receivers.get(output.request_id)
            if receive is not None:
                receive(_copied(output))


def _copied(output: RequestOutput) -> RequestOutput:
    """The output as it is now: the engine's own grows on."""
    copied = copy.copy(output)
    copied.outputs = [copy.copy(completion) for completion in output.outputs]
    for completion in copied.outputs:
        completion.token_ids = list(completion.token_ids)
        if completion.logprobs is not None:
            completion.logprobs = list(completion.logprobs)
    return copied


def _is_last(output: RequestOutput | Exception) -> bool:
    return isinstance(output, Exception) or output.finished


def _checked(output: RequestOutput | Exception) -> RequestOutput:
    if isinstance(output, Exception):
        raise output
    # Of several completions, those that did not fail are an answer.
    if output.error is not None and all(completion.finish_reason == "error" for completion in output.outputs):
        raise output.error
    return output
