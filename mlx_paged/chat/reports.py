"""What the chat says about itself: the model and its cache, an answer's figures, statistics."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mlx_paged.chat.screen import Screen
from mlx_paged.chat.settings import Settings
from mlx_paged.command_line.descriptions import (
    describe_activations,
    describe_backend,
    describe_budget,
    describe_budget_in_full,
    describe_context,
    describe_device,
    describe_disk_tier,
    describe_model,
)
from mlx_paged.command_line.flags import EXAMPLE_MODEL
from mlx_paged.memory import memory_size

if TYPE_CHECKING:
    from mlx_paged.chat.conversation import Conversation
    from mlx_paged.engine.engine import Engine
    from mlx_paged.engine.scheduler import Scheduler
    from mlx_paged.engine.stats import DiskTierStats, EngineStats
    from mlx_paged.generation import GenerationResponse

DEMO_HINT = (
    "[This is the demo model: tiny, trained on made-up text. It recalls, copies, counts and adds; "
    "try: The code of apple is 4821. What is the code of apple? A real model: "
    f"--model {EXAMPLE_MODEL}]"
)


class Reports:
    """Says all figures, or a few of them in one line.

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
        say, engine = self._screen.say, conversation.engine
        cache = engine.cache
        model = describe_model(args.model, engine)
        if self._verbose:
            say(
                f"[model: {model} | device: {describe_device()} | "
                f"backend: {describe_backend(cache)} | kv: {cache.kind}]"
            )
            say(f"[K/V budget: {describe_budget_in_full(cache)}]")
            say(f"[{describe_activations(engine)}]")
            for words in describe_disk_tier(engine):
                say(f"[{words}]")
            say(f"[context: {describe_context(engine)}; prompt and answer together]")
            own = f"; {', '.join(settings.from_model)} from generation_config.json"
            say(f"[sampling: {settings.describe_sampling()}{own if settings.from_model else ''}]")
            if args.model is None:
                say(DEMO_HINT)
            if is_dialogue:
                say("[/help for commands, Ctrl-D to leave]")
        else:
            parts = [
                model,
                f"{describe_device()}, {describe_backend(cache)}",
                f"{cache.kind} K/V: {describe_budget(cache)}",
                describe_activations(engine),
                *describe_disk_tier(engine),
                f"context: {describe_context(engine)}",
                settings.describe_sampling() + (" (the model's)" if settings.from_model else ""),
            ]
            say(f"[{' | '.join([*parts, *(['/help'] if is_dialogue else [])])}]")
        nbytes, memory = cache.config.nbytes, memory_size()
        if args.kv_cache_bytes is not None and nbytes > memory:
            say(
                f"[is a K/V budget of {nbytes / 1e9:,.1f} GB meant? This machine has "
                f"{memory / 1e9:.1f} GB of memory; see --kv-cache-bytes]"
            )

    def answer(
        self, conversation: Conversation, response: GenerationResponse, max_tokens: int | None
    ) -> None:
        """The figures of an answer, and why it was cut, if it was."""
        say, engine = self._screen.say, conversation.engine
        if self._verbose:
            held = engine.cache.nbytes_held / 1e6
            say(
                f"Prompt: {response.prompt_tokens} tokens ({_reused_in_words(response)}), "
                f"{response.prompt_tps:.3f} tokens-per-sec, first token after "
                f"{response.time_to_first_token:.3f} s"
            )
            say(
                f"Generation: {response.generation_tokens} tokens, "
                f"{response.generation_tps:.3f} tokens-per-sec"
            )
            say(
                f"K/V: {len(conversation.tokens)} tokens of the conversation, "
                f"{held:.1f} MB allocated"
            )
            say(f"Peak memory: {response.peak_memory:.3f} GB")
            if response.drafted_tokens:
                say(f"Drafts: {_drafts_in_words(response)}")
        else:
            parts = [
                f"{response.time_to_first_token:.2f} s to first token",
                f"{response.generation_tps:.1f} tokens/s",
                f"{response.cached_tokens:,} of {response.prompt_tokens:,} prompt tokens reused"
                f"{_read_in_words(response)}",
                *([_drafts_in_words(response)] if response.drafted_tokens else []),
                _usage_in_words(engine),
            ]
            self._screen.say_dim(f"[{' | '.join(parts)}]")
        if response.finish_reason == "length":
            why = _cut_reason(response, max_tokens, engine.scheduler)
            say(f"[the answer was cut{why}]")

    def stats(self, branches: list[Conversation]) -> None:
        """What the K/V cache holds, how often it was hit, what the branches share."""
        say, engine = self._screen.say, branches[-1].engine
        held, budget = engine.cache.nbytes_held, engine.cache.config.nbytes
        say(f"messages: {len(branches[-1].messages)}, tokens held: {len(branches[-1].tokens)}")
        self._pool(branches, engine)
        say(f"K/V memory: {held / 1e6:.2f} MB allocated, budget {budget / 1e6:.2f} MB")

    def _pool(self, branches: list[Conversation], engine: Engine) -> None:
        say = self._screen.say
        stats, config = engine.stats(), engine.cache.config
        say(
            f"blocks: {stats.num_cached_blocks} of {config.num_blocks} hold K/V "
            f"({stats.num_cached_blocks / config.num_blocks:.1%}), {config.block_size} tokens "
            f"each, {stats.num_evictions} evicted so far"
        )
        say(
            f"prefix cache: {stats.num_hit_tokens} of {stats.num_queried_tokens} prompt tokens "
            f"found ({stats.hit_rate:.1%})"
        )
        if stats.disk_tier is not None:
            self._disk_tier(stats, stats.disk_tier, engine)
        if stats.num_drafted_tokens:
            say(
                f"drafts: {stats.num_accepted_tokens} of {stats.num_drafted_tokens} accepted "
                f"({stats.num_accepted_tokens / stats.num_drafted_tokens:.1%})"
            )
        self._sharing(branches, engine)

    def _disk_tier(self, stats: EngineStats, tier: DiskTierStats, engine: Engine) -> None:
        say = self._screen.say
        for words in describe_disk_tier(engine):
            say(words)
        num_hits = stats.num_cached_prompt_tokens - stats.num_read_prompt_tokens  # in memory
        say(
            f"disk cache: {stats.num_read_prompt_tokens} of {stats.num_prompt_tokens - num_hits} "
            f"prompt tokens found that were not in memory; blocks: {tier.num_written_blocks} "
            f"written, {tier.num_dropped_blocks} dropped, {tier.num_corrupt_blocks} corrupt, "
            f"{tier.num_evicted_blocks} evicted"
        )

    def _sharing(self, branches: list[Conversation], engine: Engine) -> None:
        say, num_branches = self._screen.say, len(branches) - 1
        if num_branches and engine.cache.kind == "paged":
            tables = [
                engine.cached_block_ids(branch.tokens, branch.cache_salt) for branch in branches
            ]
            say(
                f"sharing: the conversation and {num_branches} branch{'es' * (num_branches > 1)} "
                f"are {sum(map(len, tables))} blocks long and take {len(set().union(*tables))}"
            )


def _reused_in_words(response: GenerationResponse) -> str:
    return f"{response.cached_tokens} reused{_read_in_words(response)}"


def _read_in_words(response: GenerationResponse) -> str:
    return f", {response.read_tokens:,} of them from disk" if response.read_tokens else ""


def _drafts_in_words(response: GenerationResponse) -> str:
    return f"{response.accepted_tokens:,} of {response.drafted_tokens:,} drafts accepted"


def _usage_in_words(engine: Engine) -> str:
    num_cached = engine.stats().num_cached_blocks
    return f"{num_cached:,} of {engine.cache.config.num_blocks:,} blocks in use"


def _cut_reason(response: GenerationResponse, max_tokens: int | None, scheduler: Scheduler) -> str:
    if response.generation_tokens == max_tokens:
        return f" at --max-tokens {max_tokens}"
    num_tokens = response.prompt_tokens + response.generation_tokens
    limit = scheduler.config.max_model_len
    if limit is not None and num_tokens >= limit:
        flag = "" if limit == scheduler.context_length else " (--max-model-len)"
        return f": the context of {limit:,} tokens is full{flag}; /reset begins a new conversation"
    return ": the K/V budget is full; raise --kv-cache-bytes or /reset"
