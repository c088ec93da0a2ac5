"""``Speculation``: which requests of a step try drafts, and how many. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_paged.engine.batch import Scheduled
from mlx_paged.engine.draft_gate import ALWAYS, DraftGate
from mlx_paged.engine.drafts import Drafter
from mlx_paged.request import Request


@dataclass(frozen=True)
class Speculation:
    """Who makes drafts, and the rule for how many of them a step verifies.

    Args:
        drafter: makes them; ``None`` is nobody.
        num_draft_tokens: the most that a request has in a step.
    """

    drafter: Drafter | None = None
    num_draft_tokens: int = 0
    gate: DraftGate = ALWAYS

    @property
    def is_on(self) -> bool:
        return self.drafter is not None and self.num_draft_tokens > 0

    def num_drafts(
        self, requests: Sequence[Request], num_rows: int, num_tokens: int
    ) -> Sequence[int]:
        """How many drafts each request should try.

        Args:
            num_rows: of the step without drafts.
            num_tokens: that the step gives without drafts.
        """
        drafter = self.drafter
        assert drafter is not None, "speculation is on"
        acceptances = list(map(drafter.acceptance, requests))
        if not any(acceptances):
            return [0] * len(requests)
        return self.gate.num_drafts(acceptances, num_rows, num_tokens, self.num_draft_tokens)

    def propose(self, request: Request, num_drafts: int) -> list[int]:
        assert self.drafter is not None, "speculation is on"
        return self.drafter.propose(request, num_drafts)

    def made(self, part: Scheduled) -> Sequence[int]:
        """The drafts of a part whose step was computed."""
        assert self.drafter is not None, "speculation is on"
        return self.drafter.made(part)

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """So many drafts of a request were verified, and so many of them accepted."""
        if self.drafter is not None:
            self.drafter.note(request, num_drafts, num_accepted)


NO_SPECULATION = Speculation()
