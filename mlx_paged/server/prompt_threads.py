"""The threads that read and encode requests, and the check of a text's length before it is
encoded.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.answers.chat_template import encode_text
from mlx_paged.errors import PromptTooLongError, prompt_beyond_context

T = TypeVar("T")

SECONDS_OF_A_USER = 10.0  # how long a user counts as active after a request
FREE_SECONDS = 0.002  # of work without a pause: what small requests take
PAUSE_RATIO = 3.0  # times the threads of a user
MAX_PAUSE = 1.0  # seconds

PIECE_LEN = 2**14  # characters; at most 64 KiB of UTF-8
# For models without a context limit, and for all prompts of a request together.
MAX_PROMPT_TOKENS = 2**20


class CancelledWorkError(Exception):
    """The result of the work is not needed any more."""


class Work:
    """Work that is queued or running."""

    def __init__(self) -> None:
        self._is_cancelled = threading.Event()

    def cancel(self) -> None:
        """End the work at its next :meth:`check`."""
        self._is_cancelled.set()

    def check(self) -> None:
        """Raise :class:`CancelledWorkError` if the work was cancelled; long work calls this
        regularly.
        """
        if self._is_cancelled.is_set():
            raise CancelledWorkError


class PromptThreads:
    """A few threads, of which each user has at most ``num_per_user`` at a time. Used from one event
    loop.

    While other users are active, a user pauses after long work for ``PAUSE_RATIO * num_per_user``
    times as long: reading and encoding a request holds the GIL most of the time, which the engine's
    steps and the answers to other users need.

    Args:
        name: a prefix for the names of the threads.
    """

    def __init__(self, name: str, num_threads: int, num_per_user: int):
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._num_per_user = num_per_user
        self._last_asked: dict[str | None, float] = {}  # by user
        self._turns: defaultdict[str | None, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, num_per_user)
        )

    async def run(self, user: str | None, call: Callable[[Work], T]) -> T:
        """Run ``call`` in one of the threads, in the caller's context, which has the id for the
        log. Cancelling this cancels the work.
        """
        turn, work, loop = self._turns[user], Work(), asyncio.get_running_loop()
        self._last_asked[user] = loop.time()
        await turn.acquire()
        begin = loop.time()
        running = self._threads.submit(copy_context().run, call, work)

        def end(_: Future[T]) -> None:
            with suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(self._end_turn, user, loop.time() - begin)

        # Not before the thread is free: cancelled work may run on for a while.
        running.add_done_callback(end)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            work.cancel()
            raise
        finally:
            # Otherwise an error, its frames and the future form a cycle that keeps the texts of a
            # request until the next garbage collection, which can be minutes away.
            del running

    def _end_turn(self, user: str | None, seconds: float) -> None:
        loop, turn = asyncio.get_running_loop(), self._turns[user]
        since = loop.time() - SECONDS_OF_A_USER
        if any(last > since for name, last in self._last_asked.items() if name != user):
            pause = PAUSE_RATIO * self._num_per_user * (seconds - FREE_SECONDS)
            loop.call_later(min(pause, MAX_PAUSE), turn.release)
        else:
            turn.release()


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
