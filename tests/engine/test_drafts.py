"""Who proposes drafts, and how many a step tries: the look-up and the rule."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from helpers.completions import new_completion

from mlx_paged.engine.request import Completion
from mlx_paged.engine.speculation.draft_record import DraftRecord
from mlx_paged.engine.speculation.speculation import (
    Drafter,
    PromptLookup,
    Speculation,
    StepCost,
)
from mlx_paged.options.sampling_params import SamplingParams

LETTERS = "abcdefghijklmnopqrstuvwxyz_"


def request_of(prompt: str, answer: str = "") -> Completion:
    completion = new_completion("r", list(map(LETTERS.index, prompt)), SamplingParams())
    completion.token_ids += map(LETTERS.index, answer)
    return completion


def proposed(completion: Completion, num_drafts: int = 7) -> str:
    return "".join(LETTERS[token] for token in PromptLookup().propose(completion, num_drafts))


def test_what_followed_the_last_three_tokens_is_proposed():
    assert proposed(request_of("hello_world_hel"), 5) == "lo_wo"
    assert proposed(request_of("hello_world_he")) == "", "two tokens are too few"


def test_of_several_places_the_last_one_counts():
    assert proposed(request_of("abcx_abcy_abc"), 2) == "y_"


def test_a_match_that_was_right_goes_on_where_it_began():
    # "_abc" came in the first word only; a later "abc" was followed by y.
    completion = request_of("p_abcx_q_rabcy_")
    lookup = PromptLookup()
    completion.token_ids += map(LETTERS.index, "p_a")
    assert lookup.propose(completion, 2) == [LETTERS.index("b"), LETTERS.index("c")]
    completion.token_ids += map(LETTERS.index, "bc")
    assert lookup.propose(completion, 1) == [LETTERS.index("x")]


def test_a_period_shorter_than_the_drafts_goes_on():
    assert proposed(request_of("ababab")) == "abababa"
    assert proposed(request_of("xaaaa"), 4) == "aaaa"


def test_the_index_is_kept_up_with_tokens_one_by_one():
    rng = random.Random(0)
    for _ in range(50):
        text = "".join(rng.choices("abc", k=60))
        completion, lookup = request_of(text[:10]), PromptLookup()
        for length in range(10, 60):
            completion.token_ids = list(map(LETTERS.index, text[:length]))
            drafts = lookup.propose(completion, 3)
            assert bool(drafts) == (text[length - 3 : length] in text[: length - 1])
            if drafts:
                begin = lookup._read(completion).next
                assert begin is not None
                # What stands before the place is what the request ends with.
                assert text[begin - 3 : begin] == text[length - 3 : length]


def test_acceptances_are_known_without_any_drafts():
    lookup = PromptLookup()
    completion = request_of("abcdefgh_" * 3)
    completion.draft_record = record = DraftRecord(lookup.first_acceptance, 27)

    def acceptances(answer: str) -> Sequence[float]:
        for letter in answer:
            completion.token_ids.append(LETTERS.index(letter))
            lookup.acceptances(completion, record)
        return lookup.acceptances(completion, record)

    assert acceptances("") == [0.5], "a prompt says nothing"
    assert acceptances("abcdefgh_" * 4)[0] > 0.9
    # Repetitions that end after a token or two say little of those that have lasted.
    acceptances("abcx" * 2 + "abcyabcz" * 2)
    short, *_, long = record.acceptances
    assert short <= 0.5 < 0.9 < long
    assert not acceptances("q"), "there is nothing to propose"


# The rule

BOUND_BY_MEMORY = StepCost.linear(10, 0.1)
BOUND_BY_ROWS = StepCost.linear(0.1, 1)


class Known(Drafter):
    """Has drafts of a known acceptance for each request, by its place among them."""

    def __init__(self, acceptances: Sequence[float]):
        self.known = iter(acceptances)

    def acceptances(self, completion: Completion, record: DraftRecord) -> Sequence[float]:
        return [next(self.known)]


def speculation(step: StepCost, **options: Any) -> Speculation:
    return Speculation(step=step, **options)


def counts(
    rule: Speculation, *acceptances: float, most: int = 7, run_lengths: Sequence[int] | None = None
) -> Sequence[int]:
    """The numbers of drafts of requests in a step that samples a token for each of them."""
    run_lengths = run_lengths or [1] * len(acceptances)
    rule = replace(rule, drafter=Known(acceptances), num_draft_tokens=most)
    requests = [request_of("a") for _ in acceptances]
    return rule.num_drafts(requests, run_lengths, sum(run_lengths), len(acceptances))


def test_rows_that_cost_little_are_filled_with_drafts():
    rule = speculation(BOUND_BY_MEMORY)
    assert counts(rule, 0.9) == [7] and counts(rule, 0.9, most=3) == [3]
    assert counts(rule, 0.5) == [5] and counts(rule, 0.0) == [0]


def test_rows_that_cost_as_much_as_a_step_are_not():
    assert counts(speculation(BOUND_BY_ROWS), 0.9) == [0]
    assert counts(speculation(BOUND_BY_ROWS), *[0.95] * 8) == [0] * 8


def test_each_request_gets_what_its_own_drafts_are_worth():
    found = counts(speculation(StepCost.linear(5, 1)), 0.95, 0.6, 0.1)
    assert found[0] > found[1] > found[2] == 0


def test_the_more_requests_run_the_more_a_draft_has_to_promise():
    rule = speculation(StepCost.linear(4, 1))
    per_request = [counts(rule, *[0.8] * n)[0] for n in (1, 2, 4, 8, 16)]
    assert per_request == sorted(per_request, reverse=True)
    assert per_request[0] > 0 == per_request[-1]


def test_a_step_that_has_to_be_read_first_must_gain_more_than_the_waiting():
    assert counts(speculation(BOUND_BY_MEMORY), 0.2) == [2]
    assert counts(speculation(BOUND_BY_MEMORY, waiting_share=0.3), 0.2) == [0]
    assert counts(speculation(BOUND_BY_MEMORY, waiting_share=0.3), 0.8) != [0]


def test_the_passes_of_a_draft_model_count():
    rule = speculation(BOUND_BY_MEMORY, draft_pass=StepCost.linear(1, 0.01))
    assert 1 <= counts(rule, 0.7)[0] < counts(speculation(BOUND_BY_MEMORY), 0.7)[0]
    assert counts(speculation(BOUND_BY_MEMORY, draft_pass=StepCost.linear(9, 0.1)), 0.7) == [0]


def test_rows_that_a_recurrent_model_computes_again_count():
    """A run of n rows and one draft of acceptance a is n * (1 - a) rows more on average."""
    step = StepCost.linear(10, 1)
    rule = speculation(step, repeats_runs=True)

    def drafts(acceptance: float, run_length: int) -> int:
        (count,) = counts(rule, acceptance, most=1, run_lengths=[run_length])
        return count

    # A token per 10 + n is what a draft has to beat, and 1.9 of them come per step.
    assert drafts(0.9, 1) == 1 and 1.9 / (10 + 2 + 0.1) > 1 / 11
    assert drafts(0.15, 1) == 0 and 1.15 / (10 + 2 + 0.85) < 1 / 11
    assert counts(speculation(step), 0.15, most=1) == [1] and 1.15 / (10 + 2) > 1 / 11
    # The longer the run, the dearer: with 0.45, up to some length.
    paid = [drafts(0.45, run_length) for run_length in range(1, 60)]
    expected = [1.45 / (11 + n + 0.55 * n) > 1 / (10 + n) for n in range(1, 60)]
    assert paid == expected and True in expected and False in expected
    # What is surely accepted is never computed again.
    assert counts(rule, 1.0) == counts(speculation(step), 1.0) == [7]


def test_a_gain_may_be_too_small_to_try():
    """Eight streams with 0.9 accepted promise 1.12 times the tokens per cost."""
    assert counts(speculation(StepCost.linear(3, 1)), *[0.9] * 8)[0] > 0
    assert counts(speculation(StepCost.linear(3, 1), min_gain=1.3), *[0.9] * 8) == [0] * 8
    assert counts(speculation(StepCost.linear(3, 1), min_gain=1.3), 0.9)[0] > 0


def test_where_rows_cost_nothing_all_are_tried():
    assert counts(Speculation(), 0.99, 0.3) == [7, 7]


# Grammars


class AGrammar:
    """Forces ``forced`` next, and allows the tokens below ``limit``."""

    def __init__(self, forced: Sequence[int] = (), limit: int = 9):
        self.forced, self.limit = forced, limit

    def forced_tokens(self, completion: Completion) -> Sequence[int]:
        return self.forced

    def num_allowed(self, completion: Completion, drafts: list[int]) -> int:
        return len(list(itertools.takewhile(lambda token: token < self.limit, drafts)))


def constrained(grammar: AGrammar, text: str) -> Completion:
    completion = request_of(text)
    completion.sampling_state = SimpleNamespace(grammar=grammar)
    return completion


def test_what_a_grammar_forces_is_as_good_as_accepted():
    rule = speculation(StepCost.linear(4, 1), num_draft_tokens=5)
    requests = [constrained(AGrammar([7, 8]), "a"), constrained(AGrammar([7] * 9), "a")]
    assert rule.num_drafts(requests, [1, 1], 2, 2) == [2, 5]
    assert [list(rule.propose(each, 5)) for each in requests] == [[7, 8], [7] * 5]
    # The look-up has nothing for them, and ranks that follow another one have no grammars.
    assert replace(rule, reads_grammars=False).num_drafts(requests, [1, 1], 2, 2) == [0, 0]


def test_what_is_looked_up_ends_where_the_grammar_forbids_it():
    request = constrained(AGrammar(limit=4), "abcdabcdeabc")
    assert list(speculation(StepCost.linear(4, 1)).propose(request, 7)) == [3]
    assert proposed(request) == "deabcde"
