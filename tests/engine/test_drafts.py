"""Who proposes drafts, and how many a step tries: the look-up and the rule."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from helpers.completions import new_completion
from helpers.engine_runs import CONFIG

from mlx_paged.engine.request import Completion
from mlx_paged.engine.speculation.draft_model import ROW_COSTS, cost_of, row_costs
from mlx_paged.engine.speculation.speculation import (
    FIRST_ACCEPTANCE,
    Drafter,
    PromptLookup,
    Speculation,
    StepCost,
)
from mlx_paged.models import qwen3
from mlx_paged.ops import device
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


def test_the_acceptance_is_known_without_any_drafts():
    lookup = PromptLookup()
    completion = request_of("abcdefgh_" * 3)
    assert lookup.acceptance(completion) == FIRST_ACCEPTANCE, "a prompt says nothing"
    for letter in "abcdefgh_" * 3:
        completion.token_ids.append(LETTERS.index(letter))
        lookup.acceptance(completion)
    assert lookup.acceptance(completion) > 0.95
    for letter in "abcx" * 2 + "abcyabcz" * 2:
        completion.token_ids.append(LETTERS.index(letter))
    completion.token_ids += map(LETTERS.index, "abc")
    assert 0 < lookup.acceptance(completion) < 0.9
    completion.token_ids.append(LETTERS.index("q"))
    assert lookup.acceptance(completion) == 0, "there is nothing to propose"


# The rule

BOUND_BY_MEMORY = StepCost.linear(10, 0.1)
BOUND_BY_ROWS = StepCost.linear(0.1, 1)


class Known(Drafter):
    """Has drafts of a known acceptance for each request, by its place among them."""

    def __init__(self, acceptances: Sequence[float]):
        self.acceptances = iter(acceptances)

    def acceptance(self, completion: Completion) -> float:
        return next(self.acceptances)


def speculation(step: StepCost, **options: Any) -> Speculation:
    return Speculation(step=step, **options)


def counts(
    rule: Speculation, *acceptances: float, most: int = 7, run_lengths: Sequence[int] | None = None
) -> Sequence[int]:
    """The numbers of drafts of requests in a step that samples a token for each of them."""
    run_lengths = run_lengths or [1] * len(acceptances)
    rule = replace(rule, drafter=Known(acceptances), num_draft_tokens=most)
    requests = [request_of("a")] * len(acceptances)
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
    assert counts(speculation(BOUND_BY_MEMORY), 0.4) == [4]
    assert counts(speculation(BOUND_BY_MEMORY, waiting_share=0.3), 0.4) == [0]
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

    # 1.3 tokens per 10 + n is what a draft has to promise, and 1.9 of them come per step.
    assert drafts(0.9, 1) == 1 and 1.9 / (10 + 2 + 0.1) > 1.3 / 11
    assert drafts(0.45, 1) == 0 and 1.45 / (10 + 2 + 0.55) < 1.3 / 11
    assert counts(speculation(step), 0.45, most=1) == [1] and 1.45 / (10 + 2) > 1.3 / 11
    # The longer the run, the dearer: with 0.6, up to some length.
    paid = [drafts(0.6, run_length) for run_length in range(1, 20)]
    expected = [1.6 / (11 + n + 0.4 * n) > 1.3 / (10 + n) for n in range(1, 20)]
    assert paid == expected and True in expected and False in expected
    # What is surely accepted is never computed again.
    assert counts(rule, 1.0) == counts(speculation(step), 1.0) == [7]


def test_where_rows_cost_nothing_all_are_tried():
    assert counts(Speculation(), 0.99, 0.3) == [7, 7]


# The table of costs

# The cost of a step by numbers of rows over that of one row, as published or estimated.
FIGURES = [
    ("M4", "4 bits", {2: 1.03, 3: 1.22, 4: 1.47, 6: 2.07, 8: 2.69}),  # mlx #3839, 4096 x 24576
    ("M4", "4 bits", {2: 1.20, 3: 1.35, 4: 1.57, 6: 1.99, 8: 2.01}),  # mlx #3839, 4096 x 4096
    ("M4", "4 bits", {2: 1.18, 3: 1.31, 4: 1.45, 5: 1.61, 6: 2.27, 8: 2.63}),  # estimate
    ("M4", "2 bits", {2: 1.30, 3: 1.82, 4: 2.34, 5: 2.86, 8: 4.53}),  # mlx #3852
    ("M4", "8 bits", {4: 1.09, 8: 1.51}),  # estimate
    ("M4", "mixture", {2: 1.94, 4: 3.64, 8: 6.45}),  # distinct experts
    ("M3", "4 bits", {2: 1.00, 4: 1.28, 6: 2.04, 8: 2.50, 10: 3.94}),  # mlx #3863
    ("M3", "4 bits", {2: 1.12, 3: 1.21, 4: 1.31, 5: 1.43, 6: 1.96, 8: 2.26}),  # estimate
    ("M3 Ultra", "4 bits", {2: 1.83, 4: 3.26, 7: 5.28, 8: 6.12}),  # mlx #4265
    ("M3 Ultra", "16 bits", {2: 2.0, 8: 2.0}),  # mlx #4265
    ("M5", "4 bits", {3: 1.11, 5: 1.41, 8: 2.20, 12: 3.15}),  # mlx #3791
    ("M5", "4 bits", {2: 1.08, 3: 1.16, 4: 1.25, 5: 1.36, 6: 1.85, 8: 2.14}),  # estimate
    ("M2", "4 bits", {2: 1.73}),  # mlx-lm #990
    ("M1", "4 bits", {2: 1.30, 3: 1.76, 4: 2.27, 5: 2.80, 6: 4.23, 8: 4.51}),  # estimate
    ("M1", "8 bits", {2: 1.06, 3: 1.18, 4: 1.37, 5: 1.60, 6: 2.39, 8: 2.53}),  # estimate
    ("M1", "mixture", {2: 1.27, 4: 1.9, 9: 3.4}),  # qwisp
]


@pytest.mark.parametrize(("chip", "kind", "figures"), FIGURES)
def test_of_sources_that_differ_the_table_has_the_dearer(
    chip: str, kind: str, figures: dict[int, float]
):
    cost = StepCost.relative(ROW_COSTS[chip][kind])
    assert all(cost.of(rows) > figure - 1e-9 for rows, figure in figures.items())


def test_the_cost_is_linear_between_and_beyond_the_figures():
    cost = StepCost.relative({2: 1.2, 4: 2.0}, 10)
    found = [cost.of(rows) for rows in (1, 1.5, 2, 3, 4, 6)]
    assert found == pytest.approx([10, 11, 12, 16, 20, 28])
    assert StepCost.linear(3, 2).of(5) == 13


def test_the_costs_are_those_of_the_chip_and_of_the_weights(monkeypatch: pytest.MonkeyPatch):
    def costs(architecture: str, bits: float = 4.5, is_mixture: bool = False) -> object:
        monkeypatch.setattr(mx, "device_info", lambda: {"architecture": architecture})
        return row_costs(bits, is_mixture)

    for generation, chip in enumerate(("M1", "M2", "M3", "M4", "M5"), 13):
        assert costs(f"applegpu_g{generation}s") is ROW_COSTS[chip]["4 bits"]
    assert costs("applegpu_g15d") is ROW_COSTS["M3 Ultra"]["4 bits"]
    assert costs("applegpu_g14d") is ROW_COSTS["M2"]["4 bits"], "no figures of its own"
    assert costs("applegpu_g19s") is ROW_COSTS["M5"]["4 bits"], "newer than the table"
    assert costs("sm_90") is ROW_COSTS["M1 Ultra"]["4 bits"], "not one of Apple's"
    kinds = {2.5: "2 bits", 3.5: "2 bits", 4.25: "4 bits", 6.5: "4 bits", 8.5: "8 bits"}
    for bits, kind in (kinds | {16.0: "16 bits"}).items():
        assert costs("applegpu_g16s", bits) is ROW_COSTS["M4"][kind]
    assert costs("applegpu_g16s", 4.5, is_mixture=True) is ROW_COSTS["M4"]["mixture"]


def test_a_step_costs_what_its_weights_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "is_cpu", lambda: False)
    sizes = [CONFIG | {"num_hidden_layers": layers} for layers in (1, 3)]
    costs = [cost_of(qwen3.Model(qwen3.ModelArgs.from_dict(size))) for size in sizes]
    assert costs[0].costs[0] < costs[1].costs[0] < 3 * costs[0].costs[0]
    assert costs[0].of(2) / costs[0].of(1) == ROW_COSTS["M1 Ultra"]["16 bits"][2]


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
