"""One turn on the screen: the answer as it comes, Ctrl-C, the figures."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

from mlx_paged.chat.progress import PromptProgress
from mlx_paged.chat.reports import Reports
from mlx_paged.chat.screen import Screen
from mlx_paged.chat.settings import Settings
from mlx_paged.chat.thinking import Piece, ThinkingSplitter

if TYPE_CHECKING:
    from mlx_paged.chat.conversation import Conversation
    from mlx_paged.generation import GenerationResponse, Progress
    from mlx_paged.sampling_params import SamplingParams


class Ask(Protocol):
    """Makes an answer, and calls ``progress`` between its steps."""

    def __call__(
        self, params: SamplingParams, *, progress: Progress
    ) -> Generator[GenerationResponse, None, None]: ...


class Turns:
    """Shows answers as the settings say."""

    def __init__(self, screen: Screen, settings: Settings, reports: Reports):
        self._screen = screen
        self._settings = settings
        self._reports = reports

    def show(self, conversation: Conversation, ask: Ask) -> bool:
        """Stream one answer and its figures; True when Ctrl-C cut it short.

        Args:
            ask: makes the answer of this conversation.

        Raises:
            OutputLostError: stdout takes no more; the conversation has what came until then.
        """
        from mlx_paged.chat.interrupts import interrupted_waits

        screen = self._screen
        view = _AnswerView(screen, self._settings.show_thinking)
        params = self._settings.next_params()
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
            self._reports.answer(conversation, response, params.max_tokens)
        if interrupted:
            screen.say("[stopped]")
        return bool(interrupted)


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
