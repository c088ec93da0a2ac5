"""The threads that read and encode requests, and the check of a text's length before it is
encoded.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.chat_template import encode_text
from mlx_paged.errors import PromptTooLongError, prompt_beyond_context

T = TypeVar("T")

SECONDS_OF_A_USER = 10.0  # how long a user counts as active after a request
FREE_SECONDS = 0.002  # of work without a pause: what small requests take
PAUSE_RATIO = 3.0
MAX_PAUSE = 1.0  # seconds


class CancelledWorkError(Exception):
    """The result of the work is not needed any more."""


@dataclass(frozen=True)
class Work:
    """Work that is queued or running.

    Attributes:
        future: its result.
    """

    call: Callable[[Work], Any]
    context: Context = field(default_factory=copy_context)  # the caller's, with the log's id
    future: Future[Any] = field(default_factory=Future)
    _is_cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Drop the work, or end it at its next :meth:`check`."""
        self._is_cancelled.set()
        self.future.cancel()

    def check(self) -> None:
        """Raise :class:`CancelledWorkError` if the work was cancelled; long work calls this
        regularly.
        """
        if self._is_cancelled.is_set():
            raise CancelledWorkError


class FairThreads:
    """A thread pool with one queue per user: the queues take turns, and the work of a user runs in
    at most ``num_per_user`` threads. Thread-safe.

    While other users are active, a user has one thread. After long work it pauses for
    ``PAUSE_RATIO`` times as long: reading and encoding a request holds the GIL most of the time,
    which the engine's steps and the answers to other users need.

    Args:
        name: a prefix for the names of the threads.
        clock: returns seconds.
        sleep: sleeps for a number of seconds.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        num_per_user: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._num_threads = num_threads
        self._num_per_user = num_per_user
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, deque[Work]] = OrderedDict()  # by user, the next one first
        self._running: Counter[str] = Counter()
        self._last_asked: dict[str, float] = {}  # by user

    async def run(self, user: str, call: Callable[[Work], T]) -> T:
        """Run ``call`` in one of the threads. Cancelling this cancels the work."""
        work = self.submit(user, call)
        future = asyncio.wrap_future(work.future)
        try:
            result: T = await future
            return result
        except asyncio.CancelledError:
            work.cancel()
            raise
        finally:
            # Otherwise an error, its frames and the future form a cycle that keeps the texts of a
            # request until the next garbage collection, which can be minutes away.
            del work, future

    def submit(self, user: str, call: Callable[[Work], Any]) -> Work:
        """Add work to the queue of a user."""
        work = Work(call)
        with self._lock:
            self._last_asked[user] = self._clock()
            self._queues.setdefault(user, deque()).append(work)
            self._start_work()
        return work

    def _start_work(self) -> None:
        """Pass queued work to free threads. Called with the lock held."""
        while self._running.total() < self._num_threads:
            ready = (name for name in self._queues if self._running[name] < self._max_threads(name))
            user = next(ready, None)
            if user is None:
                return
            queue = self._queues[user]
            work = queue.popleft()
            if queue:
                self._queues.move_to_end(user)
            else:
                del self._queues[user]
            self._running[user] += 1
            self._threads.submit(self._run, user, work)

    def _has_others(self, user: str) -> bool:
        """Whether other users are active."""
        since = self._clock() - SECONDS_OF_A_USER
        return any(last > since for name, last in self._last_asked.items() if name != user)

    def _max_threads(self, user: str) -> int:
        return 1 if self._has_others(user) else self._num_per_user

    def _run(self, user: str, work: Work) -> None:
        begin = self._clock()
        try:
            if work.future.set_running_or_notify_cancel():
                _finish(work)
            del work
            pause = PAUSE_RATIO * (self._clock() - begin - FREE_SECONDS)
            if pause > 0 and self._has_others(user):
                self._sleep(min(pause, MAX_PAUSE))
        finally:
            with self._lock:
                self._running[user] -= 1
                if not self._running[user]:
                    del self._running[user]
                self._start_work()


def _finish(work: Work) -> None:
    try:
        work.future.set_result(work.context.run(work.call, work))
    except BaseException as error:
        work.future.set_exception(error)
    finally:
        del work  # as in run


PIECE_LEN = 2**14  # characters; at most 64 KiB of UTF-8
# For models without a context limit, and for all prompts of a request together.
MAX_PROMPT_TOKENS = 2**20


@dataclass(frozen=True)
class LengthLimit:
    """Refuses texts with too many tokens without encoding them as a whole.

    A tokenizer takes about 300 bytes and a microsecond per token of a text, and can't be
    interrupted. So the tokens of a long text are counted first, in pieces. Merges across the cuts
    are lost, so the pieces have slightly more tokens than the whole, about one in ten thousand for
    most texts. A text that exceeds the limit by a margin is refused; otherwise it is encoded as a
    whole, and the engine decides.

    Args:
        max_model_len: tokens of a prompt and its answer; ``None``: no limit.
        context_length: the largest possible ``max_model_len``, for the error's advice; ``None``:
            no limit.
        check_wanted: called between two pieces; raises if the client has disconnected.
    """

    tokenizer: TokenizerWrapper
    max_model_len: int | None
    context_length: int | None
    check_wanted: Callable[[], None]

    @property
    def max_tokens(self) -> int:
        """The limit plus a margin of a quarter, so that the effect of cuts does not matter."""
        return (self.max_model_len or MAX_PROMPT_TOKENS) * 5 // 4

    def check(self, text: str, num_tokens_before: int = 0) -> None:
        """Raise if a text is too long to be encoded.

        Args:
            num_tokens_before: tokens of the prompt before the text.

        Raises:
            PromptTooLongError: there are more tokens than a prompt may have.
            ChatTemplateError: the tokenizer can't encode the text.
        """
        if len(text) <= PIECE_LEN:
            return  # Counting would take as long as encoding.
        num_tokens = num_tokens_before
        for start in range(0, len(text), PIECE_LEN):
            self.check_wanted()
            num_tokens += len(encode_text(self.tokenizer, text[start : start + PIECE_LEN]))
            if num_tokens > self.max_tokens:
                raise self._refusal()

    def _refusal(self) -> PromptTooLongError:
        if self.max_model_len is not None:
            num_tokens = f"more than {self.max_tokens}"
            return prompt_beyond_context(num_tokens, self.max_model_len, self.context_length)
        return PromptTooLongError(
            f"[prompt] it has more than {self.max_tokens:,} tokens; the server accepts at most "
            f"{MAX_PROMPT_TOKENS:,}"
        )
