"""``PrefixReport``: how much of a prompt was cached, and why not more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal, NamedTuple, TypeAlias

Reason: TypeAlias = Literal["hit", "new", "continued", "changed", "evicted", "pending", "no_state"]
REASONS: dict[Reason, str] = {
    "hit": "all blocks of the prompt were cached",
    "new": "no previous sequence begins like it",
    "continued": "it continues the longest sequence with the same beginning",
    "changed": "it differs from the longest sequence with the same beginning",
    "evicted": "its beginning was computed before and has been evicted",
    "pending": "its beginning is being computed for another request",
    "no_state": "more of its K/V are cached, but the recurrent state after them was not kept",
}


@dataclass(frozen=True)
class PrefixReport:
    """How much of a prompt was cached, and why not more.

    Args:
        reason: one of :data:`REASONS`.
        position: the first token of the prompt that was not cached (``"evicted"``, ``"pending"``,
            ``"no_state"``) or not computed before; the length of the cached prefix for a full hit.
        other_request_id: the request that it is compared with, if there is one.
        before: the last tokens before ``position``.
        expected: the tokens of the other sequence from ``position`` on.
        found: the tokens of the prompt from ``position`` on.
        num_read_tokens: how many of the cached tokens were read from disk for it.
    """

    request_id: str
    cache_salt: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    reason: Reason
    position: int
    other_request_id: str | None = None
    before: Sequence[int] = ()
    expected: Sequence[int] = ()
    found: Sequence[int] = ()
    num_read_tokens: int = 0

    def change(self) -> Change | None:
        """How the prompt differs from the other sequence, if it does. Takes about a millisecond."""
        return change_between(self.expected, self.found) if self.reason == "changed" else None


class Change(NamedTuple):
    """The first difference between two sequences of tokens: ``num_expected`` tokens of one are
    replaced by ``num_found`` of the other. If they are reordered, they are the same on both sides.
    """

    kind: Literal["inserted", "removed", "replaced", "reordered"]
    num_expected: int
    num_found: int


def change_between(expected: Sequence[int], found: Sequence[int]) -> Change:
    """The difference between two sequences whose first tokens differ."""
    reordered = _reordered(expected, found)
    if reordered is not None:
        return reordered
    matcher = SequenceMatcher(None, expected, found, autojunk=False)
    # A few equal tokens may be a coincidence: the difference continues after them.
    same = next(each for each in matcher.get_matching_blocks() if each.size >= 4 or not each.size)
    if not same.a:
        return Change("inserted", same.a, same.b)
    return Change("replaced" if same.b else "removed", same.a, same.b)


def _reordered(expected: Sequence[int], found: Sequence[int]) -> Change | None:
    """The shortest beginnings of both with the same tokens in another order, if there are some."""
    surplus: Counter[int] = Counter()
    num_unequal = 0
    for number, (left, right) in enumerate(zip(expected, found, strict=False), 1):
        for token, step in ((left, 1), (right, -1)):
            before = surplus[token]
            surplus[token] = after = before + step
            num_unequal += (after != 0) - (before != 0)
        if not num_unequal:
            return Change("reordered", number, number)
    return None
