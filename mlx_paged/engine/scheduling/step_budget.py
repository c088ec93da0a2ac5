"""Token budgets of steps, chosen by the duration of past steps. Pure Python, no arrays.

The scheduler gets numbers and reads no clock. They come from :class:`ClockedBudgets`, which
measures steps, or from :class:`Budgets`, which repeats those of another engine or, by default, has
the limits of the configuration.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from mlx_paged.engine.request import Completion
from mlx_paged.engine.scheduling.batch import Batch

# Budgets are powers of 2 from here on, up to the limit, so that the shapes of steps repeat.
SMALLEST_BUDGET = 32
# A step can always have this many tokens of prompts, in addition to one for each running request:
# with 16 running answers, 16 tokens of a prompt.
MIN_PROMPT_TOKENS = 15
# Before anything was measured.
FIRST_PREFILL_BUDGET = 128
FIRST_MIXED_BUDGET = 64
# A budget falls if its steps take more than this share of their time limit, and rises if those of
# the next larger budget would take less than that share.
FALL, RISE = 1.15, 0.85
# If the caller spent more than this share of the time, and these seconds, between two steps, the
# device may have been idle.
OUTSIDE_SHARE, OUTSIDE_SECONDS = 0.25, 0.01
# The number of changes that are kept, some 100 bytes each.
MAX_CHANGES = 2**14
# Before anything was measured, relative to the price of a new token: the price of a token of
# context, its standard deviation, and that of the fixed price around 0. For most models and
# machines the first is 1/1500 to 1/500, and the fixed price up to 100 if weights are read for few
# tokens.
CONTEXT_PRICE, CONTEXT_SPREAD, FIXED_SPREAD = 1e-3, 2e-3, 100.0
# By how much the times of equal steps differ, and by how much prices change from step to step.
NOISE, DRIFT = 0.15, 0.03
# A step that takes this many times its expected time is an outlier (a kernel was compiled, memory
# was paged out, a laptop slept), unless it is the second in a row: then the device has become
# slower (a laptop runs on its battery, another program computes). Two steps in a row that are as
# many times faster than expected show that it has become faster.
OUTLIER = 2.0

LOG = logging.getLogger("mlx_paged.engine")

Clock: TypeAlias = Callable[[], float]


class TokenBudgets(NamedTuple):
    """The most new tokens of a step, decodes included: for a user without running answers, and with
    answers or several users, who wait for it.
    """

    prefill: int
    mixed: int


class ChosenBudgets(NamedTuple):
    """Budgets from a step on, as counted by ``Scheduler.num_steps``."""

    step: int
    prefill: int
    mixed: int


def token_budget(
    budgets: TokenBudgets,
    limits: TokenBudgets,
    running: Sequence[Completion],
    max_more: int,
    is_shared: bool = False,
) -> int:
    """The token budget of a step while these requests run: the chosen one, or the first of the
    ladder that holds their tokens, their drafts and ``MIN_PROMPT_TOKENS``, up to the limit.

    Args:
        max_more: the most rows of a request in addition to its next token: its drafts, and tokens
            that are recomputed because of them.
        is_shared: whether several users have requests.
    """
    is_mixed = is_shared or any(completion.num_output_tokens for completion in running)
    budget, limit = budgets[is_mixed], limits[is_mixed]
    needed = len(running) * (1 + max_more) + MIN_PROMPT_TOKENS
    if budget < needed:
        budget = max(SMALLEST_BUDGET, 1 << (needed - 1).bit_length())
    return min(budget, limit)


def ladder(limit: int) -> list[int]:
    """The budgets up to ``limit``, ascending: ``[32, 64, 128, ..., limit]``."""
    budgets = [SMALLEST_BUDGET]
    while budgets[-1] < limit:
        budgets.append(2 * budgets[-1])
    return [*budgets[:-1], limit]


class Budgets:
    """The budgets of an engine's steps, given in advance.

    Args:
        limits: used before the first of ``chosen``.
        chosen: as in :attr:`Engine.token_budgets`.
    """

    def __init__(self, limits: TokenBudgets, chosen: Iterable[ChosenBudgets] = ()):
        self._chosen = [ChosenBudgets(0, *limits), *sorted(chosen, key=attrgetter("step"))]

    @property
    def chosen(self) -> list[ChosenBudgets]:
        """The changes so far, the oldest first."""
        return list(self._chosen)

    def begin_step(
        self, step: int, running: Sequence[Completion], has_waiting: bool, is_busy: bool
    ) -> TokenBudgets:
        """The budgets of the next steps.

        Args:
            step: the number of steps before them, as counted by ``Scheduler.num_steps``.
            running: the running requests.
            has_waiting: whether requests wait.
            is_busy: whether a step is in flight.
        """
        newest = bisect_right(self._chosen, step, key=attrgetter("step")) - 1
        return TokenBudgets(*self._chosen[newest][1:])

    def end_step(self, batch: Batch, num_tokens: int) -> None:
        """The oldest step in flight was read."""


class Measured(NamedTuple):
    """A step that was measured.

    Attributes:
        context: the number of tokens before its chunks of prompts, whose K/V it gathered.
    """

    num_tokens: int
    context: int
    seconds: float


class StepPrice:
    """The expected duration of a step, in seconds:

        new tokens * per_token + context * per_context + fixed

    The prices are the state of a Kalman filter: each step corrects them in proportion to their
    uncertainty and to its dependence on them. So while the context of a prompt grows in otherwise
    equal steps, additional time is attributed to the context, once the price of a token is known.
    """

    def __init__(self) -> None:
        self._prices = [0.0, 0.0, 0.0]
        self._covariance = [[0.0] * 3 for _ in range(3)]
        self._last_ratio = 1.0  # of the time that the last step took to the expected time

    @property
    def is_known(self) -> bool:
        """Whether a step was measured."""
        return any(self._prices)

    def seconds(self, num_tokens: int, context: int) -> float:
        """The expected duration of a step."""
        per_token, per_context, fixed = self._prices
        return num_tokens * per_token + context * per_context + fixed

    def note(self, step: Measured) -> bool:
        """Correct the prices by a step with chunks of prompts; returns whether it counts. An
        outlier does not. If the previous step was one, too, all prices change at once by as much as
        both of them show.
        """
        if not self.is_known:
            per_token = step.seconds / (step.num_tokens + CONTEXT_PRICE * step.context)
            self._prices = [per_token, CONTEXT_PRICE * per_token, 0.0]
            for index, spread in enumerate((1.0, CONTEXT_SPREAD, FIXED_SPREAD)):
                self._covariance[index][index] = (spread * per_token) ** 2
        last, ratio = self._last_ratio, step.seconds / self.seconds(step.num_tokens, step.context)
        self._last_ratio = ratio
        if min(last, ratio) > OUTLIER or max(last, ratio) * OUTLIER < 1:
            scale = min(last, ratio) if ratio > 1 else max(last, ratio)
            self._prices = [price * scale for price in self._prices]
            self._covariance = [[each * scale**2 for each in row] for row in self._covariance]
            self._last_ratio = 1.0
        elif ratio > OUTLIER:
            return False
        self._drift()
        self.correct(step)
        return True

    def correct(self, step: Measured) -> None:
        """Correct the prices by any step."""
        features = float(step.num_tokens), float(step.context), 1.0
        expected = self.seconds(step.num_tokens, step.context)
        spreads = [_dot(row, features) for row in self._covariance]
        # The variance grows with the time, so a step that is ten times slower than expected changes
        # prices little more than one that is three times slower.
        variance = _dot(spreads, features) + NOISE**2 * expected * step.seconds + 1e-18
        error = step.seconds - expected
        for index, spread in enumerate(spreads):
            self._prices[index] += spread * error / variance
            pairs = zip(self._covariance[index], spreads, strict=True)
            self._covariance[index] = [each - spread * other / variance for each, other in pairs]
        for index, row in enumerate(self._covariance):
            if (price := self._prices[index]) < 0 < row[index]:
                # As if it had been measured as 0: the other prices change with it.
                for other, covariance in enumerate(row):
                    self._prices[other] -= covariance * price / row[index]
        self._prices = [max(0.0, price) for price in self._prices]

    def _drift(self) -> None:
        per_token, per_context, fixed = self._prices
        scales = (
            per_token,
            max(per_context, CONTEXT_PRICE * per_token),
            max(fixed, 0.1 * FIXED_SPREAD * per_token),
        )
        for index, scale in enumerate(scales):
            self._covariance[index][index] += (DRIFT * scale) ** 2


def _dot(first: list[float], second: tuple[float, ...] | list[float]) -> float:
    return sum(map(float.__mul__, first, second))


class TimedBudget:
    """A budget that moves up and down the ladder, so that steps take a given time.

    Args:
        seconds: the time limit of a step; with 0, the budget is always ``limit``.
        limit: the largest budget.
        first: the budget before anything was measured.
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

        It falls as far as necessary, and rises by one level after a step that used more than half
        of it, since prices are guesses beyond what was tried. A step may always take twice the time
        that it would take without new tokens: if gathering the context alone exceeds the limit,
        smaller chunks would only gather it more often.
        """
        if not price.is_known:
            return self.budget
        limit = max(self._seconds, 2 * price.seconds(0, context))
        if price.seconds(self.budget, context) > FALL * limit:
            while self._index and price.seconds(self.budget, context) > limit:
                self._index -= 1
                self._is_tried = False
        elif self._is_tried and self._index + 1 < len(self._ladder):
            rises = price.seconds(self._ladder[self._index + 1], context) <= RISE * limit
            self._index += rises
            self._is_tried = not rises
        return self.budget


class ClockedBudgets(Budgets):
    """Budgets with which steps take a given time.

    The measured time is that from the end of one read to the end of the next, because a step that
    was launched ahead begins when the previous one ends. A step that was launched with no other in
    flight is measured from the beginning of its launch.

    A step of decodes only costs two readings of the clock, and changes no budget.

    Args:
        limits: the largest budgets.
        prefill_seconds: the time limit of a step without running answers; with 0, its budget is
            always the limit.
        mixed_seconds: the same for a step with running answers.
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
        self._prefill = TimedBudget(prefill_seconds, limits.prefill, FIRST_PREFILL_BUDGET)
        self._mixed = TimedBudget(mixed_seconds, limits.mixed, FIRST_MIXED_BUDGET)
        self._clock = clock
        self._budgets = TokenBudgets(self._prefill.budget, self._mixed.budget)
        super().__init__(self._budgets)
        self._had_prompt = False  # in the last step that was read
        self._start = 0.0  # of the oldest step in flight
        self._outside = 0.0  # how long the engine was not called since then
        # The faster of the last two steps of decodes, if it is newer than the price.
        self._decodes: Measured | None = None
        self._decode_seconds = math.inf  # of the last step of decodes

    def begin_step(
        self, step: int, running: Sequence[Completion], has_waiting: bool, is_busy: bool
    ) -> TokenBudgets:
        now = self._clock()
        self._outside = now - self._start if is_busy else 0.0
        if not is_busy:
            self._start = now
        if not has_waiting and not self._had_prompt:
            return self._budgets
        # The tokens before the first chunk of a prompt, as far as it is known before requests are
        # admitted.
        chunks = (each for each in running if each.num_tokens - each.num_computed_tokens > 1)
        first = next(chunks, None)
        context = 0 if first is None else first.num_computed_tokens
        budgets = TokenBudgets(
            self._prefill.choose(self.price, context), self._mixed.choose(self.price, context)
        )
        if budgets != self._budgets:
            self._budgets = budgets
            self._chosen = [*self._chosen[-MAX_CHANGES + 1 :], ChosenBudgets(step, *budgets)]
            LOG.debug("from step %d on: %s", step, budgets)
        return budgets

    def end_step(self, batch: Batch, num_tokens: int) -> None:
        now = self._clock()
        seconds, outside = now - self._start, self._outside
        self._start, self._outside = now, 0.0
        # Without drafts and prompts each request has a token.
        self._had_prompt = num_tokens > len(batch.scheduled)
        if outside > max(OUTSIDE_SECONDS, OUTSIDE_SHARE * seconds):
            return
        if not self._had_prompt:
            faster = min(seconds, self._decode_seconds)
            self._decodes, self._decode_seconds = Measured(num_tokens, 0, faster), seconds
            return
        if self.price.note(Measured(num_tokens, batch.num_gathered_tokens, seconds)) and (
            self._decodes is not None
        ):
            # The fixed price is best measured in a step with few tokens.
            self.price.correct(self._decodes)
        self._decodes = None
        self._prefill.note(num_tokens)
        self._mixed.note(num_tokens)
