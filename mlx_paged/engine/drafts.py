"""``Drafter``: proposes tokens of an answer, so that one step verifies several. Pure Python.

Drafts don't change the output: a draft is accepted only if it equals the token that is sampled
anyway (speculative decoding, Leviathan et al. 2023, with the request's own draws instead of
rejection sampling).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlx_paged.engine.batch import Scheduled
from mlx_paged.engine.request import Completion

# Length of the n-grams that are looked up. With two, too many matches are random; the longer they
# are, the longer it takes to find a match again after a wrong draft.
NGRAM_SIZE = 3

# The initial estimate of the acceptance rate, and the weight of each new observation.
FIRST_ACCEPTANCE = 0.5
ACCEPTANCE_RATE = 1 / 8


class Drafter(Protocol):
    """Proposes drafts for requests of which only the last token is not computed yet."""

    def acceptance(self, completion: Completion) -> float:
        """The estimated probability that the first draft is accepted; 0 if it has none to propose.
        The probability that the first k drafts are accepted is taken to be its k-th power.
        """
        ...

    def propose(self, completion: Completion, num_drafts: int) -> list[int]:
        """``[num_drafts]`` token ids that may follow the request's tokens; ``PENDING_TOKEN`` for
        drafts that are computed within the step.
        """
        ...

    def made(self, part: Scheduled) -> Sequence[int]:
        """``[num_drafts]`` token ids: the drafts of a part of a step that was computed."""
        ...

    def note(self, completion: Completion, num_drafts: int, num_accepted: int) -> None:
        """Update the acceptance by the result of a verification."""


class PromptLookup:
    """Drafts from the request's own tokens: those that followed the last occurrence of its last
    ``NGRAM_SIZE`` tokens (prompt look-up decoding, Saxena 2023; vLLM: ``ngram``).

    A look-up takes O(1) per token. So the acceptance is also known for requests without drafts, by
    whether the look-up predicts each token of the answer: text that begins to repeat itself is
    noticed even if drafts did not pay off before.
    """

    def acceptance(self, completion: Completion) -> float:
        found = self._read(completion)
        return found.acceptance if found.next is not None else 0.0

    def propose(self, completion: Completion, num_drafts: int) -> list[int]:
        begin = self._read(completion).next
        if begin is None:
            return []
        token_ids = completion.token_ids
        drafts = token_ids[begin : begin + num_drafts]
        # A repetition with a shorter period than the drafts continues with the drafts themselves.
        period = len(token_ids) - begin
        while len(drafts) < num_drafts:
            drafts.append(drafts[-period])
        return drafts

    def made(self, part: Scheduled) -> Sequence[int]:
        return part.draft_token_ids

    def note(self, completion: Completion, num_drafts: int, num_accepted: int) -> None:
        """Nothing: the acceptance is updated when the tokens are read."""

    def _read(self, completion: Completion) -> _Occurrences:
        found = completion.draft_state
        if not isinstance(found, _Occurrences):
            found = completion.draft_state = _Occurrences()
        if found.num_read < len(completion.token_ids):
            found.read(completion.token_ids, completion.num_prompt_tokens)
        return found


class _Occurrences:
    """Earlier occurrences of a request's n-grams.

    Attributes:
        next: the position of the token after the last occurrence, if there is one.
        acceptance: the share of correct predictions for tokens of the answer, as an exponential
            moving average.
    """

    __slots__ = ("_after", "acceptance", "next", "num_read")

    def __init__(self) -> None:
        self.num_read = 0
        self.next: int | None = None
        self.acceptance = FIRST_ACCEPTANCE
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> position after it

    def read(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        after, found = self._after, self.next
        for position in range(self.num_read, len(token_ids)):
            if found is not None:
                is_right = token_ids[found] == token_ids[position]
                # Repetition within the prompt does not predict repetition in the answer.
                if position >= num_prompt_tokens:
                    self.acceptance += (is_right - self.acceptance) * ACCEPTANCE_RATE
                found = found + 1 if is_right else None
            end = position + 1
            if end >= NGRAM_SIZE:
                ngram = tuple(token_ids[end - NGRAM_SIZE : end])
                # While its predictions are correct, the longer match is kept.
                if found is None:
                    found = after.get(ngram)
                after[ngram] = end
        self.next, self.num_read = found, len(token_ids)
