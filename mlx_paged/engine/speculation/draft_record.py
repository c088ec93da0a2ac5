"""``DraftRecord``: how the drafts of a conversation have fared, by which more of them are tried or
not. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

from mlx_paged.core import BlockHash

# The least weight of a new observation in a moving average of acceptances, and the observations
# that the first estimate counts as.
LEAST_WEIGHT = 1 / 16
FIRST_WEIGHT = 2
# The credit of a conversation's drafts, in tokens, and what each token adds to it: together 1.6% of
# the first 1,000 tokens.
CREDIT = 6.0
CREDIT_PER_TOKEN = 0.01
# Tokens without drafts after which averages that have ruled them out are forgotten.
PAUSE = 64
# Blocks by which conversations are found again, two of each.
MAX_RECORDS = 1024


class DraftRecord:
    """How the drafts of a conversation have fared.

    Drafts are tried while they are expected to pay. Expectations may be wrong, so drafts have a
    credit, in tokens: what they cost more than they gain is taken from it, and each token of the
    conversation adds a little, up to ``CREDIT``. Without credit, a request is parked until it is
    full again. With it, averages that rule drafts out are forgotten after ``PAUSE`` tokens, since
    the text may have changed. So all drafts of a conversation cost ``CREDIT`` tokens and a share of
    ``CREDIT_PER_TOKEN`` more than they gain at most, however wrong the averages are, and no clock
    is read.

    Args:
        first: the first estimate of each acceptance.
        num_tokens: of the request.

    Attributes:
        acceptances: by depth, the probability that a draft is accepted if those before it are:
            moving averages. One that was never observed equals the one before it.
        price: tokens that the drafts of the newest step cost.
    """

    __slots__ = (
        *("_counts", "_credit", "_first", "_num_tokens", "_resumes_at"),
        *("acceptances", "price"),
    )

    def __init__(self, first: float, num_tokens: int) -> None:
        self._first, self._num_tokens = first, num_tokens
        self.acceptances, self._counts = [first], [0]
        self._credit, self._resumes_at, self.price = CREDIT, math.inf, 0.0

    def is_parked(self, num_tokens: int) -> bool:
        """Whether a request with this many tokens tries no drafts."""
        return self._credit <= 0 and num_tokens < self._resumes_at

    def forget_old(self, num_tokens: int) -> None:
        """Forget the averages if the last drafts were long ago."""
        if num_tokens >= self._resumes_at:
            self.acceptances, self._counts = [self._first], [0]
            self._resumes_at = math.inf

    def observe_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Learn of the drafts of a step."""
        for depth in range(num_accepted):
            self.observe(depth, True)
        if num_accepted < num_drafts:
            self.observe(num_accepted, False)

    def observe(self, depth: int, is_accepted: bool) -> None:
        """Learn of a draft whose predecessors were accepted."""
        depth = min(depth, len(self._counts))
        if depth == len(self._counts):
            self.acceptances.append(self.acceptances[-1])
            self._counts.append(0)
        self._counts[depth] += 1
        weight = max(LEAST_WEIGHT, 1 / (FIRST_WEIGHT + self._counts[depth]))
        self.acceptances[depth] += (is_accepted - self.acceptances[depth]) * weight

    def settle(self, num_accepted: int, num_tokens: int) -> None:
        """Take from the credit what the drafts of a step have cost more than they have gained."""
        earned = (num_tokens - self._num_tokens) * CREDIT_PER_TOKEN + num_accepted
        self._credit = min(CREDIT, self._credit + earned - self.price)
        self._num_tokens = num_tokens
        is_parked = self._credit <= 0
        pause = (CREDIT - self._credit) / CREDIT_PER_TOKEN if is_parked else PAUSE
        self._resumes_at = num_tokens + pause

    def copy(self, num_more_tokens: int) -> DraftRecord:
        """A copy for a request with more tokens, which are not of an answer."""
        record = copy(self)
        record.acceptances, record._counts = list(self.acceptances), list(self._counts)
        record._num_tokens += num_more_tokens
        record._resumes_at += num_more_tokens
        return record


class DraftRecords:
    """The records of the last conversations, by the hashes of their last full blocks."""

    def __init__(self) -> None:
        # With the number of tokens of the conversation, the oldest first.
        self._records: dict[BlockHash, tuple[DraftRecord, int]] = {}

    def find(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> DraftRecord | None:
        """The record of the conversation that a request with these blocks and this number of tokens
        continues.
        """
        for block_hash in reversed(block_hashes if self._records else ()):
            if block_hash in self._records:
                record, num_tokens_before = self._records[block_hash]
                return record.copy(num_tokens - num_tokens_before)
        return None

    def keep(
        self,
        record: DraftRecord,
        block_hashes: Sequence[BlockHash],
        num_prompt_blocks: int,
        num_tokens: int,
    ) -> None:
        """Keep the record of a request that is finished.

        Clients may send its answer back in other words, without the reasoning, so the last block of
        its prompt finds the record, too.
        """
        last_of_prompt = block_hashes[:num_prompt_blocks][-1:]
        for block_hash in {*last_of_prompt, *block_hashes[-1:]}:
            self._records.pop(block_hash, None)
            self._records[block_hash] = record, num_tokens
        while len(self._records) > MAX_RECORDS:
            del self._records[next(iter(self._records))]
