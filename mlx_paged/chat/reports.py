"""What the chat says about itself: the model and its cache, the figures of an answer, the
statistics.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_paged.chat.command_line import EXAMPLE_MODEL
from mlx_paged.chat.responder import EngineResponder
from mlx_paged.chat.screen import Screen
from mlx_paged.chat.settings import Settings

if TYPE_CHECKING:
    from mlx_paged.chat.conversation import Conversation
    from mlx_paged.generation import GenerationResponse

DEMO_HINT = (
    "[This is the demo model: tiny, trained on made-up text. It recalls, copies, counts and adds; try: The "
    f"code of apple is 4821. What is the code of apple? A real model: --model {EXAMPLE_MODEL}]"
)


class Reports:
    """Says all figures, or few of them in one line.

    Args:
        verbose: all.
    """

    def __init__(self, screen: Screen, verbose: bool):
        self._screen = screen
        self._verbose = verbose

    def start(
        self,
        args: argparse.Namespace,
        conversation: Conversation,
        settings: Settings,
        is_dialogue: bool,
    ) -> None:
        """The model, its device and its cache, before the first message."""
        say = self._screen.say
        if self._verbose:
            self._start_verbose(args, conversation, settings)
            if is_dialogue:
                say("[/help for commands, Ctrl-D to leave]")
        else:
            cache = conversation.responder.cache
            parts = [
                args.model or "bundled demo model",
                f"{_device()}, {_backend(conversation)}",
                f"{cache.kind} K/V: {_budget_in_words(conversation)}",
                f"context: {conversation.responder.max_model_len:,} tokens",
                settings.describe_sampling() + (" (the model's)" if settings.from_model else ""),
            ]
            say(f"[{' | '.join([*parts, *(['/help'] if is_dialogue else [])])}]")
        self._question_budget(args, conversation)

    def answer(
        self, conversation: Conversation, response: GenerationResponse, max_tokens: int
    ) -> None:
        """The figures of an answer, and why it was cut, if it was."""
        if self._verbose:
            self._answer_verbose(conversation, response)
        else:
            self._screen.say_dim(
                f"[{response.time_to_first_token:.2f} s to first token | {response.generation_tps:.1f} tokens/s | "
                f"{response.cached_tokens:,} of {response.prompt_tokens:,} prompt tokens reused | "
                f"{_usage_in_words(conversation)}]"
            )
        if response.finish_reason == "length":
            self._screen.say(
                f"[the answer was cut{_cut_reason(conversation, response, max_tokens)}]"
            )

    def stats(self, branches: list[Conversation]) -> None:
        """What the K/V cache holds, how often it was hit, what the branches share."""
        say = self._screen.say
        responder = branches[-1].responder
        stats, config = responder.cache.stats(), responder.cache.config
        say(f"messages: {len(branches[-1].messages)}, tokens held: {len(responder.tokens)}")
        if isinstance(responder, EngineResponder):
            self._pool(branches, responder)
        say(
            f"K/V memory: {stats.nbytes_held / 1e6:.2f} MB allocated, budget {config.nbytes / 1e6:.2f} MB"
        )

    def _start_verbose(
        self, args: argparse.Namespace, conversation: Conversation, settings: Settings
    ) -> None:
        say = self._screen.say
        cache = conversation.responder.cache
        config = cache.config
        say(
            f"[model: {args.model or 'bundled demo model'} | device: {_device()} | "
            f"backend: {_backend(conversation)} | kv: {cache.kind}]"
        )
        if cache.kind == "paged":
            say(
                f"[K/V budget: {config.num_blocks:,} blocks of {config.block_size} tokens = {config.num_slots:,} "
                f"tokens = {config.nbytes / 1e9:.2f} GB ({config.nbytes_per_token:,} bytes a token in {config.dtype}); "
                f"grows into it]"
            )
        else:
            say(
                f"[K/V budget: {config.num_slots:,} tokens = {config.nbytes / 1e9:.2f} GB in {config.dtype}]"
            )
        say(
            f"[context: {conversation.responder.max_model_len:,} tokens, prompt and answer together]"
        )
        own = (
            f"; {', '.join(settings.from_model)} from generation_config.json"
            if settings.from_model
            else ""
        )
        say(f"[sampling: {settings.describe_sampling()}{own}]")
        if args.model is None:
            say(DEMO_HINT)

    def _question_budget(self, args: argparse.Namespace, conversation: Conversation) -> None:
        nbytes, memory = conversation.responder.cache.config.nbytes, memory_size()
        if args.kv_cache_bytes is not None and nbytes > memory:
            self._screen.say(
                f"[is a K/V budget of {nbytes / 1e9:,.1f} GB meant? This machine has {memory / 1e9:.1f} GB of memory; "
                "see --kv-cache-bytes]"
            )

    def _answer_verbose(self, conversation: Conversation, response: GenerationResponse) -> None:
        say = self._screen.say
        stats = conversation.responder.cache.stats()
        say(
            f"Prompt: {response.prompt_tokens} tokens ({response.cached_tokens} reused), "
            f"{response.prompt_tps:.3f} tokens-per-sec, first token after {response.time_to_first_token:.3f} s"
        )
        say(
            f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec"
        )
        num_tokens = len(conversation.responder.tokens)
        say(
            f"K/V: {num_tokens} tokens of the conversation, {stats.nbytes_held / 1e6:.1f} MB allocated"
        )
        say(f"Peak memory: {response.peak_memory:.3f} GB")

    def _pool(self, branches: list[Conversation], responder: EngineResponder) -> None:
        say = self._screen.say
        engine = responder.engine
        stats, config = engine.stats(), engine.cache.config
        say(
            f"blocks: {stats.num_cached_blocks} of {config.num_blocks} hold K/V "
            f"({stats.num_cached_blocks / config.num_blocks:.1%}), {config.block_size} tokens each, "
            f"{stats.num_evictions} evicted so far"
        )
        found = f"{stats.num_hit_tokens} of {stats.num_queried_tokens} prompt tokens found ({stats.hit_rate:.1%})"
        say(f"prefix cache: {found}")
        num_branches = len(branches) - 1
        if num_branches:
            tables = [engine.cached_block_ids(branch.responder.tokens) for branch in branches]
            say(
                f"sharing: the conversation and {num_branches} branch{'es' * (num_branches > 1)} are "
                f"{sum(map(len, tables))} blocks long and take {len(set().union(*tables))}"
            )


def memory_size() -> int:
    """Bytes of memory of this machine."""
    size = mx.device_info().get("memory_size") if mx.metal.is_available() else None
    return int(size) if size else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device() -> str:
    return (
        "Metal"
        if mx.metal.is_available()
        else "GPU"
        if mx.default_device().type == mx.gpu
        else "CPU"
    )


def _backend(conversation: Conversation) -> str:
    backend = getattr(conversation.responder.cache, "backend", None)
    return "MLX SDPA" if backend is None else str(backend.name)


def _budget_in_words(conversation: Conversation) -> str:
    config = conversation.responder.cache.config
    size = (
        f"{config.nbytes / 1e9:.1f} GB" if config.nbytes >= 1e8 else f"{config.nbytes / 1e6:.2g} MB"
    )
    if isinstance(conversation.responder, EngineResponder):
        return f"{config.num_blocks:,} blocks of {config.block_size} tokens, {size}"
    return f"{config.num_slots:,} tokens, {size}"


def _usage_in_words(conversation: Conversation) -> str:
    responder = conversation.responder
    config = responder.cache.config
    if isinstance(responder, EngineResponder):
        return (
            f"{responder.engine.stats().num_cached_blocks:,} of {config.num_blocks:,} blocks in use"
        )
    return f"{len(responder.tokens):,} of {config.num_slots:,} tokens in use"


def _cut_reason(conversation: Conversation, response: GenerationResponse, max_tokens: int) -> str:
    if response.generation_tokens == max_tokens:
        return f" at --max-tokens {max_tokens}"
    limit = conversation.responder.max_model_len
    if response.prompt_tokens + response.generation_tokens >= limit:
        return f": the context of {limit:,} tokens is full (--max-model-len); /reset begins a new conversation"
    return ": the K/V budget is full; raise --kv-cache-bytes or /reset"
