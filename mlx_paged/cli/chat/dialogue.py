"""A dialogue: sends messages to the model, and shows its answers and their statistics."""

from __future__ import annotations

import argparse
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from mlx_paged.answers.tokens import Piece, ReasoningSplitter
from mlx_paged.cli.chat.program import Settings
from mlx_paged.cli.chat.terminal import PromptProgress, Reader, Screen
from mlx_paged.cli.streams import say
from mlx_paged.engine.descriptions import (
    acceptance_by_position,
    context_length,
    describe_backend,
    describe_context,
    describe_device,
    describe_disk_tier,
    describe_drafts,
    describe_matmul,
    describe_memory,
    describe_model,
    describe_token_size,
    in_words,
)
from mlx_paged.engine.thread import EngineCall
from mlx_paged.models.memory import memory_size
from mlx_paged.options.engine_options import EXAMPLE_MODEL

if TYPE_CHECKING:
    from mlx_paged.cli.chat.conversation import Conversation, Messages
    from mlx_paged.engine.engine import Engine
    from mlx_paged.generation import GenerationResponse


# The fields of GenerationResponse that --json reports.
_FIGURES = (
    *("prompt_tokens", "cached_tokens", "read_tokens", "generation_tokens"),
    *("time_to_first_token", "prompt_tps", "generation_tps", "peak_memory"),
)


@dataclass
class Dialogue:
    """The state that commands read and change.

    Args:
        branches: conversations, each forked from the one before; the last is the current one.
        is_verbose: print all statistics of an answer, and not a summary.
    """

    branches: list[Conversation]
    settings: Settings
    screen: Screen
    reader: Reader
    is_verbose: bool = False

    @property
    def conversation(self) -> Conversation:
        return self.branches[-1]

    def ask(self, text: str, before: Messages | None = None) -> bool:
        """Show the answer to a message and its statistics; returns whether Ctrl-C interrupted it.

        Args:
            before: the messages that it follows; by default all so far.

        Raises:
            OutputLostError: stdout can't be written; the conversation keeps the answer so far.
        """
        screen, hides_thinking, is_hidden = self.screen, self.settings.thinking == "hide", False

        def show(piece: Piece) -> None:
            nonlocal is_hidden
            if piece.is_reasoning and hides_thinking:
                is_hidden = True
                screen.show_progress("[thinking ...]")
            else:
                # Empty lines between hidden reasoning and the answer are hidden, too.
                text = piece.text.lstrip() if is_hidden else piece.text
                is_hidden = is_hidden and not text
                screen.answer(text, piece.is_reasoning)

        try:
            response, is_interrupted = self._stream(text, before, show)
        except BaseException:
            screen.abandon_answer()
            raise
        if response is not None:
            screen.finish_answer()
            figures = describe_answer(self.conversation, response, self.is_verbose)
            screen.say(figures, is_dim=not self.is_verbose)
            if response.finish_reason == "length":
                max_tokens = self.settings.sampling.max_tokens
                screen.say(describe_cut(response, max_tokens, self.conversation.engine))
        if is_interrupted:
            screen.say("[stopped]")
        return is_interrupted

    def answer_in_full(self, text: str) -> dict[str, Any]:
        """Answer a message without showing anything; returns the text, the reasoning and fields of
        the last :class:`~mlx_paged.generation.GenerationResponse`. The ``finish_reason`` is
        ``"interrupted"`` after Ctrl-C.

        Raises:
            KeyboardInterrupt: Ctrl-C came before the first token.
        """
        texts = {True: "", False: ""}  # reasoning or not

        def keep(piece: Piece) -> None:
            texts[piece.is_reasoning] += piece.text

        response, is_interrupted = self._stream(text, None, keep)
        if response is None:
            raise KeyboardInterrupt
        reasoning, said = texts.values()
        marks = self.conversation.answer_format.dialect.reasoning
        for mark in () if marks is None else (marks.start, marks.end):
            reasoning = reasoning.replace(mark, "")
        return {
            "text": said.lstrip() if reasoning else said,
            "reasoning": reasoning.strip() if self.settings.thinking == "show" else "",
            "finish_reason": "interrupted" if is_interrupted else response.finish_reason,
            **{name: getattr(response, name) for name in _FIGURES},
        }

    def _stream(
        self, text: str, before: Messages | None, show: Callable[[Piece], None]
    ) -> tuple[GenerationResponse | None, bool]:
        """Show the pieces of an answer; returns its last response, if there was one, and whether
        Ctrl-C interrupted it.
        """
        conversation, screen, params = self.conversation, self.screen, self.settings.next_params()
        response, splitter = None, None
        shown = PromptProgress(num_known=len(conversation.tokens))
        with interrupted_waits(self.reader.close) as interrupted:

            def progress(done: int, total: int) -> None:
                if interrupted:
                    raise KeyboardInterrupt
                screen.show_progress(*shown.words(done, total))

            try:
                # Closing the generator adds the answer so far to the conversation.
                answer = conversation.ask(text, params, progress=progress, before=before)
                with closing(answer):
                    for response in answer:
                        if splitter is None:
                            # After the prompt, whose end may open the reasoning.
                            splitter = ReasoningSplitter(conversation.answer_format)
                            screen.clear_progress()
                        for piece in splitter.add(response.text, response.token):
                            show(piece)
                        if interrupted:
                            break
            except KeyboardInterrupt:
                screen.announce(
                    "[stopping when this step is done; Ctrl-C again leaves]",
                    "[stopping; Ctrl-C again leaves]",
                )
                conversation.engine.thread.call(lambda: None)
        screen.clear_progress()
        for piece in () if splitter is None else splitter.finish():
            show(piece)
        return response, bool(interrupted)


