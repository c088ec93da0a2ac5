"""A dialogue: messages go to the model, and their answers and figures to the screen."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from mlx_paged.chat.reports import (
    describe_answer,
    describe_answer_briefly,
    describe_cut,
)
from mlx_paged.chat.settings import Settings
from mlx_paged.chat.terminal import PromptProgress, Reader, Screen
from mlx_paged.chat.thinking import Piece, ThinkingSplitter
from mlx_paged.engine.thread import Call
from mlx_paged.standard_streams import say

if TYPE_CHECKING:
    from mlx_paged.chat.conversation import Conversation
    from mlx_paged.generation import GenerationResponse, Progress
    from mlx_paged.sampling_params import SamplingParams


class Ask(Protocol):
    """Makes an answer, and calls ``progress`` between its steps."""

    def __call__(
        self, params: SamplingParams, *, progress: Progress
    ) -> Generator[GenerationResponse, None, None]: ...


@dataclass
class Dialogue:
    """Everything that a command may look at and change; the last of ``branches`` is talked to.

    Args:
        is_verbose: all figures of an answer are said, and else the most wanted ones.
    """

    branches: list[Conversation]
    settings: Settings
    screen: Screen
    reader: Reader
    is_verbose: bool = False

    @property
    def conversation(self) -> Conversation:
        return self.branches[-1]

    def say(self, text: str) -> None:
        self.screen.say(text)

    def ask(self, text: str) -> bool:
        """Show the answer to a message; True when Ctrl-C cut it short."""
        return self.show(partial(self.conversation.ask, text))

    def ask_again(self, text: str | None = None) -> bool:
        return self.show(partial(self.conversation.ask_again, text))

    def show(self, ask: Ask) -> bool:
        """Stream one answer and its figures; True when Ctrl-C cut it short.

        Args:
            ask: makes the answer of this conversation.

        Raises:
            OutputLostError: stdout takes no more; the conversation has what came until then.
        """
        conversation, screen = self.conversation, self.screen
        view = _AnswerView(screen, self.settings.show_thinking)
        params = self.settings.next_params()
        response = None
        shown = PromptProgress(num_known=len(conversation.tokens))
        with interrupted_waits() as interrupted:

            def progress(done: int, total: int) -> None:
                if interrupted:
                    raise KeyboardInterrupt
                screen.show_progress(*shown.words(done, total))

            try:
                # Closing the answer notes in the conversation what was said so far.
                with closing(ask(params, progress=progress)) as answer:
                    for response in answer:
                        view.add(conversation, response.text)
                        if interrupted:
                            break
            except KeyboardInterrupt:
                screen.show_progress(
                    "[stopping when this step is done; Ctrl-C again leaves]",
                    "[stopping; Ctrl-C again leaves]",
                )
                conversation.engine.thread.call(lambda: None)
        screen.clear_progress()
        if response is not None:
            view.finish()
            self._say_figures(response, params.max_tokens)
        if interrupted:
            screen.say("[stopped]")
        return bool(interrupted)

    def _say_figures(self, response: GenerationResponse, max_tokens: int | None) -> None:
        engine = self.conversation.engine
        if self.is_verbose:
            self.say(describe_answer(self.conversation, response))
        else:
            self.screen.say_dim(describe_answer_briefly(engine, response))
        if response.finish_reason == "length":
            self.say(describe_cut(response, max_tokens, engine))


class _AnswerView:
    """Shows the pieces of one answer, its reasoning dimmed or not at all."""

    def __init__(self, screen: Screen, show_thinking: bool):
        self._screen = screen
        self._shows_thinking = show_thinking
        self._splitter: ThinkingSplitter | None = None
        self._hid_thinking = False  # and nothing was shown since

    def add(self, conversation: Conversation, text: str) -> None:
        if self._splitter is None:
            tokenizer = conversation.tokenizer
            # Now that the first token is there, it is known how the prompt ended.
            self._splitter = ThinkingSplitter(
                tokenizer.think_start, tokenizer.think_end, conversation.opens_thinking
            )
            self._screen.clear_progress()
        for piece in self._splitter.add(text):
            self._show(piece)

    def finish(self) -> None:
        for piece in self._splitter.finish() if self._splitter is not None else ():
            self._show(piece)
        self._screen.answer("\n")

    def _show(self, piece: Piece) -> None:
        if piece.is_thinking and not self._shows_thinking:
            self._hid_thinking = True
            self._screen.show_progress("[thinking ...]")
            return
        text = piece.text
        if self._hid_thinking:
            # The empty lines between the reasoning and the answer.
            text = text.lstrip()
            self._hid_thinking = not text
        self._screen.answer(text, piece.is_thinking)


@contextmanager
def interrupted_waits() -> Iterator[list[int]]:
    """The first Ctrl-C ends a wait for the engine with ``KeyboardInterrupt``. Where none is under
    way, it is noted in the list alone: no line that keeps the conversation is cut in the middle.
    The second one ends the process at once, since the step that runs may take long.

    Only the main thread catches anything, as Python delivers signals to no other.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, frame: FrameType | None) -> None:
        if caught:
            say("")
            # Nothing of Python's or MLX's is taken down, so nothing can fail at it.
            os._exit(130)
        caught.append(number)
        while frame is not None:
            if frame.f_code is Call.wait.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)
