"""``Verification``: which drafts of a step become tokens of their requests. Pure Python."""

from __future__ import annotations

from mlx_paged.core import KVCacheManager
from mlx_paged.engine.batch import Scheduled
from mlx_paged.request import Request


class Verification:
    """Keeps the K/V of drafts that are accepted, and gives back the slots of the others.

    A step with drafts is verified request by request: :meth:`begin`, then :meth:`accept` before
    each token that is appended and was drafted, then :meth:`end`.

    Args:
        manager: of the block tables.

    Attributes:
        num_drafted_tokens: drafts that were verified, of all requests, and of these accepted:
            ``num_accepted_tokens``.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0

    def begin(self, part: Scheduled) -> None:
        """The tokens that follow a request's drafts are known: none of them is accepted yet."""
        num_drafts = len(part.draft_token_ids)
        part.request.num_computed_tokens = part.start + part.num_new_tokens - num_drafts
        part.request.num_drafted_tokens += num_drafts
        self.num_drafted_tokens += num_drafts

    def accept(self, request: Request) -> None:
        """The next draft is the token that is appended next: its K/V stay."""
        request.num_computed_tokens += 1
        request.num_accepted_tokens += 1
        self.num_accepted_tokens += 1

    def end(self, request: Request) -> None:
        """Give back the slots of the drafts that were not accepted."""
        if not request.is_finished:
            self._manager.trim(request.seq_id, request.num_computed_tokens)
