"""``Verification``: which drafts of a step become tokens of their requests. Pure Python."""

from __future__ import annotations

from mlx_paged.core import KVCacheManager
from mlx_paged.engine.batch import Scheduled
from mlx_paged.engine.prefix_cache import PrefixCache
from mlx_paged.request import Request


class Verification:
    """Keeps the K/V of drafts that are accepted, and gives back the slots of the others.

    A step with drafts is verified request by request: :meth:`begin`, then :meth:`accept` before
    each token that is appended and was drafted, then :meth:`end`.

    A recurrent state stands for all tokens of a step or for none. So where a draft is rejected, all
    that the step computed of the request is computed again, in its next step and beside the drafts
    of that; and until it is known, no block is named that the step has filled.

    Args:
        manager: of the block tables.
        prefix_cache: over it.

    Attributes:
        num_drafted_tokens: drafts that were verified, of all requests, and of these accepted:
            ``num_accepted_tokens``.
    """

    def __init__(self, manager: KVCacheManager, prefix_cache: PrefixCache) -> None:
        self._manager = manager
        self._prefix_cache = prefix_cache
        self._is_recurrent = manager.states is not None
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0

    def begin(self, part: Scheduled) -> None:
        """The tokens that follow a request's drafts are known: none of them is accepted yet."""
        num_drafts, request = len(part.draft_token_ids), part.request
        request.num_computed_tokens = part.start
        if not self._is_recurrent:
            request.num_computed_tokens += part.num_new_tokens - num_drafts
        request.num_drafted_tokens += num_drafts
        self.num_drafted_tokens += num_drafts

    def accept(self, request: Request) -> None:
        """The next draft is the token that is appended next: its K/V stay."""
        if not self._is_recurrent:
            request.num_computed_tokens += 1
        request.num_accepted_tokens += 1
        self.num_accepted_tokens += 1

    def end(self, request: Request) -> None:
        """Give back the slots of the drafts that were not accepted."""
        if request.is_finished:
            return
        # The newest token was drawn, and has no K/V.
        num_tokens = self._manager.trim(request.seq_id, request.num_tokens - 1)
        if num_tokens > request.num_computed_tokens:
            request.num_computed_tokens = num_tokens
            self._prefix_cache.cache_blocks(request)
