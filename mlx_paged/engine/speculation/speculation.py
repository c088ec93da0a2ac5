"""``Speculation``: which requests of a step have drafts, how many, and which are accepted. Pure
Python.

Drafts don't change the output: a draft is accepted only if it equals the token that is sampled
anyway (speculative decoding, Leviathan et al. 2023, with the request's own draws instead of
rejection sampling). How many a step verifies depends on sizes and counts only, so the same requests
have the same schedule on all machines of a kind.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from mlx_paged.core import KVCacheManager
from mlx_paged.engine.request import PENDING_TOKEN, Completion
from mlx_paged.engine.scheduling.batch import Batch, Scheduled
from mlx_paged.engine.scheduling.prefix_cache import PrefixCache
from mlx_paged.engine.speculation.draft_record import DraftRecord, DraftRecords
from mlx_paged.request import NO_DRAFTS, SpecDecodingStats

if TYPE_CHECKING:  # The scheduler imports no arrays.
    from mlx_paged.engine.sampling.sampling_state import GrammarState, SamplingState

# Length of the n-grams that are looked up. With two, too many matches are random; the longer they
# are, the longer it takes to find a match again after a wrong draft.
NGRAM_SIZE = 3

# The deepest draft with an acceptance of its own in a look-up.
MAX_DEPTH = 7


class Drafter:
    """Proposes drafts for requests of which only the last token is not computed yet.

    A drafter has to implement ``acceptances`` and ``propose``. The default of ``drafts_of`` is for
    drafts that are known when they are proposed.

    Attributes:
        first_acceptance: the estimate of acceptances before any drafts.
    """

    first_acceptance = 0.5

    def acceptances(self, completion: Completion, record: DraftRecord) -> Sequence[float]:
        """By depth, the estimated probability that a draft is accepted if those before it are; the
        last one stands for all further ones. Empty if there is nothing to propose.
        """
        return record.acceptances

    def propose(self, completion: Completion, num_drafts: int) -> list[int]:
        """``[num_drafts]`` token ids that may follow the request's tokens; ``PENDING_TOKEN`` for
        drafts that are computed within the step.
        """
        raise NotImplementedError

    def drafts_of(self, part: Scheduled) -> Sequence[int]:
        """``[num_drafts]`` token ids: the drafts of a part of a step that was computed."""
        return part.draft_token_ids

    def note(self, completion: Completion, num_drafts: int, num_accepted: int) -> None:
        """Called with the result of each verification. Drafts after the end of an answer were not
        verified, and are not among ``num_drafts``.
        """
        if completion.draft_record is not None:
            completion.draft_record.settle(num_accepted, completion.num_tokens)


class PromptLookup(Drafter):
    """Drafts from the request's own tokens: those that followed the last occurrence of its last
    ``NGRAM_SIZE`` tokens (prompt look-up decoding, Saxena 2023; vLLM: ``ngram``).

    A look-up takes O(1) per token. So acceptances are also known for requests without drafts, by
    whether the look-up predicts each token of the answer: text that begins to repeat itself is
    noticed even if drafts did not pay off before. The depth of a draft is the number of tokens that
    the same occurrence has predicted before it: the longer the repetition, the likelier it goes on.
    """

    def acceptances(self, completion: Completion, record: DraftRecord) -> Sequence[float]:
        found = self._read(completion)
        if found.next is None:
            return ()
        return record.acceptances[min(found.num_right, len(record.acceptances) - 1) :]

    def propose(self, completion: Completion, num_drafts: int) -> list[int]:
        begin = self._read(completion).next
        if begin is None:
            return []
        token_ids = completion.token_ids
        drafts = token_ids[begin : begin + num_drafts]
        # A repetition with a shorter period than the drafts continues with the drafts themselves.
        period = len(token_ids) - begin
        while len(drafts) < num_drafts:
            drafts.append(drafts[-period])
        return drafts

    def _read(self, completion: Completion) -> _Occurrences:
        found = completion.draft_state
        if not isinstance(found, _Occurrences):
            found = completion.draft_state = _Occurrences()
        if found.num_read < len(completion.token_ids):
            found.read(completion)
        return found


class _Occurrences:
    """Earlier occurrences of a request's n-grams.

    Attributes:
        next: the position of the token after the last occurrence, if there is one.
        num_right: tokens that it has predicted, at most ``MAX_DEPTH``.
    """

    __slots__ = ("_after", "next", "num_read", "num_right")

    def __init__(self) -> None:
        self.num_read = self.num_right = 0
        self.next: int | None = None
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> position after it

    def read(self, completion: Completion) -> None:
        after, found, token_ids = self._after, self.next, completion.token_ids
        for position in range(self.num_read, len(token_ids)):
            if found is not None:
                is_right = token_ids[found] == token_ids[position]
                # Repetition within the prompt does not predict repetition in the answer.
                if completion.draft_record is not None and position >= completion.num_prompt_tokens:
                    completion.draft_record.observe(self.num_right, is_right)
                self.num_right = min(self.num_right + 1, MAX_DEPTH) if is_right else 0
                found = found + 1 if is_right else None
            end = position + 1
            if end >= NGRAM_SIZE:
                ngram = tuple(token_ids[end - NGRAM_SIZE : end])
                # While its predictions are correct, the longer match is kept.
                if found is None:
                    found = after.get(ngram)
                after[ngram] = end
        self.next, self.num_read = found, len(token_ids)


# A request of a recurrent model may have drafts if its step computes at most this many other
# tokens: the next one, and those whose state was discarded with a rejected draft.
MAX_RUN = 7

# The share by which a step takes longer if it is not launched before the previous one is read:
# vLLM-metal gains 10 to 50% from this on an M1 Ultra.
WAITING_SHARE = 0.3


@dataclass(frozen=True)
class StepCost:
    """The cost of a step by its number of rows, in any unit: linear between the given numbers of
    rows, and beyond the last one.

    Args:
        rows: at least two numbers of rows, in ascending order.
        costs: the cost of a step for each of them.
    """

    rows: tuple[float, ...]
    costs: tuple[float, ...]

    @classmethod
    def linear(cls, fixed: float, per_row: float) -> StepCost:
        """A fixed part and a part per row."""
        return cls((0, 1), (fixed, fixed + per_row))

    @classmethod
    def relative(cls, costs: Mapping[int, float], unit: float = 1.0) -> StepCost:
        """
        Args:
            costs: by numbers of rows from 2 on, relative to a step with one row.
            unit: the cost of a step with one row.
        """
        return cls((1, *costs), tuple(unit * cost for cost in (1.0, *costs.values())))

    def least_slope(self, num_rows: float) -> float:
        """What a row adds to the cost of a step with at least ``num_rows``."""
        first = min(bisect_right(self.rows, num_rows), len(self.rows) - 1)
        return min(self._slopes[first - 1 :])

    @cached_property
    def _slopes(self) -> Sequence[float]:
        steps = zip(pairwise(self.rows), pairwise(self.costs), strict=True)
        return [(after - cost) / (more - rows) for (rows, more), (cost, after) in steps]

    def of(self, num_rows: float) -> float:
        last = min(bisect_right(self.rows, num_rows), len(self.rows) - 1)
        return self.costs[last - 1] + self._slopes[last - 1] * (num_rows - self.rows[last - 1])


NO_COST = StepCost.linear(0, 0)
# The cost of a step does not depend on its rows, so all drafts are verified.
FREE_ROWS = StepCost.linear(1, 0)
PROMPT_LOOKUP = PromptLookup()


@dataclass(frozen=True)
class Speculation:
    """A drafter, and the rule for how many drafts each request of a step has.

    The most likely drafts of all requests are chosen, as many as maximise the expected tokens per
    cost, unless these are fewer than ``min_gain`` times those of a step without drafts.

    Args:
        num_draft_tokens: the most drafts of a request in a step; 0 for no speculation.
        step: cost of a step of the model.
        draft_pass: cost of a pass of the draft model; k drafts take k passes.
        waiting_share: how much longer a step with drafts takes because it has to be read before the
            next one is launched.
        min_gain: how many times the tokens per cost of a step without drafts they have to promise.
        repeats_runs: whether a rejected draft makes the next step compute the accepted rows again,
            as for a recurrent model.
        reads_grammars: whether tokens that a request's grammar forces are drafts, and those that it
            forbids are not. Ranks that follow another one don't know the grammars.
        records: of earlier turns of conversations.
    """

    drafter: Drafter = PROMPT_LOOKUP
    num_draft_tokens: int = 0
    step: StepCost = FREE_ROWS
    draft_pass: StepCost = NO_COST
    waiting_share: float = 0.0
    min_gain: float = 1.0
    repeats_runs: bool = False
    reads_grammars: bool = True
    records: DraftRecords = field(default_factory=DraftRecords, compare=False)

    @property
    def is_on(self) -> bool:
        return self.num_draft_tokens > 0

    @property
    def max_more(self) -> int:
        """The most rows of a request in a step with drafts, in addition to its next token."""
        return self.num_draft_tokens + (MAX_RUN - 1 if self.repeats_runs else 0)

    def is_likely(self, running: Sequence[Completion]) -> bool:
        """Whether running requests are likely to have drafts that pay off."""
        if not self.is_on:
            return False
        decoding = [completion for completion in running if completion.num_output_tokens]
        return any(self.num_drafts(decoding, [1] * len(decoding), len(running), len(running)))

    def propose(self, completion: Completion, num_drafts: int) -> Sequence[int]:
        """At most ``num_drafts`` drafts: what the request's grammar forces, or what the drafter
        proposes up to the first token that the grammar forbids. A drafter that makes its drafts in
        the step keeps to the grammar there.
        """
        if forced := self._forced_tokens(completion):
            return forced[:num_drafts]
        drafts, grammar = self.drafter.propose(completion, num_drafts), self._grammar(completion)
        if grammar is None or PENDING_TOKEN in drafts:
            return drafts
        return drafts[: grammar.num_allowed(completion, drafts)]

    def _grammar(self, completion: Completion) -> GrammarState | None:
        state = cast("SamplingState | None", completion.sampling_state)
        return state.grammar if self.reads_grammars and state is not None else None

    def _forced_tokens(self, completion: Completion) -> Sequence[int]:
        """The next tokens as far as the request's grammar leaves no choice."""
        grammar = self._grammar(completion)
        return () if grammar is None else grammar.forced_tokens(completion)

    def num_drafts(
        self,
        completions: Sequence[Completion],
        run_lengths: Sequence[int],
        num_rows: int,
        num_tokens: int,
    ) -> Sequence[int]:
        """How many drafts each request should have, 0 to ``num_draft_tokens``.

        Args:
            run_lengths: rows of each request without drafts.
            num_rows: rows of the step without drafts.
            num_tokens: tokens that the step samples without drafts.
        """
        counts = [0] * len(completions)
        plain_cost = self.step.of(num_rows)
        # A draft that is less likely costs more than it gains, whatever else is in the step.
        threshold = self.step.least_slope(num_rows) * num_tokens / plain_cost
        drafts = sorted(self._likely_drafts(completions, run_lengths, threshold))
        if -sum(unlikely for unlikely, *_ in drafts) <= (
            threshold * len(drafts) + (self.waiting_share + self.min_gain - 1) * num_tokens
        ):
            return counts  # Together they gain less than the waiting costs.
        best, best_rate, best_cost = 0, self.min_gain * num_tokens / plain_cost, plain_cost
        gained = num_repeated = 0.0
        other_cost, pass_rows = self.waiting_share * plain_cost, [0] * self.num_draft_tokens
        for number, (unlikely, _, depth, repeated) in enumerate(drafts, 1):
            gained -= unlikely
            num_repeated += repeated
            if pass_rows[depth]:
                other_cost -= self.draft_pass.of(pass_rows[depth])
            pass_rows[depth] += 1
            other_cost += self.draft_pass.of(pass_rows[depth])
            cost = self.step.of(num_rows + number + num_repeated) + other_cost
            if (num_tokens + gained) / cost > best_rate:
                best, best_rate, best_cost = number, (num_tokens + gained) / cost, cost
        price = (best_cost / plain_cost - 1) * num_tokens / max(best, 1)
        for _, index, _, _ in drafts[:best]:
            counts[index] += 1
            self._record_of(completions[index]).price = price * counts[index]
        return counts

    def _likely_drafts(
        self, completions: Sequence[Completion], run_lengths: Sequence[int], threshold: float
    ) -> Iterator[tuple[float, int, int, float]]:
        """The drafts that are accepted with a probability above ``threshold``: the probability,
        negative, which request, the depth, and how many rows are expected to be computed again
        because this draft is the first one that is rejected.
        """
        for index, completion in enumerate(completions):
            acceptances, most = self._outlook(completion)
            likely = 1.0
            for depth in range(most):
                before = likely
                likely *= acceptances[min(depth, len(acceptances) - 1)]
                if likely <= threshold:
                    break
                repeated = (before - likely) * (run_lengths[index] + depth)
                yield -likely, index, depth, repeated if self.repeats_runs else 0.0

    def _outlook(self, completion: Completion) -> tuple[Sequence[float], int]:
        """The acceptances of a request's drafts by depth, and the most that it may have."""
        record, most = self._record_of(completion), self.num_draft_tokens
        if forced := self._forced_tokens(completion):
            return (1.0,), min(len(forced), most)
        if record.is_parked(completion.num_tokens):
            return (), 0
        acceptances = self.drafter.acceptances(completion, record)
        return acceptances, most if acceptances else 0

    def end(self, completion: Completion, block_size: int) -> None:
        """Keep the record of a finished request for the next turn of its conversation."""
        if completion.draft_record is not None:
            num_prompt_blocks = completion.num_prompt_tokens // block_size
            self.records.keep(
                completion.draft_record,
                completion.block_hashes,
                num_prompt_blocks,
                completion.num_tokens,
            )

    def _record_of(self, completion: Completion) -> DraftRecord:
        record = completion.draft_record
        if record is None:
            num_tokens = completion.num_tokens
            record = self.records.find(completion.block_hashes, num_tokens)
            record = record or DraftRecord(self.drafter.first_acceptance, num_tokens)
            completion.draft_record = record
        return record


