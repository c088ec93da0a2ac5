"""``PrefixCache``: the K/V that a waiting request begins with; ``SwapSpace``: those of preempted
requests; ``PrefixHistory``: why a prompt has no more. Pure Python, no arrays.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Sequence, Set
from itertools import islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

from mlx_paged.core import (
    AbsentBlock,
    BlockHash,
    ComputedBlocks,
    KVCacheManager,
    SequenceTables,
    extend_block_hashes,
)
from mlx_paged.core.block_hash import ExtraKey
from mlx_paged.core.computed_blocks import NOTHING_COMPUTED
from mlx_paged.core.tier import BlockHeader, GuardedTier, HostMemory, Tier, private_key
from mlx_paged.engine.request import Completion, CompletionStatus, Request
from mlx_paged.options.config import SchedulerConfig
from mlx_paged.request import REASONS, PrefixReport, Reason, SeqId

if TYPE_CHECKING:  # The scheduler imports no arrays.
    from mlx_paged.cache.contiguous import ContiguousKVCache
    from mlx_paged.models.adapters import Adapter

MAX_REPORTS = 256
# The most sequences after a common block that are compared with a prompt.
MAX_BRANCHES = 64
# The most differing tokens of either side in a report ...
MAX_DIFFERING_TOKENS = 256
# ... and the tokens before them, which show the place.
NUM_TOKENS_BEFORE = 16


def extra_hash_keys(cache_salt: str | None, adapter: Adapter | None = None) -> tuple[ExtraKey, ...]:
    """What is hashed with each block in addition to its tokens. An adapter is named by its content,
    since another one may have its name later.
    """
    if adapter is not None:
        return cache_salt, adapter.digest
    return () if cache_salt is None else (cache_salt,)


def _root_of(request: Request) -> Hashable:
    """The parent of the first block of a request's prompt."""
    return "root", extra_hash_keys(request.cache_salt, request.adapter)


class FoundPrefix(NamedTuple):
    """The K/V that are available for a waiting request."""

    hit: ComputedBlocks  # in the prefix cache
    computed: ComputedBlocks  # what it begins with: the hit, or more by its swapped-out blocks
    num_cached_tokens: int  # of the hit, or of the kept sequence

    @property
    def num_tokens(self) -> int:
        """The tokens that need not be computed."""
        return max(self.computed.num_tokens, self.num_cached_tokens)


