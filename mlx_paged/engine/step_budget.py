"""How many tokens a step may hold, decided by what steps have taken. Pure Python, no arrays.

The scheduler is given numbers and reads no clock. They come from :class:`ClockedBudgets`, which
measures steps, or from :class:`RepeatedBudgets`, which has a list of them: what another engine
chose, or nothing, which leaves the limits of the configuration.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeAlias

from mlx_paged.config import SchedulerConfig
from mlx_paged.engine.batch import Batch
from mlx_paged.engine.step_price import Measured, StepPrice
from mlx_paged.request import Request

# Budgets are powers of 2 from here on, and the limit, so that the shapes of steps repeat.
SMALLEST_BUDGET = 32
# A step has room for this many tokens of prompts, beside one for each request that runs: 16 of a
# prompt beside 16 answers.
MIN_PROMPT_TOKENS = 15
# Where nothing was measured yet.
FIRST_PREFILL_BUDGET = 128
FIRST_MIXED_BUDGET = 64
# A budget falls where its steps take this much of what they may, and rises where those of the next
# one would take less than that.
FALL, RISE = 1.15, 0.85
# If the caller was away between two steps for more than this share of the time, and these seconds,
# the device may have waited for it.
AWAY_SHARE, AWAY_SECONDS = 0.25, 0.01
# Changes that are remembered, some 100 bytes each.
MAX_CHANGES = 2**14

LOG = logging.getLogger("mlx_paged.engine")

Clock: TypeAlias = Callable[[], float]


class TokenBudgets(NamedTuple):
    """The most new tokens of a step, decodes included: where no answer runs, and beside answers."""

    prefill: int
    mixed: int


class ChosenBudgets(NamedTuple):
    """Budgets that hold from a step on, which is counted as ``Scheduler.num_steps`` does."""

    step: int
    prefill: int
    mixed: int


class Planner(Protocol):
    """What budgets are chosen by, of a scheduler."""

    num_steps: int

    @property
    def waiting(self) -> Sequence[Request]: ...

    @property
    def running(self) -> Sequence[Request]: ...


class Budgets(Protocol):
    """Who sets the budgets of steps."""

    @property
    def chosen(self) -> list[ChosenBudgets]:
        """The changes so far, the oldest first."""
        ...

    def begin_step(self, planner: Planner, is_busy: bool) -> TokenBudgets:
        """The budgets of the steps that are planned next.

        Args:
            is_busy: whether a step is in flight.
        """
        ...

    def end_step(self, batch: Batch, num_tokens: int) -> None:
        """The oldest step in flight was read."""
        ...


def limits_of(config: SchedulerConfig) -> TokenBudgets:
    """The largest budgets."""
    most = config.max_num_batched_tokens
    return TokenBudgets(most, min(most, config.max_num_mixed_tokens))


def token_budget(
    budgets: TokenBudgets, limits: TokenBudgets, running: Sequence[Request], max_more: int
) -> int:
    """How many new tokens a step may have beside these requests: its budget, or the first one of
    the ladder that has room for their tokens, their drafts and ``MIN_PROMPT_TOKENS``, up to the
    limit.

    Args:
        max_more: the most rows of a request beside its next token: its drafts, and what they make
            it compute again.
    """
    is_mixed = any(request.num_output_tokens for request in running)
    budget, limit = budgets[is_mixed], limits[is_mixed]
    least = len(running) * (1 + max_more) + MIN_PROMPT_TOKENS
    if budget < least:
        budget = max(SMALLEST_BUDGET, 1 << (least - 1).bit_length())
    return min(budget, limit)


def ladder(limit: int) -> list[int]:
    """The budgets up to ``limit``, ascending: ``[32, 64, 128, ..., limit]``."""
    budgets = [SMALLEST_BUDGET]
    while budgets[-1] < limit:
        budgets.append(2 * budgets[-1])
    return [*budgets[:-1], limit]


class RepeatedBudgets:
    """Budgets that are known before.

    Args:
        limits: until the first of ``chosen``.
        chosen: as :attr:`Engine.token_budgets` has them.
    """

    def __init__(self, limits: TokenBudgets, chosen: Iterable[ChosenBudgets] = ()):
        self.chosen = [ChosenBudgets(0, *limits), *sorted(chosen, key=attrgetter("step"))]
        self._index = 0

    def begin_step(self, planner: Planner, is_busy: bool) -> TokenBudgets:
        chosen, after = self.chosen, self._index + 1
        while after < len(chosen) and chosen[after].step <= planner.num_steps:
            after += 1
        self._index = after - 1
        return TokenBudgets(*chosen[self._index][1:])

    def end_step(self, batch: Batch, num_tokens: int) -> None:
        pass


class Pace:
    """A budget that goes up and down the ladder, so that steps take a given time.

    Args:
        seconds: that a step may take; 0 leaves the limit.
        limit: the largest budget.
        first: where nothing was measured yet.
    """

    def __init__(self, seconds: float, limit: int, first: int):
        self._seconds = seconds
        self._ladder = ladder(limit) if seconds else [limit]
        self._index = sum(budget <= first for budget in self._ladder[1:])
        self._is_tried = False

    @property
    def budget(self) -> int:
        return self._ladder[self._index]

    def note(self, num_tokens: int) -> None:
        """A step of ``num_tokens`` tokens was measured."""
        self._is_tried = self._is_tried or 2 * num_tokens > self.budget

    def choose(self, price: StepPrice, context: int) -> int:
        """The budget of the next step.

        It falls as far as it has to, and rises by one, after a step that filled more than half of
        it: prices are guesses beyond what was tried. A step may always take twice what it would
        take without new tokens, because where gathering the context alone takes longer than it may,
        smaller chunks would gather it more often.
        """
        if not price.is_known:
            return self.budget
        most = max(self._seconds, 2 * price.seconds(0, context))
        if price.seconds(self.budget, context) > FALL * most:
            while self._index and price.seconds(self.budget, context) > most:
                self._index -= 1
                self._is_tried = False
        elif self._is_tried and self._index + 1 < len(self._ladder):
            rises = price.seconds(self._ladder[self._index + 1], context) <= RISE * most
            self._index += rises
            self._is_tried = not rises
        return self.budget


class ClockedBudgets:
    """Budgets by which steps take a given time.

    What is measured is the time from the end of one read to the end of the next: a step that was
    launched before the one before was read runs right after that. One that was launched when no
    step was in flight is measured from the beginning of its launch.

    A step of decodes alone costs two readings of the clock, and its budgets are left as they are.

    Args:
        limits: the largest budgets.
        prefill_seconds: that a step may take where no answer runs; 0 leaves the limit.
        mixed_seconds: beside answers.
        clock: in seconds.
    """

    def __init__(
        self,
        limits: TokenBudgets,
        prefill_seconds: float,
        mixed_seconds: float,
        clock: Clock = time.perf_counter,
    ):
        self.price = StepPrice()
        self._prefill = Pace(prefill_seconds, limits.prefill, FIRST_PREFILL_BUDGET)
        self._mixed = Pace(mixed_seconds, limits.mixed, FIRST_MIXED_BUDGET)
        self._clock = clock
        self._budgets = TokenBudgets(self._prefill.budget, self._mixed.budget)
        self._chosen = deque([ChosenBudgets(0, *self._budgets)], MAX_CHANGES)
        self._had_prompt = False  # the step that was read last
        self._start = 0.0  # of the oldest step in flight
        self._away = 0.0  # for how long no call of the engine ran since then
        # The faster one of the last two steps of decodes, if it is newer than the price.
        self._decodes: Measured | None = None
        self._decode_seconds = math.inf  # of the last one

    @property
    def chosen(self) -> list[ChosenBudgets]:
        return list(self._chosen)

    def begin_step(self, planner: Planner, is_busy: bool) -> TokenBudgets:
        now = self._clock()
        self._away = now - self._start if is_busy else 0.0
        if not is_busy:
            self._start = now
        if planner.waiting or self._had_prompt:
            self._choose(planner)
        return self._budgets

    def end_step(self, batch: Batch, num_tokens: int) -> None:
        now = self._clock()
        seconds, away = now - self._start, self._away
        self._start, self._away = now, 0.0
        # Without drafts and prompts each request has a token.
        self._had_prompt = num_tokens > len(batch.scheduled)
        if away > max(AWAY_SECONDS, AWAY_SHARE * seconds):
            return
        if self._had_prompt:
            self._note_prompt(Measured(num_tokens, batch.num_gathered_tokens, seconds))
        else:
            faster = min(seconds, self._decode_seconds)
            self._decodes, self._decode_seconds = Measured(num_tokens, 0, faster), seconds

    def _note_prompt(self, step: Measured) -> None:
        """A step with a chunk of a prompt was measured."""
        self.price.note(step)
        if self._decodes is not None:
            # How much of a step is fixed shows best where it has few tokens.
            self.price.correct(self._decodes)
            self._decodes = None
        self._prefill.note(step.num_tokens)
        self._mixed.note(step.num_tokens)

    def _choose(self, planner: Planner) -> None:
        context = _next_context(planner.running)
        budgets = TokenBudgets(
            self._prefill.choose(self.price, context), self._mixed.choose(self.price, context)
        )
        if budgets != self._budgets:
            self._budgets = budgets
            self._chosen.append(ChosenBudgets(planner.num_steps, *budgets))
            LOG.debug("from step %d on: %s", planner.num_steps, budgets)


def _next_context(running: Sequence[Request]) -> int:
    """How many tokens stand before the first chunk of a prompt in the next step, as far as that is
    known before requests are admitted.
    """
    for request in running:
        if request.num_tokens - request.num_computed_tokens > 1:
            return request.num_computed_tokens
    return 0
