"""``PrefixHistory``: why the prefix cache did not contain more of a prompt.

A hash that is missing from the cache does not explain the miss. So the token ids of the last
sequences are remembered, and compared with each new prompt: was its beginning computed and evicted,
or where and how does it differ from all previous sequences?
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable
from itertools import islice, pairwise

from mlx_paged.core import BlockHash
from mlx_paged.engine.request import Completion
from mlx_paged.request import REASONS, PrefixReport, Reason

MAX_REPORTS = 256
# The most sequences after a common block that are compared with a prompt.
MAX_BRANCHES = 64
# The most differing tokens of either side in a report ...
MAX_DIFFERING_TOKENS = 256
# ... and the tokens before them, which show the place.
NUM_TOKENS_BEFORE = 16


class _Sequence:
    """The remembered tokens of a request."""

    __slots__ = ("block_hashes", "is_running", "request_id", "root", "token_ids")

    def __init__(self, completion: Completion):
        self.request_id = completion.request_id
        self.root: Hashable = ("root", completion.request.cache_salt)
        self.token_ids: array[int] = array("i")
        self.block_hashes: list[BlockHash] = []
        self.is_running = True

    def path(self) -> list[tuple[Hashable, Hashable]]:
        """Parent and name of each block, and of the tail after the last full block."""
        names: list[Hashable] = [self.root, *self.block_hashes, self]
        return list(pairwise(names))


class PrefixHistory:
    """The token ids of the last sequences, and reports on the cache hits of the last prompts.

    Sequences with different salts are never compared. Not thread-safe, except that any thread may
    copy ``reports`` and ``num_missed_tokens``.

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
            # More may be cached than is remembered, such as blocks from disk.
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
        parent: Hashable = ("root", completion.request.cache_salt)
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
        sequence = _Sequence(completion)
        sequence.token_ids.extend(islice(completion.token_ids, num_tokens))
        sequence.block_hashes = completion.block_hashes[: num_tokens // self._block_size]
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
