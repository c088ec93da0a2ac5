"""``PinnedPrompt``: K/V of unknown tokens that precede prompts.

mlx-lm's prompt caches do not contain token ids. Their K/V can't be computed again, so they stay in
host memory as if they had been swapped out, and each request that begins with them swaps them in.
Such a request has placeholders for the unknown tokens, and a unique salt, so that no other request
finds the blocks that it leaves in the prefix cache.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from mlx_paged.cache import KVCache
from mlx_paged.cache.transfer import loaded
from mlx_paged.core import SequenceTables, TableState
from mlx_paged.engine.swap_space import SwapSpace
from mlx_paged.errors import ArgumentError
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.snapshots import PromptCacheFile, SnapshotError, sequence_headers

PLACEHOLDER_TOKEN = 0


class PinnedPrompt(NamedTuple):
    """What a request passes to begin with pinned K/V.

    Attributes:
        token_ids: placeholders for the tokens of the K/V, which the prompt begins with.
        cache_salt: the salt of the request.
    """

    token_ids: list[int]
    cache_salt: str

    def __repr__(self) -> str:
        return f"PinnedPrompt({len(self.token_ids):,} tokens)"  # The salt is secret.


def pin(file: PromptCacheFile, cache: KVCache, swap_space: SwapSpace) -> PinnedPrompt:
    """Read the K/V of a file into the swap space, and pin them there.

    Raises:
        SnapshotError: the file can't be read.
    """
    headers = sequence_headers(cache.config, file.num_tokens)
    tier = file.tier(headers)
    prompt = PinnedPrompt(
        [PLACEHOLDER_TOKEN] * file.num_tokens, f"prompt cache {secrets.token_hex()}"
    )
    held = SequenceTables([TableState(len(headers), 0, file.num_tokens)], is_foreign=True)
    swap_space.pin(prompt.cache_salt, held)
    (stored_as,) = swap_space.headers(prompt.cache_salt)
    for header, stored in zip(headers, stored_as, strict=True):
        if not swap_space.tier.store(stored, loaded(tier, header)):
            why = swap_space.tier.failure or "the tier took not all of it"
            raise SnapshotError(file.file, f"can't be pinned: {why}")
    return prompt


def check_can_pin(cache: KVCache, has_draft_model: bool) -> None:
    """Check that an engine supports prompt caches of unknown tokens.

    Raises:
        ArgumentError: the cache is not a paged one, or has windows, or there is a draft model.
    """
    why = argument = ""
    if cache.kind != "paged":
        why, argument = f"kv={cache.kind!r}: it needs kv='paged'", "kv"
    elif not cache.config.keeps_all:
        why, argument = "layers that keep only the tokens of a window", "window"
    elif has_draft_model:
        why, argument = "a draft model, of which it has no K/V", "draft_model"
    if why:
        raise ArgumentError(
            f"[engine] a prompt cache without token ids can't be combined with {why}; if the "
            "tokens are known, use import_prompt_cache",
            argument,
        )


def check_begins_with_pinned(
    token_ids: Sequence[int], num_held: int, params: SamplingParams
) -> None:
    """Check that a request does not depend on unknown tokens.

    Raises:
        ArgumentError: the prompt does not continue the pinned one, or a parameter depends on the
            prompt's tokens.
    """
    if len(token_ids) <= num_held or set(token_ids[:num_held]) != {PLACEHOLDER_TOKEN}:
        raise ArgumentError(
            f"[engine] with the cache_salt of a pinned prompt, a prompt must begin with its "
            f"{num_held} token_ids and add at least one token; got {len(token_ids)} tokens",
            "prompt",
        )
    for name, is_used in (
        ("repetition_penalty", params.repetition_penalty != 1),
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("logits_processors", bool(params.logits_processors)),
    ):
        if is_used:
            raise ArgumentError(
                f"[engine] {name} can't be combined with a prompt cache without token ids: it "
                "depends on them",
                name,
            )