NO_SPECULATION = Speculation()


def add_drafts(
    plan: Batch, speculation: Speculation, manager: KVCacheManager, max_model_len: int | None
) -> None:
    """Add drafts to the decodes of a step, within its remaining token budget."""
    if not speculation.is_on or plan.is_ahead or plan.only is not None:
        return
    decodes = [
        (index, part)
        for index, part in enumerate(plan.scheduled)
        if _may_have_drafts(part, manager.states is not None)
    ]
    if not decodes:
        return
    num_rows = sum(part.num_new_tokens for part in plan.scheduled)
    num_tokens = sum(part.num_logit_rows - part.num_scored_rows for part in plan.scheduled)
    completions = [part.completion for _, part in decodes]
    run_lengths = [part.num_new_tokens for _, part in decodes]
    counts = speculation.num_drafts(completions, run_lengths, num_rows, num_tokens)
    for (index, part), num_drafts in zip(decodes, counts, strict=True):
        completion = part.completion
        if num_drafts:
            num_drafts = min(num_drafts, _max_num_drafts(plan, completion, manager, max_model_len))
        if num_drafts <= 0:
            continue
        drafts = speculation.propose(completion, num_drafts)
        num_drafts = len(drafts)
        if not drafts:
            continue
        copies = manager.allocate_slots(completion.seq_id, num_drafts)
        assert copies == [], "the slots are in blocks of its own or in empty ones"
        completion.num_computed_tokens += num_drafts
        plan.token_budget -= num_drafts
        plan.scheduled[index] = part._replace(
            num_new_tokens=part.num_new_tokens + num_drafts,
            num_logit_rows=1 + num_drafts,
            draft_token_ids=drafts,
        )


