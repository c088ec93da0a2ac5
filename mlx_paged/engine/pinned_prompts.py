"""``PinnedPrompt``: K/V of unknown tokens that stand before prompts.

mlx-lm's prompt caches do not say of which tokens their K/V are. Such K/V can't be computed again,
so they stay in host memory as if they had been swapped out, and each request that begins with them
swaps them in. In the place of their tokens it has others, and a salt of its own keeps the blocks
that it leaves in the prefix cache from all others.
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
from mlx_paged.snapshots import PromptCacheFile, sequence_headers

PLACEHOLDER_TOKEN = 0


class PinnedPrompt(NamedTuple):
    """What a request gives that shall begin with held K/V.

    Attributes:
        token_ids: stand for the tokens of the K/V, and the request's own follow.
        cache_salt: the request's.
    """

    token_ids: list[int]
    cache_salt: str

    def __repr__(self) -> str:
        return f"PinnedPrompt({len(self.token_ids):,} tokens)"  # The salt keeps others out.


def pin(file: PromptCacheFile, cache: KVCache, swap_space: SwapSpace) -> PinnedPrompt:
    """Read the K/V of a file into the swap space, where they stay.

    Raises:
        SnapshotError: the file can't be read.
    """
    headers = sequence_headers(cache.config, file.num_tokens)
    tier = file.tier(headers)
    prompt = PinnedPrompt(
        [PLACEHOLDER_TOKEN] * file.num_tokens, f"prompt cache {secrets.token_hex()}"
    )
    held = SequenceTables([TableState(len(headers), 0, file.num_tokens)])
    swap_space.pin(prompt.cache_salt, held)
    (stored_as,) = swap_space.headers(prompt.cache_salt)
    for header, stored in zip(headers, stored_as, strict=True):
        swap_space.tier.store(stored, loaded(tier, header))
    return prompt


def check_can_pin(cache: KVCache, has_draft_model: bool) -> None:
    """Refuse by name what a prompt cache of unknown tokens can't be combined with.

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
            "[engine] a prompt cache that does not say its tokens can't be combined with "
            f"{why}; where the tokens are known, import_prompt_cache takes them",
            argument,
        )


def check_begins_with_pinned(
    token_ids: Sequence[int], num_held: int, params: SamplingParams
) -> None:
    """Refuse what would read, or compute, unknown tokens.

    Raises:
        ArgumentError: the prompt does not begin with the held one and go on, or a parameter looks
            at the prompt's tokens.
    """
    if len(token_ids) <= num_held or set(token_ids[:num_held]) != {PLACEHOLDER_TOKEN}:
        raise ArgumentError(
            f"[engine] with the cache_salt of a held prompt, a prompt begins with its {num_held} "
            f"token_ids and has at least one of its own; got {len(token_ids)} tokens",
            "prompt",
        )
    for name, is_used in (
        ("repetition_penalty", params.repetition_penalty != 1),
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("logits_processors", bool(params.logits_processors)),
    ):
        if is_used:
            raise ArgumentError(
                f"[engine] {name} can't be combined with a prompt cache that does not say its "
                "tokens, which it would look at",
                name,
            )
