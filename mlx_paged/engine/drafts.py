"""Who proposes how an answer goes on, so that one step can verify several tokens. Pure Python.

A draft changes no token: it is accepted only where it equals the token that is drawn anyway
(speculative decoding, Leviathan et al. 2023, with the draws of the request itself in the place of
rejection sampling).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlx_paged.engine.batch import Scheduled
from mlx_paged.request import ModuleState, Request

# Tokens that have to come again for the look-up to find what followed them. Of two, too many are
# chance; after a draft that was wrong, it takes this many tokens to find the place again.
NGRAM_SIZE = 3

# The acceptance to begin with, and how fast it follows what happens.
FIRST_ACCEPTANCE = 0.5
ACCEPTANCE_RATE = 1 / 8


class Drafter(Protocol):
    """Proposes drafts for requests whose tokens are all computed but the last one."""

    def acceptance(self, request: Request) -> float:
        """The estimated probability that the first draft is accepted; 0 if there are no drafts to
        make.

        The k-th draft is taken to be accepted with its k-th power.
        """
        ...

    def propose(self, request: Request, num_drafts: int) -> list[int]:
        """``[num_drafts]`` token ids, to follow the tokens that the request has; ``PENDING_TOKEN``
        for those that the step itself makes.
        """
        ...

    def made(self, part: Scheduled) -> Sequence[int]:
        """``[num_drafts]`` token ids, the drafts of a part whose step was computed."""
        ...

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Note how many drafts of a request were verified, and how many of them were accepted."""


class PromptLookup:
    """Drafts from the request's own tokens: what followed when its last ``NGRAM_SIZE`` tokens came
    before (prompt look-up decoding, Saxena 2023; vLLM: ``ngram``).

    Looking costs O(1) per token. So the acceptance is known of requests that make no drafts, too:
    each token of the answer says whether the look-up foresaw it. Text that begins to repeat itself
    is noticed although drafts did not pay before.
    """

    def acceptance(self, request: Request) -> float:
        found = self._read(request)
        return found.acceptance if found.next is not None else 0.0

    def propose(self, request: Request, num_drafts: int) -> list[int]:
        begin = self._read(request).next
        if begin is None:
            return []
        token_ids = request.token_ids
        drafts = token_ids[begin : begin + num_drafts]
        # What repeats with a period shorter than the drafts goes on with the drafts themselves.
        period = len(token_ids) - begin
        while len(drafts) < num_drafts:
            drafts.append(drafts[-period])
        return drafts

    def made(self, part: Scheduled) -> Sequence[int]:
        return part.draft_token_ids

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """The tokens themselves say it when they are read."""

    def _read(self, request: Request) -> _Occurrences:
        found = request.draft_state
        if not isinstance(found, _Occurrences):
            found = request.draft_state = _Occurrences()
        if found.num_read < len(request.token_ids):
            found.read(request.token_ids, request.num_prompt_tokens)
        return found


class _Occurrences(ModuleState):
    """Where the last tokens of a request came before.

    Attributes:
        next: the position of the token that followed them there, if there is one.
        acceptance: of the tokens of the answer that were looked up, the share that was right, the
            newest ones counting most.
    """

    __slots__ = ("_after", "acceptance", "next", "num_read")

    def __init__(self) -> None:
        self.num_read = 0
        self.next: int | None = None
        self.acceptance = FIRST_ACCEPTANCE
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the position after its last one

    def read(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        after, found = self._after, self.next
        for position in range(self.num_read, len(token_ids)):
            if found is not None:
                is_right = token_ids[found] == token_ids[position]
                # A prompt says nothing about how well the answer will repeat it.
                if position >= num_prompt_tokens:
                    self.acceptance += (is_right - self.acceptance) * ACCEPTANCE_RATE
                found = found + 1 if is_right else None
            end = position + 1
            if end >= NGRAM_SIZE:
                ngram = tuple(token_ids[end - NGRAM_SIZE : end])
                # As long as it is right, the longer match goes on: it knows more of the context.
                if found is None:
                    found = after.get(ngram)
                after[ngram] = end
        self.next, self.num_read = found, len(token_ids)
