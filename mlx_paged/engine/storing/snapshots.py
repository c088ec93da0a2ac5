"""``Snapshots``: saves parts of an engine's prefix cache to files, and loads them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from mlx.nn.layers.base import Module

from mlx_paged.cache import KVCache, PagedKVCache
from mlx_paged.cache.state_bytes import state_to_bytes
from mlx_paged.cache.transfer import load_prefix, store_blocks
from mlx_paged.core import (
    Checkpoint,
    ComputedBlocks,
    KVCacheManager,
    hash_token_blocks,
)
from mlx_paged.core.block_hash import ExtraKey
from mlx_paged.core.tier import BlockHeader, Tier
from mlx_paged.distributed import Ranks
from mlx_paged.engine.scheduling.prefix_cache import extra_hash_keys
from mlx_paged.errors import ArgumentError
from mlx_paged.models.adapters import Adapter
from mlx_paged.models.identity import ModelIdentity, code_of
from mlx_paged.ops import StateRow
from mlx_paged.options.argument_values import BOOL
from mlx_paged.request import NAME
from mlx_paged.snapshots import (
    KVFacts,
    PromptCacheFile,
    SnapshotError,
    SnapshotFile,
    check_has_blocks,
    check_path,
    check_token_ids,
    prefix_headers,
    written_prompt_cache,
    written_snapshot,
)


class Prefix(NamedTuple):
    """The K/V of a file, for the prefix cache.

    Attributes:
        headers: of the blocks of these tokens that the tier has.
        checkpoint: the recurrent state after them; ``None`` for a model without one.
        is_foreign: whether they may differ from what this engine computes for these tokens.
    """

    token_ids: list[int]
    headers: Sequence[BlockHeader]
    tier: Tier
    checkpoint: Checkpoint | None
    is_foreign: bool


class Snapshots:
    """Saves and loads full blocks of an engine's prefix cache.

    Args:
        identities: returns those of the model and of the draft model, if there is one, whose layers
            follow those of the model. It is called when a file is written or read.
        finds_prefixes: whether prefix caching is enabled.
        ranks: among which the model is split.
        matmul: what computes K/V beside MLX; empty for MLX alone.
        is_deterministic: whether K/V that other code may have computed are refused.
    """

    def __init__(
        self,
        model: Module,
        identities: Callable[[], Sequence[ModelIdentity]],
        cache: KVCache,
        manager: KVCacheManager,
        finds_prefixes: bool,
        ranks: Ranks,
        matmul: str,
        is_deterministic: bool = False,
    ):
        self._model, self._identities = model, identities
        self._cache, self._manager = cache, manager
        self._finds_prefixes, self._ranks, self._matmul = finds_prefixes, ranks, matmul
        self._is_deterministic = is_deterministic

    @cached_property
    def facts(self) -> KVFacts:
        """What the K/V depend on. The first access reads all weights."""
        code = code_of(check_has_blocks(self._cache), self._matmul)
        return KVFacts.of(self._identities(), self._cache, code)

    def _facts_with(self, adapter: Adapter | None) -> KVFacts:
        """The facts of K/V that were computed with an adapter, which is a model of its own."""
        if adapter is None:
            return self.facts
        model = self.facts.model
        digest = hashlib.sha256(model.digest.encode() + adapter.digest).hexdigest()
        return replace(self.facts, model=ModelIdentity(digest, f"{model.name} + {adapter.name}"))

    def check(self) -> PagedKVCache:
        """The cache, if its K/V can be saved.

        Raises:
            ArgumentError: the cache is not a paged one, prefix caching is disabled, or the model is
                split over several ranks.
        """
        cache = check_has_blocks(self._cache)
        if self._ranks.size > 1:
            raise ArgumentError(
                "[engine] snapshots can't be combined with several ranks, each of which has only "
                "the K/V of some heads",
                "model",
            )
        if not self._finds_prefixes:
            raise ArgumentError(
                "[engine] snapshots need enable_prefix_caching: K/V of finished requests are in "
                "the prefix cache",
                "enable_prefix_caching",
            )
        return cache

    def save(
        self,
        path: str | Path,
        token_ids: Sequence[int],
        cache_salt: str | None,
        adapter: Adapter | None = None,
    ) -> int:
        """Write the cached prefix of a conversation to a safetensors file; returns its number of
        tokens.

        The file is written under a temporary name, then renamed. Only another snapshot is
        overwritten. At most 8 MiB of blocks are copied at a time.

        Args:
            token_ids: of the conversation: a prompt and its answer.
            cache_salt: the salt of its requests.
            adapter: that they ran with.

        Raises:
            ArgumentError: none of it is in the prefix cache, or as :meth:`check`.
            SnapshotError: a file of that name is not a snapshot, or the file can't be written; an
                existing snapshot is unchanged.
        """
        file, cache = check_path(path), self.check()
        token_ids, blocks, computed = self._find(token_ids, _keys(cache_salt, adapter))
        headers, checkpoint = [header for header, _ in blocks], computed.checkpoint
        state = None if checkpoint is None else state_to_bytes(checkpoint.content)
        facts = self._facts_with(adapter)
        facts = replace(facts, computed_by=None) if computed.is_foreign else facts
        with written_snapshot(file, facts, token_ids, headers, state) as tier:
            store_blocks(cache, tier, blocks)
        return len(token_ids)

    def open(
        self, path: str | Path, cache_salt: str | None, adapter: Adapter | None = None
    ) -> Prefix:
        """Open and verify a file.

        Raises:
            ArgumentError: as :meth:`check`.
            SnapshotError: the file can't be read, was truncated or altered, or its model, block
                size, dtype, format, shape or window differs.
        """
        self.check()
        file = SnapshotFile(path, self._facts_with(adapter))
        state, block_size = file.state(), self._cache.config.block_size
        if state is not None and len(file.token_ids) % block_size:
            raise SnapshotError(
                file.file,
                f"holds the recurrent state after {len(file.token_ids)} tokens, and an engine can "
                f"continue only from the end of a block of {block_size}",
            )
        return self._prefix(file, file.token_ids, _keys(cache_salt, adapter), state)

    def export_prompt_cache(
        self,
        path: str | Path,
        token_ids: Sequence[int],
        cache_salt: str | None,
        model_name: str | None,
    ) -> int:
        """Write the cached prefix of a conversation as mlx-lm's own prompt cache, for
        ``mlx_lm.generate --prompt-cache-file`` or ``prompt_cache=``; returns its number of tokens.
        A file of that name is replaced.

        Args:
            token_ids, cache_salt: as :meth:`save`; of requests without an adapter.
            model_name: the folder or hub id that mlx-lm loads; by default the name by which the
                model was loaded.

        Raises:
            ArgumentError: as :meth:`save`, or mlx-lm's caches can't represent these K/V.
            SnapshotError: the file can't be written; an existing one is unchanged.
        """
        cache = self.check()
        token_ids, blocks, _ = self._find(token_ids, _keys(cache_salt))
        num_tokens, headers = len(token_ids), [header for header, _ in blocks]
        with written_prompt_cache(
            path, self._model, cache, num_tokens, headers, model_name, token_ids
        ) as tier:
            store_blocks(cache, tier, blocks)
        return num_tokens

    def open_prompt_cache(
        self,
        path: str | Path,
        token_ids: Sequence[int] | None,
        cache_salt: str | None,
        allow_other_model: bool,
    ) -> Prefix:
        """Open a prompt cache of mlx-lm's.

        Args:
            token_ids: of all tokens in the file. Files of :meth:`export_prompt_cache` contain them.
            allow_other_model: use the file even if it names another model than this one.

        Raises:
            ArgumentError: as :meth:`check`, the number of tokens differs, or the engine has a
                ``window``.
            SnapshotError: the file can't be read, is not a prompt cache, names another model, or
                its layers, dtype or format differ.
        """
        self.check()
        allow_other_model = BOOL.check("snapshot", "allow_other_model", allow_other_model)
        file = PromptCacheFile(path, self._model, self._cache, allow_other_model)
        if token_ids is not None:
            file.check_token_ids(ids := check_token_ids(token_ids))
        elif file.token_ids is not None:
            ids = file.token_ids
        else:
            raise ArgumentError(
                f"[snapshot] {file.file} does not contain the ids of its tokens, like all of "
                "mlx-lm's own prompt caches; give token_ids",
                "token_ids",
            )
        return self._prefix(file, ids, _keys(cache_salt))

    def put(self, process_output: Callable[[], None], prefix: Prefix) -> Exception | None:
        """Put K/V into the prefix cache.

        Args:
            process_output: waits for the step in flight.

        Returns:
            The error, such as a :class:`CacheFullError` or that of a changed file; the bookkeeping
            is then unchanged.
        """
        process_output()
        try:
            load_prefix(self.check(), prefix.tier, prefix.headers, prefix.is_foreign)
            if self._manager.states is not None and prefix.checkpoint is not None:
                num_tokens = len(prefix.token_ids)
                self._manager.states.checkpoints.put(prefix.checkpoint, num_tokens)
        except Exception as error:
            return error
        return None

    def _prefix(
        self,
        file: SnapshotFile | PromptCacheFile,
        token_ids: list[int],
        extra_keys: tuple[ExtraKey, ...],
        state: StateRow | None = None,
    ) -> Prefix:
        config = self._cache.config
        hashes = hash_token_blocks(token_ids, config.block_size, extra_keys)
        headers = prefix_headers(config, token_ids, hashes)
        is_foreign = file.is_foreign
        if is_foreign and self._is_deterministic:
            raise SnapshotError(
                file.file,
                "holds K/V of which it is not known that this deterministic engine would compute "
                "the same bits; use one that such an engine has saved",
            )
        checkpoint = None if state is None else Checkpoint(hashes[-1], state, is_foreign)
        return Prefix(token_ids, headers, file.tier(headers), checkpoint, is_foreign)

    def _find(
        self, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...]
    ) -> tuple[list[int], list[tuple[BlockHeader, int]], ComputedBlocks]:
        """The longest cached prefix of these tokens, in full blocks, its blocks with their headers,
        and what the manager knows of them.

        Raises:
            ArgumentError: the token ids are invalid, or not even one block is cached.
        """
        config, block_size = self._cache.config, self._cache.config.block_size
        token_ids = check_token_ids(token_ids)
        hashes = hash_token_blocks(token_ids, block_size, extra_keys)
        computed = self._manager.get_computed_blocks(hashes, len(hashes) * block_size + 1)
        if not computed.num_tokens:
            raise ArgumentError(
                f"[snapshot] no K/V of these {len(token_ids)} tokens are in the prefix cache, "
                f"which holds whole blocks of {block_size}",
                "token_ids",
            )
        headers = prefix_headers(config, token_ids, hashes[: computed.num_tokens // block_size])
        ids = [block.block_id for block in computed.blocks]
        blocks = list(zip(headers, ids, strict=True))
        return token_ids[: computed.num_tokens], blocks, computed


def _keys(cache_salt: str | None, adapter: Adapter | None = None) -> tuple[ExtraKey, ...]:
    return extra_hash_keys(NAME.check("engine", "cache_salt", cache_salt), adapter)
