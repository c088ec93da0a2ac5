"""Which requests of a step have drafts, and how many, and which drafts are kept. Pure Python.

The rule depends on sizes and counts only, so the same requests have the same schedule on all
machines of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_paged.core import KVCacheManager
from mlx_paged.engine.batch import Batch, Scheduled
from mlx_paged.engine.drafts import Drafter, PromptLookup
from mlx_paged.engine.prefix_cache import PrefixCache
from mlx_paged.engine.swap_space import OPERATIONS_PER_BYTE
from mlx_paged.request import Request

# A request of a recurrent model may have drafts if its step computes at most this many other
# tokens: the next one, and those whose state was discarded with a rejected draft.
MAX_RUN = 7

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


_PROMPT_LOOKUP = PromptLookup()


@dataclass(frozen=True)
class Speculation:
    """A drafter, and the rule for how many drafts a step verifies.

    Args:
        num_draft_tokens: the most drafts of a request in a step; 0 for no speculation.
    """

    drafter: Drafter = _PROMPT_LOOKUP
    num_draft_tokens: int = 0
    gate: DraftGate = ALWAYS

    @property
    def is_on(self) -> bool:
        return self.num_draft_tokens > 0

    @property
    def max_more(self) -> int:
        """The most rows of a request in a step with drafts, in addition to its next token."""
        return self.num_draft_tokens + (MAX_RUN - 1 if self.gate.repeats_runs else 0)

    def is_likely(self, running: Sequence[Request]) -> bool:
        """Whether running requests are likely to have drafts that pay off."""
        if not self.is_on:
            return False
        decoding = [request for request in running if request.num_output_tokens]
        return any(self.num_drafts(decoding, [1] * len(decoding), len(running), len(running)))

    def num_drafts(
        self,
        requests: Sequence[Request],
        run_lengths: Sequence[int],
        num_rows: int,
        num_tokens: int,
    ) -> Sequence[int]:
        """How many drafts each request should have.

        Args:
            run_lengths: rows of each request without drafts.
            num_rows: rows of the step without drafts.
            num_tokens: tokens that the step samples without drafts.
        """
        acceptances = list(map(self.drafter.acceptance, requests))
        if not any(acceptances):
            return [0] * len(requests)
        most = self.num_draft_tokens
        return self.gate.num_drafts(acceptances, run_lengths, num_rows, num_tokens, most)


NO_SPECULATION = Speculation()


def add_drafts(
    plan: Batch, speculation: Speculation, manager: KVCacheManager, max_model_len: int | None
) -> None:
    """Add drafts to the decodes of a step, within its remaining token budget."""
    decodes = [
        (index, part)
        for index, part in enumerate(plan.scheduled)
        if _may_have_drafts(part, manager)
    ]
    if not decodes:
        return
    num_rows = sum(part.num_new_tokens for part in plan.scheduled)
    num_tokens = sum(part.num_logit_rows - part.num_scored_rows for part in plan.scheduled)
    requests = [part.request for _, part in decodes]
    run_lengths = [part.num_new_tokens for _, part in decodes]
    counts = speculation.num_drafts(requests, run_lengths, num_rows, num_tokens)
    for (index, part), wanted in zip(decodes, counts, strict=True):
        request = part.request
        num_drafts = (
            min(wanted, _max_num_drafts(plan, request, manager, max_model_len)) if wanted else 0
        )
        if num_drafts > 0:
            drafts = speculation.drafter.propose(request, num_drafts)
            copies = manager.allocate_slots(request.seq_id, num_drafts)
            assert copies == [], "the slots are in blocks of its own or in empty ones"
            request.num_computed_tokens += num_drafts
            plan.token_budget -= num_drafts
            num_run = part.num_new_tokens + num_drafts
            plan.scheduled[index] = part._replace(
                num_new_tokens=num_run, num_logit_rows=1 + num_drafts, draft_token_ids=drafts
            )


def _may_have_drafts(part: Scheduled, manager: KVCacheManager) -> bool:
    """Whether a part of a step is a decode, which may recompute a few tokens of a recurrent model.

    A run of a recurrent model that completes a block has no drafts: the block is hashed, and its
    state may become a checkpoint, neither of which can be rolled back.
    """
    if not part.num_logit_rows or part.num_scored_rows or not part.request.num_output_tokens:
        return False
    if manager.states is None:
        return part.num_new_tokens == 1
    block_size, end = manager.pool.block_size, part.start + part.num_new_tokens
    return part.num_new_tokens <= MAX_RUN and end // block_size == part.start // block_size


def _max_num_drafts(
    plan: Batch, request: Request, manager: KVCacheManager, max_model_len: int | None
) -> int:
    """The most drafts of a request in this step: within the token budget, the length limits, and
    the slots that are free without an eviction or a preemption.
    """
    tables = manager.groups[request.seq_id]
    num_new_blocks = manager.pool.num_empty_blocks // len(tables)
    num_slots = min(table.num_unfilled_slots for table in tables)
    num_slots += num_new_blocks * manager.pool.block_size
    most = min(plan.token_budget, num_slots, manager.max_more(request.seq_id))
    limit = request.params.max_tokens
    if limit is not None and limit >= 0:
        most = min(most, limit - request.num_output_tokens - 1)
    if max_model_len is not None:
        most = min(most, max_model_len - request.num_tokens - 1)
    return most


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
        num_drafts, request = len(part.draft_token_ids), part.request
        request.num_computed_tokens = part.start
        if not self._is_recurrent:
            request.num_computed_tokens += part.num_new_tokens - num_drafts
        request.num_drafted_tokens += num_drafts
        self.num_drafted_tokens += num_drafts

    def accept(self, request: Request) -> None:
        """Accept the next draft, which equals the token that is appended next: keep its K/V."""
        if not self._is_recurrent:
            request.num_computed_tokens += 1
        request.num_accepted_tokens += 1
        self.num_accepted_tokens += 1

    def end(self, request: Request) -> None:
        """Free the slots of rejected drafts."""
        if request.is_finished:
            return
        # The newest token was just sampled, and has no K/V.
        num_tokens = self._manager.trim(request.seq_id, request.num_tokens - 1)
        if num_tokens > request.num_computed_tokens:
            request.num_computed_tokens = num_tokens
            self._prefix_cache.cache_blocks(request)