@contextmanager
def interrupted_waits(leave: Callable[[], None]) -> Iterator[list[int]]:
    """The first Ctrl-C raises ``KeyboardInterrupt`` if the main thread waits for the engine. At any
    other time it is only recorded in the list, so that no update of the conversation is torn. The
    second one exits the process at once, since the running step may take long.

    Args:
        leave: called before the process exits.
    """
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught:
            say("")
            leave()
            # Python and MLX are not shut down, which could fail in the middle of a step.
            os._exit(130)
        caught.append(number)
        wait = EngineCall.result.__code__
        if any(each.f_code is wait for each, _ in traceback.walk_stack(frame)):
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


# Statistics

DEMO_HINT = (
    "[This is the demo model: tiny, trained on made-up text. It recalls, copies, counts and adds; "
    "try: The code of apple is 4821. What is the code of apple? A real model: "
    f"--model {EXAMPLE_MODEL}]"
)


def say_start(
    screen: Screen, args: argparse.Namespace, engine: Engine, settings: Settings, is_dialogue: bool
) -> None:
    """Say what a user has to know before the first message: the model, its device and its cache, in
    one line, its most important parts first, or in several with ``--verbose``; and warnings.
    """
    if args.verbose:
        screen.say("\n".join(_start_in_full(args, engine, settings)))
        if is_dialogue:
            screen.say("[/help for commands, Ctrl-D to leave]")
    else:
        length, _ = context_length(engine)
        own = " (the model's)" * bool(settings.from_model)
        parts = [
            args.model or "bundled demo model",
            describe_device(),
            f"context {length}" if length == "without end" else f"context: {length}",
            settings.describe_sampling() + own,
        ]
        disk = None if engine.disk_tier is None else engine.disk_tier.stats()
        if disk is not None and disk.failure is None:
            parts.append(f"{disk.num_blocks:,} blocks on disk" if disk.num_blocks else "disk cache")
        screen.say_in_a_line(parts, "/help" * is_dialogue)
        if disk is not None and disk.failure is not None:
            screen.say(f"[{describe_disk_tier(engine)[0]}]")
    nbytes, memory = engine.cache.config.nbytes, memory_size()
    if args.kv_cache_bytes is not None and nbytes > memory:
        screen.say(
            f"[the K/V budget of {nbytes / 1e9:,.1f} GB exceeds this machine's memory of "
            f"{memory / 1e9:.1f} GB; see --kv-cache-bytes]"
        )


