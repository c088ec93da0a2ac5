"""``StepPrice``: the expected duration of a step, learnt from measured steps. Pure Python."""

from __future__ import annotations

from typing import NamedTuple

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
ACCIDENT = 2.0


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
        if min(last, ratio) > ACCIDENT or max(last, ratio) * ACCIDENT < 1:
            self._scale(min(last, ratio) if ratio > 1 else max(last, ratio))
            self._last_ratio = 1.0
        elif ratio > ACCIDENT:
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

    def _scale(self, ratio: float) -> None:
        """Multiply all prices: the device has become slower or faster."""
        self._prices = [price * ratio for price in self._prices]
        self._covariance = [[each * ratio**2 for each in row] for row in self._covariance]

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
