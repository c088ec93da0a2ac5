"""``Speculation``: which requests of a step have drafts, how many, and which are accepted. Pure
Python.

Drafts don't change the output: a draft is accepted only if it equals the token that is sampled
anyway (speculative decoding, Leviathan et al. 2023, with the request's own draws instead of
rejection sampling). How many a step verifies depends on sizes and counts only, so the same requests
have the same schedule on all machines of a kind.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mlx_paged.core import KVCacheManager
from mlx_paged.engine.request import PENDING_TOKEN, Completion
from mlx_paged.engine.scheduling.batch import Batch, Scheduled
from mlx_paged.engine.scheduling.prefix_cache import PrefixCache
from mlx_paged.request import NO_DRAFTS, SpecDecodingStats

if TYPE_CHECKING:  # The scheduler imports no arrays.
    from mlx_paged.engine.sampling.sampling_state import GrammarState, SamplingState

# Length of the n-grams that are looked up. With two, too many matches are random; the longer they
# are, the longer it takes to find a match again after a wrong draft.
NGRAM_SIZE = 3

# The initial estimate of the acceptance rate, and the weight of each new observation.
FIRST_ACCEPTANCE = 0.5
ACCEPTANCE_RATE = 1 / 8


class Drafter:
    """Proposes drafts for requests of which only the last token is not computed yet.

    A drafter has to implement ``acceptance`` and ``propose``. The default of ``drafts_of`` is for
    drafts that are known when they are proposed.
    """

    def acceptance(self, completion: Completion) -> float:
        """The estimated probability that the first draft is accepted; 0 if it has none to propose.
        The probability that the first k drafts are accepted is taken to be its k-th power.
        """
        raise NotImplementedError

    def propose(self, completion: Completion, num_drafts: int) -> list[int]:
        """``[num_drafts]`` token ids that may follow the request's tokens; ``PENDING_TOKEN`` for
        drafts that are computed within the step.
        """
        raise NotImplementedError

    def drafts_of(self, part: Scheduled) -> Sequence[int]:
        """``[num_drafts]`` token ids: the drafts of a part of a step that was computed."""
        return part.draft_token_ids

    def note(self, completion: Completion, num_drafts: int, num_accepted: int) -> None:
        """Called with the result of each verification, which may update the acceptance. Drafts
        after the end of an answer were not verified, and are not among ``num_drafts``.
        """


class PromptLookup(Drafter):
    """Drafts from the request's own tokens: those that followed the last occurrence of its last
    ``NGRAM_SIZE`` tokens (prompt look-up decoding, Saxena 2023; vLLM: ``ngram``).

    A look-up takes O(1) per token. So the acceptance is also known for requests without drafts, by
    whether the look-up predicts each token of the answer: text that begins to repeat itself is
    noticed even if drafts did not pay off before.
    """

    def acceptance(self, completion: Completion) -> float:
        found = self._read(completion)
        return found.acceptance if found.next is not None else 0.0

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
            found.read(completion.token_ids, completion.num_prompt_tokens)
        return found


class _Occurrences:
    """Earlier occurrences of a request's n-grams.

    Attributes:
        next: the position of the token after the last occurrence, if there is one.
        acceptance: the share of correct predictions for tokens of the answer, as an exponential
            moving average.
    """

    __slots__ = ("_after", "acceptance", "next", "num_read")

    def __init__(self) -> None:
        self.num_read = 0
        self.next: int | None = None
        self.acceptance = FIRST_ACCEPTANCE
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> position after it

    def read(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        after, found = self._after, self.next
        for position in range(self.num_read, len(token_ids)):
            if found is not None:
                is_correct = token_ids[found] == token_ids[position]
                # Repetition within the prompt does not predict repetition in the answer.
                if position >= num_prompt_tokens:
                    self.acceptance += (is_correct - self.acceptance) * ACCEPTANCE_RATE
                found = found + 1 if is_correct else None
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

# The least expected gain, since the expectation is an estimate.
MIN_GAIN = 1.3


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

    def of(self, num_rows: float) -> float:
        last = min(bisect_right(self.rows, num_rows), len(self.rows) - 1)
        rows, cost = self.rows[last - 1], self.costs[last - 1]
        slope = (self.costs[last] - cost) / (self.rows[last] - rows)
        return cost + slope * (num_rows - rows)


NO_COST = StepCost.linear(0, 0)
# The cost of a step does not depend on its rows, so all drafts are verified.
FREE_ROWS = StepCost.linear(1, 0)
PROMPT_LOOKUP = PromptLookup()


@dataclass(frozen=True)
class Speculation:
    """A drafter, and the rule for how many drafts each request of a step has.

    The k-th draft of a request is accepted with probability ``acceptance ** k``. The most likely
    drafts of all requests are chosen, as many as maximise the expected tokens per cost, which have
    to be ``MIN_GAIN`` times those of a step without drafts.

    Args:
        num_draft_tokens: the most drafts of a request in a step; 0 for no speculation.
        step: cost of a step of the model.
        draft_pass: cost of a pass of the draft model; k drafts take k passes.
        waiting_share: how much longer a step with drafts takes because it has to be read before the
            next one is launched.
        repeats_runs: whether a rejected draft makes the next step compute the accepted rows again,
            as for a recurrent model.
        reads_grammars: whether tokens that a request's grammar forces are drafts, and those that it
            forbids are not. Ranks that follow another one don't know the grammars.
    """

    drafter: Drafter = PROMPT_LOOKUP
    num_draft_tokens: int = 0
    step: StepCost = FREE_ROWS
    draft_pass: StepCost = NO_COST
    waiting_share: float = 0.0
    repeats_runs: bool = False
    reads_grammars: bool = True

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

    def _outlook(self, completion: Completion) -> tuple[float, int]:
        """The acceptance of a request's drafts, and the most that it may have."""
        if forced := self._forced_tokens(completion):
            return 1.0, min(len(forced), self.num_draft_tokens)
        return self.drafter.acceptance(completion), self.num_draft_tokens

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
        # Of each possible draft: the probability that it is accepted, and how many rows are
        # computed again because it is the first one that is not.
        drafts: list[tuple[float, int, int, float]] = []
        for index, (completion, run_length) in enumerate(
            zip(completions, run_lengths, strict=True)
        ):
            before, (acceptance, most) = 1.0, self._outlook(completion)
            for depth in range(most if acceptance else 0):
                likely = before * acceptance
                drafts.append((-likely, index, depth, (before - likely) * (run_length + depth)))
                before = likely
        drafts.sort()
        plain_cost = self.step.of(num_rows)
        best, best_rate = 0, MIN_GAIN * num_tokens / plain_cost
        gained = num_repeated = 0.0
        pass_cost, pass_rows = self.waiting_share * plain_cost, [0] * self.num_draft_tokens
        for number, (unlikely, _, depth, repeated) in enumerate(drafts, 1):
            gained -= unlikely
            num_repeated += repeated if self.repeats_runs else 0.0
            if pass_rows[depth]:
                pass_cost -= self.draft_pass.of(pass_rows[depth])
            pass_rows[depth] += 1
            pass_cost += self.draft_pass.of(pass_rows[depth])
            cost = self.step.of(num_rows + number + num_repeated) + pass_cost
            if (num_tokens + gained) / cost > best_rate:
                best, best_rate = number, (num_tokens + gained) / cost
        for _, index, _, _ in drafts[:best]:
            counts[index] += 1
        return counts


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
