"""``FairShares``: how much was done for each user, and whose turn it is. Pure Python.

Places go to the user of whom the fewest sequences run. The tokens of a step for prompts go by
virtual time over counted work, as in the virtual token counters of Sheng et al. 2024: work is the
tokens of prompts that are computed, and one for each step of each running sequence. Nothing here
reads a clock, so all ranks of a model count alike.
"""

from __future__ import annotations

import itertools
from operator import attrgetter

from mlx_paged.engine.request import Share

# By how much work a user may lag behind the one with the most. A user who asks for less than a fair
# share saves up no more than this, and a new user begins with it.
MAX_LAG = 2048
# A user takes the only running sequence of another one whose work is ahead by this much. So where
# there are more users than places, they take turns of at least so many steps.
MIN_LEAD = 1024


class FairShares:
    """The shares of all users with requests, and of those whose past work still counts.

    Attributes:
        num_active: the number of users with requests.
    """

    def __init__(self) -> None:
        self.num_active = 0
        self._shares: dict[str | None, Share] = {}
        self._numbers = itertools.count()

    @property
    def are_shared(self) -> bool:
        """Whether several users have requests."""
        return self.num_active > 1

    def join(self, user: str | None) -> Share:
        """The share of a user, who is about to have a request."""
        share = self._shares.get(user)
        if share is not None and share.is_active:
            return share
        least = self._least_work
        if share is None:
            share = Share(user, next(self._numbers), least)
            self._shares[user] = share
        share.work = max(share.work, least)
        self.num_active += 1
        return share

    def leave(self, share: Share) -> None:
        """A request of a user has ended."""
        if share.is_active:
            return
        self.num_active -= 1
        if not self.num_active:
            self._shares.clear()

    def in_turn(self) -> list[Share]:
        """The users with waiting requests, in the order in which they are admitted."""
        waiting = [share for share in self._shares.values() if share.waiting]
        return sorted(waiting, key=attrgetter("admission_turn"))

    def rank(self) -> bool:
        """Rank the users for the next step; returns whether that changed any rank."""
        active = [share for share in self._shares.values() if share.is_active]
        has_changed = False
        for rank, share in enumerate(sorted(active, key=attrgetter("step_turn"))):
            has_changed = has_changed or share.rank != rank
            share.rank = rank
        return has_changed

    def count_step(self) -> None:
        """Count what running sequences had of a step; the scheduler counts tokens of prompts."""
        if len(self._shares) == 1:
            return  # There is no other to compare with.
        for share in self._shares.values():
            share.work += share.num_running
        least = self._least_work
        for user, share in list(self._shares.items()):
            if share.is_active:
                share.work = max(share.work, least)
            elif share.work <= least:
                del self._shares[user]  # The same as a new user.

    @property
    def _least_work(self) -> int:
        works = [share.work for share in self._shares.values() if share.is_active]
        return max(works) - MAX_LAG if works else 0