def _start_in_full(args: argparse.Namespace, engine: Engine, settings: Settings) -> Iterator[str]:
    cache, config = engine.cache, engine.cache.config
    yield (
        f"[model: {describe_model(args.model, engine)} | device: {describe_device()} | "
        f"backend: {describe_backend(cache)} | kv: {cache.kind}]"
    )
    grows = "; grows into it" if cache.nbytes_held < config.nbytes else ""
    yield (
        f"[K/V budget: {config.num_blocks:,} blocks of {config.block_size} tokens = "
        f"{config.num_slots:,} tokens = {config.nbytes / 1e9:.2f} GB "
        f"({describe_token_size(cache)}){grows}]"
    )
    yield f"[{describe_memory(engine)}]"
    yield f"[{describe_matmul(engine)}]"
    yield from (f"[{words}]" for words in describe_disk_tier(engine))
    yield f"[context: {describe_context(engine)}; prompt and answer together]"
    own = f"; {', '.join(settings.from_model)} from generation_config.json"
    yield f"[sampling: {settings.describe_sampling()}{own * bool(settings.from_model)}]"
    if args.model is None:
        yield DEMO_HINT


def describe_answer(
    conversation: Conversation, response: GenerationResponse, is_verbose: bool
) -> str:
    """The statistics of an answer: all of them, or the main ones in one line."""
    engine, config = conversation.engine, conversation.engine.cache.config
    disk = f", {response.read_tokens:,} of them from disk" if response.read_tokens else ""
    drafts, num_tokens = response.spec_decoding, response.generation_tokens
    # A token that is not an accepted draft took a step.
    tokens_per_step = num_tokens / max(1, num_tokens - drafts.num_accepted_tokens)
    speed = f"{tokens_per_step:.1f} tokens per step"
    if not is_verbose:
        num_held = engine.stats().num_cached_blocks * config.block_size
        parts = [
            f"{response.time_to_first_token:.2f} s to first token",
            f"{response.generation_tps:.1f} tokens/s",
            f"{response.cached_tokens:,} of {response.prompt_tokens:,} prompt tokens reused{disk}",
            f"{speed}, drafts accepted {acceptance_by_position(drafts)}" * bool(drafts.num_drafts),
            f"{in_words(num_held)} of {in_words(config.num_slots)} tokens of K/V in use",
        ]
        return f"[{' | '.join(filter(None, parts))}]"
    held = engine.cache.nbytes_held / 1e6
    accepted = f"\nDrafts: {describe_drafts(drafts)}; {speed}"
    return (
        f"Prompt: {response.prompt_tokens} tokens ({response.cached_tokens} reused{disk}), "
        f"{response.prompt_tps:.3f} tokens-per-sec, first token after "
        f"{response.time_to_first_token:.3f} s\n"
        f"Generation: {response.generation_tokens} tokens, "
        f"{response.generation_tps:.3f} tokens-per-sec\n"
        f"K/V: {len(conversation.tokens)} tokens of the conversation, {held:.1f} MB allocated\n"
        f"Peak memory: {response.peak_memory:.3f} GB" + accepted * bool(drafts.num_drafts)
    )


def describe_cut(response: GenerationResponse, max_tokens: int | None, engine: Engine) -> str:
    """The reason why an answer was cut."""
    if response.generation_tokens == max_tokens:
        return f"[the answer was cut at --max-tokens {max_tokens}]"
    num_tokens = response.prompt_tokens + response.generation_tokens
    limit = engine.scheduler.config.max_model_len
    if limit is None or num_tokens < limit:
        return "[the answer was cut: the K/V budget is full; raise --kv-cache-bytes or /reset]"
    flag = "" if limit == engine.scheduler.context_length else " (--max-model-len)"
    return (
        f"[the answer was cut: the context of {limit:,} tokens is full{flag}; /reset begins a new "
        "conversation]"
    )