class PrefixCache:
    """The full blocks of all requests, by the hashes of their tokens; or, if sequences share no
    blocks, the last finished sequence. And the K/V of preempted requests.

    Args:
        swap_space: of the preempted requests.
        unshared: a cache whose sequences share no blocks; ``None`` for others.

    Attributes:
        history: why no more of the last prompts was found.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        swap_space: SwapSpace,
        config: SchedulerConfig,
        unshared: ContiguousKVCache | None,
    ) -> None:
        self._manager = manager
        self._swap_space = swap_space
        self._block_size = manager.pool.block_size
        # What a hit is a multiple of: in a deterministic engine whole chunks, of which others may
        # read the blocks. Those of an answer have other bits than a prompt's, and are its own.
        size = config.max_num_batched_tokens if config.deterministic else self._block_size
        self._hit_size = size
        is_enabled = config.enable_prefix_caching
        self._last_sequence = unshared if is_enabled else None
        self._finds_blocks = is_enabled and unshared is None
        num_tokens = config.num_history_tokens if is_enabled else 0
        self.history = PrefixHistory(num_tokens, self._block_size)

    def find(self, completion: Completion) -> FoundPrefix:
        """Look up the K/V for a waiting request, without taking them."""
        hit, num_cached = NOTHING_COMPUTED, 0
        if self._finds_blocks:
            self._hash_blocks(completion)
            hit = self._longest_hit(completion)
            num_cached = hit.num_tokens
        elif self._last_sequence is not None and completion.request.pooling is None:
            self._hash_blocks(completion)
            num_usable = max(0, _num_findable_tokens(completion) - 1) // self._block_size
            hashes = completion.block_hashes[:num_usable]
            num_cached = self._last_sequence.num_kept_blocks(hashes) * self._block_size
        swapped = self._swap_space.find(completion.seq_id)
        if swapped is None or swapped.num_tokens <= hit.num_tokens:
            return FoundPrefix(hit, hit, num_cached)
        return FoundPrefix(hit, self._manager.resumed(swapped, hit), num_cached)

    def absent_blocks(
        self, completion: Completion, has: Callable[[BlockHash], bool]
    ) -> Sequence[AbsentBlock]:
        """The blocks of a waiting request to read from a tier; none if it is swapped out.

        Args:
            has: whether the tier has a block.
        """
        if self._swap_space.find(completion.seq_id) is not None:
            return ()
        self._hash_blocks(completion)
        num_tokens = _num_findable_tokens(completion)
        return self._manager.absent_blocks(completion.block_hashes, num_tokens, has)

    def copies_any(self, hit: ComputedBlocks, block_ids: Set[int]) -> bool:
        """Whether a request with this prefix hit needs copies of any of these blocks. If the step
        writes them, the copies would be made too early, which is before the step.
        """
        copied = self._manager.block_need.copied_blocks(hit) if block_ids else ()
        return any(block.block_id in block_ids for block in copied)

    def begin(self, completion: Completion, found: FoundPrefix, num_read_tokens: int) -> None:
        """A waiting request has got its slots, into which the kept sequence may be moved.

        Args:
            num_read_tokens: that were read from a tier for it.
        """
        request, hit = completion.request, found.hit
        if completion.status is CompletionStatus.WAITING:
            request.num_cached_tokens = found.num_tokens
            request.num_read_tokens = min(num_read_tokens, hit.num_tokens)
            if request.prefix_report is None:
                request.prefix_report = self.history.admit(
                    completion, found.num_cached_tokens, hit.num_tokens_with_kv
                )
        if self._last_sequence is not None:
            num_tokens = found.num_cached_tokens
            self._manager.count_lookup(_num_findable_tokens(completion), num_tokens)
            if num_tokens:
                self._last_sequence.take_last(self._manager.tables[completion.seq_id])

    def cache_blocks(self, completion: Completion) -> list[int]:
        """Cache the blocks that the newest step has filled, as far as their tokens are known;
        returns the ids of the new ones. Of a request that is pooled, only shared tokens are cached:
        others are of no use to later requests, and would evict conversations.
        """
        if not self._finds_blocks:
            return []
        self._hash_blocks(completion)
        hashes, pooling = completion.block_hashes, completion.request.pooling
        if pooling is not None:
            hashes = hashes[: pooling.num_shared_tokens // self._block_size]
        num_new_blocks = self._manager.cache_blocks(completion.seq_id, hashes)
        num_full_blocks = completion.num_computed_tokens // self._block_size
        end = min(num_full_blocks, len(hashes))
        block_ids: list[int] = []
        for table in self._manager.groups[completion.seq_id]:
            num_evicted = table.num_evicted_tokens // self._block_size
            begin = max(0, end - num_new_blocks - num_evicted)
            block_ids += table.packed_block_ids[begin : end - num_evicted]
        return block_ids

    def end(self, completion: Completion) -> None:
        """A request is finished, and its blocks, if it has any, are about to be freed."""
        if completion.request.pooling is not None:
            return  # It leaves everything as it was.
        table = self._manager.tables.get(completion.seq_id)
        if self._last_sequence is not None and table is not None:
            self._hash_blocks(completion)
            num_full_blocks = completion.num_computed_tokens // self._block_size
            self._last_sequence.keep_last(table, completion.block_hashes[:num_full_blocks])
        self.history.finish(completion)

    def forget_last(self) -> None:
        """Drop the kept sequence."""
        if self._last_sequence is not None:
            self._last_sequence.forget_last()

    def clear(self) -> None:
        """Drop the kept sequence and the history: all K/V in the pool are lost."""
        self.forget_last()
        self.history.clear()

    def _longest_hit(self, completion: Completion) -> ComputedBlocks:
        """The longest hit of whole chunks: a chunk may be evicted in part."""
        num_tokens, hashes = _num_findable_tokens(completion), completion.block_hashes
        hit = self._manager.get_computed_blocks(hashes, num_tokens)
        while num_beyond := hit.num_tokens % self._hit_size:
            hashes = hashes[: (hit.num_tokens - num_beyond) // self._block_size]
            hit = self._manager.get_computed_blocks(hashes, num_tokens)
        return hit

    def _hash_blocks(self, completion: Completion) -> None:
        """Hash the full blocks; of a deterministic engine, those of whole chunks of the prompt
        before its last token, which is computed in any case.
        """
        token_ids = completion.token_ids
        if self._hit_size > self._block_size:
            num_tokens = (completion.num_prompt_tokens - 1) // self._hit_size * self._hit_size
            if len(completion.block_hashes) == num_tokens // self._block_size:
                return
            token_ids = token_ids[:num_tokens]
        elif completion.awaits_token:
            if len(completion.block_hashes) == (len(token_ids) - 1) // self._block_size:
                return
            token_ids = token_ids[:-1]
        request = completion.request
        extra_keys = extra_hash_keys(request.cache_salt, request.adapter)
        extend_block_hashes(completion.block_hashes, token_ids, self._block_size, extra_keys)


def _num_findable_tokens(completion: Completion) -> int:
    """Tokens of which all but the last may be cached: rows whose logits are needed are computed."""
    if completion.num_unscored_tokens:
        return completion.num_prompt_tokens - completion.num_unscored_tokens
    return completion.num_tokens


class SwapSpace:
    """The K/V of preempted requests, in whole blocks, with their recurrent states. Requests that
    don't fit are recomputed.

    Args:
        num_blocks: the most blocks to keep; 0 never swaps.
        num_state_blocks: how many blocks a sequence's recurrent state counts as.

    Attributes:
        tier: stores the blocks until they are discarded: in host memory, unless another is set.
            Requests whose blocks it loses are recomputed.
    """

    def __init__(self, num_blocks: int, num_state_blocks: int = 0):
        self.num_blocks = num_blocks
        self.tier = HostMemory()
        self._has_warned = False
        self._num_state_blocks = num_state_blocks
        self._held: dict[SeqId, SequenceTables] = {}
        self._owners: dict[SeqId, bytes] = {}  # of the blocks, in the tier

    @property
    def tier(self) -> Tier:
        return self._tier

    @tier.setter
    def tier(self, tier: Tier) -> None:
        self._tier = tier if type(tier) is HostMemory else GuardedTier(tier)

    def find(self, seq_id: SeqId) -> SequenceTables | None:
        """The tables of a sequence whose K/V are here."""
        return self._held.get(seq_id)

    @property
    def num_used_blocks(self) -> int:
        """The number of blocks in use."""
        # Over a copy, because any thread may read the stats.
        return sum(each.num_blocks + self._num_state_blocks for each in list(self._held.values()))

    @property
    def num_used_tokens(self) -> int:
        """The number of tokens whose K/V are here."""
        return sum(each.num_tokens for each in list(self._held.values()))

    def reserve(self, seq_id: SeqId, held: SequenceTables) -> bool:
        """Reserve memory for a sequence until :meth:`release`; False if it doesn't fit, or if the
        tier has failed.
        """
        num_blocks = held.num_blocks + self._num_state_blocks
        if num_blocks > self.num_blocks - self.num_used_blocks or self._has_failed():
            return False
        self._held[seq_id], self._owners[seq_id] = held, os.urandom(16)
        return True

    def headers(self, seq_id: SeqId) -> list[list[BlockHeader]]:
        """The headers of the blocks of each group of layers, in order."""
        owner = self._owners[seq_id]
        return [
            [
                BlockHeader(private_key(owner, group, index), group=group)
                for index in range(table.num_blocks + table.num_sinks)
            ]
            for group, table in enumerate(self._held[seq_id].tables)
        ]

    def release(self, seq_id: SeqId) -> None:
        """Discard the K/V of a sequence, if there are any."""
        if seq_id in self._held:
            for headers in self.headers(seq_id):
                self.tier.discard([header.block_hash for header in headers])
            del self._held[seq_id], self._owners[seq_id]

    def _has_failed(self) -> bool:
        """Whether the tier has failed; warns once."""
        failure = self.tier.failure
        if failure is not None and not self._has_warned:
            self._has_warned = True
            # If warnings are errors, this one would stop the engine.
            with contextlib.suppress(Warning):
                warnings.warn(
                    f"[engine] {failure}; from now on preempted requests are computed again",
                    stacklevel=2,
                )
        return failure is not None


class _Sequence:
    """The first tokens of a request, with their K/V, as they are remembered."""

    __slots__ = ("block_hashes", "is_running", "request_id", "root", "token_ids")

    def __init__(self, completion: Completion, num_tokens: int, block_size: int):
        self.request_id = completion.request_id
        self.root = _root_of(completion.request)
        self.token_ids = array("i", islice(completion.token_ids, num_tokens))
        self.block_hashes = completion.block_hashes[: num_tokens // block_size]
        self.is_running = True

    def path(self) -> list[tuple[Hashable, Hashable]]:
        """Parent and name of each block, and of the tail after the last full block."""
        names: list[Hashable] = [self.root, *self.block_hashes, self]
        return list(pairwise(names))


class PrefixHistory:
    """The token ids of the last sequences, and reports on the cache hits of the last prompts.

    Sequences with different salts or adapters are never compared. Not thread-safe, except that any
    thread may copy ``reports`` and ``num_missed_tokens``.

    Args:
        max_num_tokens: the most tokens of all sequences together; 0 disables the history.
        block_size: tokens per block.

    Attributes:
        reports: the last reports, oldest first.
        num_missed_tokens: prompt tokens that were not cached, by reason.
    """

    def __init__(self, max_num_tokens: int, block_size: int):
        self.max_num_tokens = max_num_tokens
        self.num_tokens = 0
        self.reports: deque[PrefixReport] = deque(maxlen=MAX_REPORTS)
        self.num_missed_tokens: dict[str, int] = dict.fromkeys(REASONS, 0)
        self._block_size = block_size
        # Oldest first. A sequence is added with its prompt, and again when it is finished.
        self._sequences: dict[Hashable, _Sequence] = {}
        # {parent: {name: newest sequence}}, the newest last.
        self._children: dict[Hashable, dict[Hashable, _Sequence]] = {}

    def admit(
        self, completion: Completion, num_cached_tokens: int, num_tokens_with_kv: int = 0
    ) -> PrefixReport | None:
        """Report on an admitted prompt, whose blocks are hashed, and remember it.

        Args:
            num_tokens_with_kv: more than the cached tokens if the recurrent state was not kept.
        """
        if not self.max_num_tokens or completion.num_unscored_tokens:
            return None  # Prompts that are scored are computed in any case.
        if completion.request.pooling is not None:
            return None  # Nothing of them is kept.
        report = self._explain(completion, num_cached_tokens, num_tokens_with_kv)
        self.reports.append(report)
        num_missed = report.num_prompt_tokens - report.num_cached_tokens
        self.num_missed_tokens[report.reason] += num_missed
        self._remember(completion)
        return report

    def finish(self, completion: Completion) -> None:
        """Remember a request's answer."""
        if self.max_num_tokens:
            self._remember(completion)
            sequence = self._sequences.get(completion.seq_id)
            if sequence is not None:
                sequence.is_running = False

    def clear(self) -> None:
        """Forget all sequences, whose K/V are gone."""
        self._sequences.clear()
        self._children.clear()
        self.num_tokens = 0

    def _explain(
        self, completion: Completion, num_cached_tokens: int, num_tokens_with_kv: int
    ) -> PrefixReport:
        num_tokens = completion.num_prompt_tokens
        # The last token is computed in any case.
        num_usable_blocks = min(len(completion.block_hashes), (num_tokens - 1) // self._block_size)
        depth, other, position = self._longest_match(completion, num_usable_blocks)
        reason: Reason
        if num_cached_tokens >= num_usable_blocks * self._block_size:
            reason, other, position = "hit", None, num_cached_tokens
        elif num_cached_tokens < depth * self._block_size:
            reason, position = "evicted", num_cached_tokens
            if num_tokens_with_kv > num_cached_tokens:
                reason = "no_state"
            elif other is not None and other.is_running:
                reason = "pending"
        elif other is None or not position or position < num_cached_tokens:
            # More may be cached than is remembered, such as blocks from a tier.
            reason, other, position = "new", None, num_cached_tokens
        elif position == len(other.token_ids):
            reason = "continued"
        else:
            reason = "changed"
        end = position + MAX_DIFFERING_TOKENS
        is_changed = other is not None and reason == "changed"
        return PrefixReport(
            completion.request_id,
            completion.request.cache_salt,
            num_tokens,
            num_cached_tokens,
            reason,
            position,
            None if other is None else other.request_id,
            before=completion.token_ids[max(0, position - NUM_TOKENS_BEFORE) : position],
            expected=list(other.token_ids[position:end]) if other and is_changed else (),
            found=completion.token_ids[position : min(end, num_tokens)],
            num_read_tokens=completion.request.num_read_tokens,
        )

    def _longest_match(
        self, completion: Completion, num_blocks: int
    ) -> tuple[int, _Sequence | None, int]:
        """How many of a prompt's blocks any sequence has, the sequence with the longest common
        prefix, and its length in tokens.
        """
        parent = _root_of(completion.request)
        depth, best = 0, None
        for block_hash in completion.block_hashes[:num_blocks]:
            found = self._children.get(parent, {}).get(block_hash)
            if found is None:
                break
            parent, depth, best = block_hash, depth + 1, found
        start = longest = depth * self._block_size
        newest = reversed(list(self._children.get(parent, {}).values()))
        for sequence in islice(newest, MAX_BRANCHES):
            length = start
            end = min(len(sequence.token_ids), completion.num_prompt_tokens)
            while length < end and sequence.token_ids[length] == completion.token_ids[length]:
                length += 1
            if best is None or length > longest:
                best, longest = sequence, length
        return depth, best, longest

    def _remember(self, completion: Completion) -> None:
        num_tokens = completion.num_tokens - completion.awaits_token
        if num_tokens > self.max_num_tokens:
            return
        self._forget(completion.seq_id)
        sequence = _Sequence(completion, num_tokens, self._block_size)
        self._sequences[completion.seq_id] = sequence
        for parent, name in sequence.path():
            children = self._children.setdefault(parent, {})
            children.pop(name, None)  # The newest comes last.
            children[name] = sequence
        self.num_tokens += num_tokens
        while self.num_tokens > self.max_num_tokens:
            self._forget(next(iter(self._sequences)))

    def _forget(self, seq_id: Hashable) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is None:
            return
        self.num_tokens -= len(sequence.token_ids)
        for parent, name in sequence.path():
            children = self._children.get(parent, {})
            if children.get(name) is sequence:
                del children[name]
                if not children:
                    del self._children[parent]
