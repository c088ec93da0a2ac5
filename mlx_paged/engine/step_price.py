"""``StepPrice``: what a step takes, learnt from the steps that were measured. Pure Python."""

from __future__ import annotations

from typing import NamedTuple

# Each step counts this much of the next one.
DECAY = 0.8
# One step that takes so many times what was expected is taken for an accident (a kernel that was
# compiled, memory that was paged out, a laptop that slept); two in a row are not.
ACCIDENT = 2.0
# Of the coordinate descent, for each step.
SWEEPS = 4
PENALTY = 1.02


class Measured(NamedTuple):
    """A step that was measured.

    Attributes:
        context: the tokens before its chunks of prompts, whose K/V it gathered.
    """

    num_tokens: int
    context: int
    seconds: float


class StepPrice:
    """What a step takes, in seconds, fitted to the steps so far:

        fixed + new tokens * per_token + context * per_context

    The prices are those with the least weighted squares of errors, where each step counts ``DECAY``
    of the next one, and none is negative. They are found by coordinate descent from the last ones,
    with a small penalty on all but the price of a token: where steps were alike, what they take is
    put on their tokens.
    """

    def __init__(self) -> None:
        self._prices = [0.0, 0.0, 0.0]  # per token, per token of context, fixed
        self._products = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3
        self._was_slow = False

    @property
    def is_known(self) -> bool:
        """Whether a step was measured."""
        return any(self._prices)

    def seconds(self, num_tokens: int, context: int) -> float:
        """What a step is expected to take."""
        per_token, per_context, fixed = self._prices
        return fixed + num_tokens * per_token + context * per_context

    def note(self, step: Measured, decodes: Measured | None = None) -> None:
        """Fit the prices to one step more. One that took much more than expected does not count,
        unless the one before did so, too.

        Args:
            decodes: the newest step without prompts, which shows best how much of a step is fixed.
        """
        expected = self.seconds(step.num_tokens, step.context)
        was_slow, self._was_slow = self._was_slow, 0 < ACCIDENT * expected < step.seconds
        if self._was_slow and not was_slow:
            return
        # With this weight, a step that is ten times as slow as others moves the prices little more
        # than one that is three times as slow.
        weight = 1 / max(step.seconds, 1e-6)
        for row in self._products:
            row[:] = [DECAY * product for product in row]
        self._sums = [DECAY * total for total in self._sums]
        for measured in (step,) if decodes is None else (step, decodes):
            features = float(measured.num_tokens), float(measured.context), 1.0
            for index, feature in enumerate(features):
                for other, other_feature in enumerate(features):
                    self._products[index][other] += weight * feature * other_feature
                self._sums[index] += weight * feature * measured.seconds
        self._descend()

    def _descend(self) -> None:
        prices = self._prices
        for _ in range(SWEEPS):
            for index, row in enumerate(self._products):
                if own := row[index]:
                    others = sum(map(float.__mul__, row, prices)) - own * prices[index]
                    own *= 1.0 if index == 0 else PENALTY
                    prices[index] = max(0.0, (self._sums[index] - others) / own)
