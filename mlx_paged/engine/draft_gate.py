"""How many drafts a step verifies: a rule over sizes and counts, with no clock in it, so that the
same requests make the same plan on every machine of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_paged.engine.swap_space import OPERATIONS_PER_BYTE

# What building and running the operations of a layer costs on a CPU, once per step and once per
# row, in weights that it multiplies meanwhile. Measured on 2 cores of x86 with the BLAS of MLX's
# wheel, which multiplies a weight once for each row: the benchmark `speculation` has the fit.
CPU_WEIGHTS_PER_LAYER = 3e6
CPU_WEIGHTS_PER_LAYER_AND_ROW = 0.9e6

# The share by which a step takes longer if it is not launched ahead of the tokens before it:
# vLLM-metal gains 10 to 50% by doing so on an M1 Ultra.
WAITING_SHARE = 0.3

# Drafts have to promise this much more, as the promise is an estimate.
MIN_GAIN = 1.3


@dataclass(frozen=True)
class StepCost:
    """What a step costs: a fixed part, and one per row; any unit."""

    fixed: float
    per_row: float

    def of(self, num_rows: float) -> float:
        return self.fixed + self.per_row * num_rows

    @classmethod
    def on_gpu(cls, num_parameters: int, nbytes: int) -> StepCost:
        """Weights are read once per step and multiplied once per row. An estimate: not measured on
        a Mac.
        """
        return cls(nbytes * OPERATIONS_PER_BYTE / 2, num_parameters)

    @classmethod
    def on_cpu(cls, num_parameters: int, num_layers: int) -> StepCost:
        """Weights are multiplied once per row, beside what operations cost whatever their size."""
        return cls(
            CPU_WEIGHTS_PER_LAYER * num_layers,
            num_parameters + CPU_WEIGHTS_PER_LAYER_AND_ROW * num_layers,
        )


NO_COST = StepCost(0, 0)


@dataclass(frozen=True)
class DraftGate:
    """Decides how many drafts each request of a step may try.

    The k-th draft of a request is accepted with probability ``acceptance ** k``. It is worth its
    row if that is more than what the row adds to the cost of the step, relative to the tokens that
    the step gives. The number of drafts is that with the most tokens per cost; it has to promise
    ``MIN_GAIN`` times what the step gives without drafts.

    Args:
        step: the cost of a step of the model.
        draft_pass: the cost of a pass of the draft model, of which k drafts take k.
        waiting_share: by how much a step with drafts takes longer because it has to be read before
            the next one is launched.
        repeats_runs: whether the rows of a request are computed again in its next step, up to the
            draft that was not accepted: those of a recurrent model.
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
            run_lengths: their rows in the step without drafts.
            num_rows: of the step without drafts.
            num_tokens: that the step gives without drafts.
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
"""Steps cost the same, whatever their rows: all drafts are tried."""


def _num_powers_above(base: float, least: float, most: int) -> int:
    """How many of ``base ** 1, base ** 2, ...`` are above ``least``, at most ``most``."""
    power, count = base, 0
    while count < most and power > least:
        power *= base
        count += 1
    return count


def _expected_accepted(acceptance: float, num_drafts: int) -> float:
    """How many drafts are accepted on average, all before the first that is not."""
    return sum(acceptance**k for k in range(1, num_drafts + 1))


def _expected_repeated(acceptance: float, run_length: int, num_drafts: int) -> float:
    """How many rows are computed again on average: those before the first draft that is not
    accepted, if there is one.
    """
    return sum(acceptance**k * (1 - acceptance) * (run_length + k) for k in range(num_drafts))
