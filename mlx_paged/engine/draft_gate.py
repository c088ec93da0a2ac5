"""``DraftGate``: how many drafts a step verifies. The rule depends on sizes and counts only, so the
same requests have the same schedule on all machines of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_paged.engine.swap_space import OPERATIONS_PER_BYTE

# Overhead of a layer's operations on a CPU, per step and per row, in weights that are multiplied in
# the same time. Measured on 2 x86 cores with the BLAS of MLX's wheel, which multiplies a weight
# once for each row: the benchmark `speculation` has the fit.
CPU_WEIGHTS_PER_LAYER = 3e6
CPU_WEIGHTS_PER_LAYER_AND_ROW = 0.9e6

# The share by which a step takes longer if it is not launched before the previous one is read:
# vLLM-metal gains 10 to 50% from this on an M1 Ultra.
WAITING_SHARE = 0.3

# The least expected gain, since the expectation is an estimate.
MIN_GAIN = 1.3


@dataclass(frozen=True)
class StepCost:
    """The cost of a step: a fixed part and a part per row, in any unit."""

    fixed: float
    per_row: float

    def of(self, num_rows: float) -> float:
        return self.fixed + self.per_row * num_rows

    @classmethod
    def on_gpu(cls, num_parameters: int, nbytes: int) -> StepCost:
        """Weights are read once per step and multiplied once per row. This is an estimate, not
        measured on a Mac.
        """
        return cls(nbytes * OPERATIONS_PER_BYTE / 2, num_parameters)

    @classmethod
    def on_cpu(cls, num_parameters: int, num_layers: int) -> StepCost:
        """Weights are multiplied once per row, in addition to the overhead of the operations."""
        return cls(
            CPU_WEIGHTS_PER_LAYER * num_layers,
            num_parameters + CPU_WEIGHTS_PER_LAYER_AND_ROW * num_layers,
        )


NO_COST = StepCost(0, 0)


@dataclass(frozen=True)
class DraftGate:
    """Decides how many drafts each request of a step has.

    The k-th draft of a request is accepted with probability ``acceptance ** k``. It is worth its
    row if that exceeds the relative increase of the step's cost. The number of drafts maximises the
    expected tokens per cost, which have to be ``MIN_GAIN`` times those of a step without drafts.

    Args:
        step: cost of a step of the model.
        draft_pass: cost of a pass of the draft model; k drafts take k passes.
        waiting_share: how much longer a step with drafts takes because it has to be read before the
            next one is launched.
        repeats_runs: whether a rejected draft makes the next step compute the accepted rows again,
            as for a recurrent model.
    """

    step: StepCost
    draft_pass: StepCost = NO_COST
    waiting_share: float = 0.0
    repeats_runs: bool = False

    def num_drafts(
        self,
        acceptances: Sequence[float],
        run_lengths: Sequence[int],
        num_rows: int,
        num_tokens: int,
        most: int,
    ) -> list[int]:
        """The number of drafts of each candidate, 0 to ``most``.

        Args:
            acceptances: of the candidates.
            run_lengths: rows of each candidate without drafts.
            num_rows: rows of the step without drafts.
            num_tokens: tokens that the step samples without drafts.
        """
        plain_cost = self.step.of(num_rows)
        least_worth = self.step.per_row * num_tokens / plain_cost
        worth = [_num_powers_above(each, least_worth, most) for each in acceptances]
        best, best_rate = 0, MIN_GAIN * num_tokens / plain_cost
        for longest in range(1, max(worth, default=0) + 1):
            counts = [min(each, longest) for each in worth]
            gained = sum(map(_expected_accepted, acceptances, counts))
            cost = self.step.of(num_rows + sum(counts)) + self.waiting_share * plain_cost
            cost += longest * self.draft_pass.of(sum(count > 0 for count in counts))
            if self.repeats_runs:
                runs = zip(acceptances, run_lengths, counts, strict=True)
                cost += self.step.per_row * sum(_expected_repeated(*run) for run in runs)
            rate = (num_tokens + gained) / cost
            if rate > best_rate:
                best, best_rate = longest, rate
        return [min(each, best) for each in worth]


ALWAYS = DraftGate(StepCost(1, 0))
"""The cost of a step does not depend on its rows, so all drafts are verified."""


def _num_powers_above(base: float, least: float, most: int) -> int:
    """How many of ``base ** 1, base ** 2, ...`` are above ``least``, at most ``most``."""
    power, count = base, 0
    while count < most and power > least:
        power *= base
        count += 1
    return count


def _expected_accepted(acceptance: float, num_drafts: int) -> float:
    """The expected number of accepted drafts."""
    return sum(acceptance**k for k in range(1, num_drafts + 1))


def _expected_repeated(acceptance: float, run_length: int, num_drafts: int) -> float:
    """The expected number of rows that are computed again: those before a rejected draft."""
    return sum(acceptance**k * (1 - acceptance) * (run_length + k) for k in range(num_drafts))