def _may_have_drafts(part: Scheduled, is_recurrent: bool) -> bool:
    """Whether a part of a step is a decode, which may recompute a few tokens of a recurrent
    model.
    """
    if not part.num_logit_rows or part.num_scored_rows or not part.completion.num_output_tokens:
        return False
    return part.num_new_tokens <= (MAX_RUN if is_recurrent else 1)


def _max_num_drafts(
    plan: Batch, completion: Completion, manager: KVCacheManager, max_model_len: int | None
) -> int:
    """The most drafts of a request in this step: within the token budget, the length limits, and
    the slots that are free without an eviction or a preemption.
    """
    tables = manager.groups[completion.seq_id]
    num_new_blocks = manager.pool.num_empty_blocks // len(tables)
    num_slots = min(table.num_unfilled_slots for table in tables)
    num_slots += num_new_blocks * manager.pool.block_size
    limit = min(plan.token_budget, num_slots, manager.max_more(completion.seq_id))
    max_tokens = completion.request.params.max_tokens
    if max_tokens is not None and max_tokens >= 0:
        limit = min(limit, max_tokens - completion.num_output_tokens - 1)
    if max_model_len is not None:
        limit = min(limit, max_model_len - completion.num_tokens - 1)
    return limit


class Verification:
    """Keeps the K/V of accepted drafts, and frees the slots of rejected ones.

    A step with drafts is verified request by request: :meth:`begin`, then :meth:`accept` before
    each appended token that was drafted, then :meth:`count` and :meth:`end`.

    The states of recurrent layers after a step include all of its drafts. So if one is rejected,
    the request falls back to a state before them: that of the last block which ended before them in
    this step, or that before the step. Its next step computes the tokens from there on again,
    together with new drafts; and blocks that end with drafts are not hashed before the
    verification.

    Args:
        manager: of the block tables.
        prefix_cache: of the same manager.

    Attributes:
        spec_decoding: verified and accepted drafts of all requests.
    """

    def __init__(self, manager: KVCacheManager, prefix_cache: PrefixCache) -> None:
        self._manager = manager
        self._prefix_cache = prefix_cache
        self._is_recurrent = manager.states is not None
        self.spec_decoding = NO_DRAFTS

    def begin(self, part: Scheduled) -> None:
        """Begin to verify a request's drafts, none of which is accepted yet."""
        completion = part.completion
        completion.num_computed_tokens = part.start
        if not self._is_recurrent:
            completion.num_computed_tokens += part.num_new_tokens - len(part.draft_token_ids)

    def accept(self, completion: Completion) -> None:
        """Accept the next draft, which equals the token that is appended next: keep its K/V."""
        if not self._is_recurrent:
            completion.num_computed_tokens += 1

    def count(self, completion: Completion, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a request that were verified, and those that were accepted."""
        counted = SpecDecodingStats.of_step(num_drafts, num_accepted)
        completion.output.spec_decoding += counted
        self.spec_decoding += counted

    def end(self, completion: Completion) -> None:
        """Free the slots of rejected drafts."""
        if completion.is_finished:
            return
        # The newest token was just sampled, and has no K/V.
        num_tokens = self._manager.trim(completion.seq_id, completion.num_tokens - 1)
        if num_tokens > completion.num_computed_tokens:
            completion.num_computed_tokens = num_tokens
            self._prefix_cache.cache_blocks(completion)
