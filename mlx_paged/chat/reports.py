"""What the chat says about itself: the model and its cache, an answer's figures, statistics."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_paged.chat.settings import Settings
from mlx_paged.command_line.descriptions import (
    describe_backend,
    describe_budget,
    describe_budget_in_full,
    describe_context,
    describe_device,
    describe_disk_tier,
    describe_memory,
    describe_model,
)
from mlx_paged.command_line.flags import EXAMPLE_MODEL
from mlx_paged.memory import memory_size

if TYPE_CHECKING:
    from mlx_paged.chat.conversation import Conversation
    from mlx_paged.engine.engine import Engine
    from mlx_paged.generation import GenerationResponse

DEMO_HINT = (
    "[This is the demo model: tiny, trained on made-up text. It recalls, copies, counts and adds; "
    "try: The code of apple is 4821. What is the code of apple? A real model: "
    f"--model {EXAMPLE_MODEL}]"
)


def describe_start(
    args: argparse.Namespace, engine: Engine, settings: Settings, is_dialogue: bool
) -> str:
    """The model, its device and its cache, before the first message: in one line, or all figures if
    they are asked for.
    """
    cache, model = engine.cache, describe_model(args.model, engine)
    sampling, is_of_model = settings.describe_sampling(), bool(settings.from_model)
    if args.verbose:
        own = f"; {', '.join(settings.from_model)} from generation_config.json" * is_of_model
        lines = [
            f"[model: {model} | device: {describe_device()} | "
            f"backend: {describe_backend(cache)} | kv: {cache.kind}]",
            f"[K/V budget: {describe_budget_in_full(cache)}]",
            f"[{describe_memory(engine)}]",
            *(f"[{words}]" for words in describe_disk_tier(engine)),
            f"[context: {describe_context(engine)}; prompt and answer together]",
            f"[sampling: {sampling}{own}]",
            *([DEMO_HINT] if args.model is None else []),
            *(["[/help for commands, Ctrl-D to leave]"] if is_dialogue else []),
        ]
    else:
        parts = [
            model,
            f"{describe_device()}, {describe_backend(cache)}",
            f"{cache.kind} K/V: {describe_budget(cache)}",
            describe_memory(engine),
            *describe_disk_tier(engine),
            f"context: {describe_context(engine)}",
            sampling + " (the model's)" * is_of_model,
            *(["/help"] if is_dialogue else []),
        ]
        lines = [f"[{' | '.join(parts)}]"]
    nbytes, memory = cache.config.nbytes, memory_size()
    if args.kv_cache_bytes is not None and nbytes > memory:
        lines.append(
            f"[is a K/V budget of {nbytes / 1e9:,.1f} GB meant? This machine has "
            f"{memory / 1e9:.1f} GB of memory; see --kv-cache-bytes]"
        )
    return "\n".join(lines)


def describe_answer(conversation: Conversation, response: GenerationResponse) -> str:
    """All figures of an answer."""
    held = conversation.engine.cache.nbytes_held / 1e6
    lines = [
        f"Prompt: {response.prompt_tokens} tokens ({response.cached_tokens} reused"
        f"{_from_disk(response)}), {response.prompt_tps:.3f} tokens-per-sec, first token after "
        f"{response.time_to_first_token:.3f} s",
        f"Generation: {response.generation_tokens} tokens, "
        f"{response.generation_tps:.3f} tokens-per-sec",
        f"K/V: {len(conversation.tokens)} tokens of the conversation, {held:.1f} MB allocated",
        f"Peak memory: {response.peak_memory:.3f} GB",
        *(f"Drafts: {words}" for words in _drafts(response)),
    ]
    return "\n".join(lines)


def describe_answer_briefly(engine: Engine, response: GenerationResponse) -> str:
    """The figures that most want, in one line."""
    parts = [
        f"{response.time_to_first_token:.2f} s to first token",
        f"{response.generation_tps:.1f} tokens/s",
        f"{response.cached_tokens:,} of {response.prompt_tokens:,} prompt tokens reused"
        f"{_from_disk(response)}",
        *_drafts(response),
        f"{engine.stats().num_cached_blocks:,} of {engine.cache.config.num_blocks:,} blocks in use",
    ]
    return f"[{' | '.join(parts)}]"


def describe_cut(response: GenerationResponse, max_tokens: int | None, engine: Engine) -> str:
    """Why an answer was cut."""
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


def describe_stats(branches: Sequence[Conversation]) -> str:
    """What the K/V cache holds, how often it was hit, what the branches share."""
    conversation, engine = branches[-1], branches[-1].engine
    stats, cache, config = engine.stats(), engine.cache, engine.cache.config
    lines = [
        f"messages: {len(conversation.messages)}, tokens held: {len(conversation.tokens)}",
        f"blocks: {stats.num_cached_blocks} of {config.num_blocks} hold K/V "
        f"({stats.num_cached_blocks / config.num_blocks:.1%}), {config.block_size} tokens "
        f"each, {stats.num_evictions} evicted so far",
        f"prefix cache: {stats.num_hit_tokens} of {stats.num_queried_tokens} prompt tokens "
        f"found ({stats.hit_rate:.1%})",
    ]
    if (tier := stats.disk_tier) is not None:
        num_hits = stats.num_cached_prompt_tokens - stats.num_read_prompt_tokens  # in memory
        lines += [
            *describe_disk_tier(engine),
            f"disk cache: {stats.num_read_prompt_tokens} of {stats.num_prompt_tokens - num_hits} "
            f"prompt tokens found that were not in memory; blocks: {tier.num_written_blocks} "
            f"written, {tier.num_dropped_blocks} dropped, {tier.num_corrupt_blocks} corrupt, "
            f"{tier.num_evicted_blocks} evicted",
        ]
    if stats.num_drafted_tokens:
        lines.append(
            f"drafts: {stats.num_accepted_tokens} of {stats.num_drafted_tokens} accepted "
            f"({stats.num_accepted_tokens / stats.num_drafted_tokens:.1%})"
        )
    num_branches = len(branches) - 1
    if num_branches and cache.kind == "paged":
        tables = [engine.cached_block_ids(each.tokens, each.cache_salt) for each in branches]
        lines.append(
            f"sharing: the conversation and {num_branches} branch{'es' * (num_branches > 1)} "
            f"are {sum(map(len, tables))} blocks long and take {len(set().union(*tables))}"
        )
    held, budget = cache.nbytes_held / 1e6, config.nbytes / 1e6
    return "\n".join([*lines, f"K/V memory: {held:.2f} MB allocated, budget {budget:.2f} MB"])


def _from_disk(response: GenerationResponse) -> str:
    return f", {response.read_tokens:,} of them from disk" if response.read_tokens else ""


def _drafts(response: GenerationResponse) -> list[str]:
    if not response.drafted_tokens:
        return []
    return [f"{response.accepted_tokens:,} of {response.drafted_tokens:,} drafts accepted"]
