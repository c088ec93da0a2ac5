"""``Verification``: accepts and rolls back the drafts of a step. Pure Python."""

from __future__ import annotations

from mlx_paged.core import KVCacheManager
from mlx_paged.engine.batch import Scheduled
from mlx_paged.engine.prefix_cache import PrefixCache
from mlx_paged.engine.request import Completion


class Verification:
    """Keeps the K/V of accepted drafts, and frees the slots of rejected ones.

    A step with drafts is verified request by request: :meth:`begin`, then :meth:`accept` before
    each appended token that was drafted, then :meth:`end`.

    A recurrent state includes either all tokens of a step or none. So if a draft is rejected, all
    tokens that the step computed for the request are computed again in its next step, together with
    new drafts; and blocks that the step has filled are not hashed before the verification.

    Args:
        manager: of the block tables.
        prefix_cache: of the same manager.

    Attributes:
        num_drafted_tokens: verified drafts of all requests.
        num_accepted_tokens: how many of them were accepted.
    """

    def __init__(self, manager: KVCacheManager, prefix_cache: PrefixCache) -> None:
        self._manager = manager
        self._prefix_cache = prefix_cache
        self._is_recurrent = manager.states is not None
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0

    def begin(self, part: Scheduled) -> None:
        """Begin to verify a request's drafts, none of which is accepted yet."""
        num_drafts, completion = len(part.draft_token_ids), part.completion
        completion.num_computed_tokens = part.start
        if not self._is_recurrent:
            completion.num_computed_tokens += part.num_new_tokens - num_drafts
        completion.output.num_drafted_tokens += num_drafts
        self.num_drafted_tokens += num_drafts

    def accept(self, completion: Completion) -> None:
        """Accept the next draft, which equals the token that is appended next: keep its K/V."""
        if not self._is_recurrent:
            completion.num_computed_tokens += 1
        completion.output.num_accepted_tokens += 1
        self.num_accepted_tokens += 1

    def end(self, completion: Completion) -> None:
        """Free the slots of rejected drafts."""
        if completion.is_finished:
            return
        # The newest token was just sampled, and has no K/V.
        num_tokens = self._manager.trim(completion.seq_id, completion.num_tokens - 1)
        if num_tokens > completion.num_computed_tokens:
            completion.num_computed_tokens = num_tokens
            self._prefix_cache.cache_blocks(completion)
