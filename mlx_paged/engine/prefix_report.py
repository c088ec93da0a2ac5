"""``PrefixReport``: what the prefix cache held of one prompt, and why not more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal, NamedTuple, TypeAlias

Reason: TypeAlias = Literal["hit", "new", "continued", "changed", "evicted", "pending", "no_state"]
REASONS: dict[Reason, str] = {
    "hit": "all blocks of the prompt were cached",
    "new": "nothing that was computed begins like it",
    "continued": "it goes on where the longest sequence of the same beginning ended",
    "changed": "it differs from the longest sequence of the same beginning",
    "evicted": "its beginning was computed before, and evicted since",
    "pending": "its beginning is being computed for another request",
    "no_state": "more of its K/V are cached, and the recurrent state there was not kept",
}


@dataclass(frozen=True)
class PrefixReport:
    """What the prefix cache held of one prompt, and why not more.

    Args:
        reason: one of :data:`REASONS`.
        position: the first token of the prompt where it left what was cached (``"evicted"``,
            ``"pending"``, ``"no_state"``) or computed at all; the length of the cached prefix where
            all of it was there.
        other_request_id: the request whose sequence it is compared with, if there is one.
        before: the last tokens in front of ``position``.
        expected: the tokens of the other sequence from ``position`` on.
        found: those of the prompt.
        num_read_tokens: of the cached ones, those that were read from disk for it.
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
        """How the prompt differs from the other sequence, where it does; a millisecond or so."""
        return change_between(self.expected, self.found) if self.reason == "changed" else None


class Change(NamedTuple):
    """The first difference between two sequences of tokens: ``num_expected`` tokens of one stand
    where the other has ``num_found``. What is reordered has the same tokens on both sides.
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
    # Where a few tokens are the same by chance, the difference continues after them.
    same = next(each for each in matcher.get_matching_blocks() if each.size >= 4 or not each.size)
    if not same.a:
        return Change("inserted", same.a, same.b)
    return Change("replaced" if same.b else "removed", same.a, same.b)


def _reordered(expected: Sequence[int], found: Sequence[int]) -> Change | None:
    """The shortest beginning of both, of one length and with the same tokens, if there is one."""
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
