"""What drafts cost and gain: the table of the cost of rows, and conversations simulated on it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import mlx.core as mx
import pytest
from helpers.completions import new_completion
from helpers.engine_runs import CONFIG

from benchmarks.kernels import few_rows
from mlx_paged.engine.request import Completion
from mlx_paged.engine.speculation.draft_model import DraftModel, speculation_of
from mlx_paged.engine.speculation.draft_record import DraftRecord, DraftRecords
from mlx_paged.engine.speculation.speculation import (
    Drafter,
    Speculation,
    StepCost,
)
from mlx_paged.engine.speculation.step_costs import (
    COSTS_BY_ROWS,
    ROW_COSTS,
    cost_of,
    row_costs,
)
from mlx_paged.models import qwen3
from mlx_paged.models.matmul import SEVERAL_ROWS, Linears, Matmul
from mlx_paged.ops import device

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
    ("M3 Ultra", "16 bits", {2: 2.0, 16: 2.0, 32: 4.0}),  # mlx #4265, estimate
    ("M5", "4 bits", {3: 1.11, 5: 1.41, 8: 2.20, 12: 3.15}),  # mlx #3791
    ("M5", "4 bits", {2: 1.08, 3: 1.16, 4: 1.25, 5: 1.36, 6: 1.85, 8: 2.14}),  # estimate
    ("M2", "4 bits", {2: 1.73}),  # mlx-lm #990
    ("M2", "2 bits", {2: 2.0}),  # estimate
    ("M1 Ultra", "4 bits", {2: 2.0}),  # mlxcel: every head loses
    ("M1", "4 bits", {2: 1.30, 3: 1.76, 4: 2.27, 5: 2.80, 6: 4.23, 8: 4.51}),  # estimate
    ("M1", "8 bits", {2: 1.06, 3: 1.18, 4: 1.37, 5: 1.60, 6: 2.39, 8: 2.53}),  # estimate
    ("M1", "mixture", {2: 1.27, 4: 1.9, 9: 3.4}),  # qwisp
]
# The same with rows_matmul, over one row by MLX, as estimated: M1, M1 Max, M2 Ultra and so on.
FIGURES_BY_ROWS = [
    ("M1", "4 bits", {2: 1.01, 3: 1.03, 4: 1.07, 5: 1.11, 6: 1.31, 8: 1.47, 16: 2.65}),
    ("M1", "4 bits", {2: 1.02, 3: 1.08, 4: 1.16, 5: 1.26, 6: 1.63, 8: 1.89, 16: 3.65}),
    ("M1", "8 bits", {2: 1.00, 3: 1.01, 4: 1.03, 5: 1.06, 6: 1.15, 8: 1.24, 16: 2.03}),
    ("M2", "4 bits", {2: 1.01, 3: 1.04, 4: 1.09, 5: 1.15, 6: 1.40, 8: 1.59, 16: 2.96}),
    ("M3", "4 bits", {2: 1.01, 3: 1.03, 4: 1.07, 5: 1.12, 6: 1.32, 8: 1.48, 16: 2.70}),
    ("M3", "8 bits", {4: 1.01, 8: 1.05}),
    ("M4", "4 bits", {2: 1.01, 3: 1.05, 4: 1.11, 5: 1.18, 6: 1.46, 8: 1.67, 16: 3.15}),
    ("M5", "4 bits", {2: 1.02, 3: 1.07, 4: 1.14, 5: 1.23, 6: 1.56, 8: 1.80, 16: 3.44}),
]


@pytest.mark.parametrize(("chip", "kind", "figures"), FIGURES)
def test_of_sources_that_differ_the_table_has_the_dearer(
    chip: str, kind: str, figures: dict[int, float]
):
    cost = StepCost.relative(ROW_COSTS[chip][kind])
    assert all(cost.of(rows) > figure - 1e-9 for rows, figure in figures.items())


@pytest.mark.parametrize(("chip", "kind", "figures"), FIGURES_BY_ROWS)
def test_of_estimates_that_differ_the_table_has_the_dearer(
    chip: str, kind: str, figures: dict[int, float]
):
    cost = StepCost.relative(COSTS_BY_ROWS[chip][kind])
    assert all(cost.of(rows) > figure - 1e-9 for rows, figure in figures.items())


@pytest.mark.parametrize("name", few_rows.CHIPS)
def test_the_benchmark_estimates_no_more_than_the_table_has(name: str):
    for bits in few_rows.BITS:
        cost = StepCost.relative(COSTS_BY_ROWS[name.split()[0]][f"{bits} bits"])
        for rows in (2, 3, 4, 5, 6, 8, 16):
            estimate = few_rows.cost(few_rows.ROWS, few_rows.CHIPS[name], bits, rows)
            assert estimate <= cost.of(rows) + 0.005, (bits, rows)


def test_the_costs_go_by_the_matmul_that_was_chosen_for_each_number_of_rows():
    by_mlx, by_kernel = (StepCost.relative(t["M4"]["4 bits"]) for t in (ROW_COSTS, COSTS_BY_ROWS))
    mixed = StepCost.relative(row_costs(4.5, False, "M4 Pro", {2, 3, 4}))
    assert [mixed.of(rows) for rows in (2, 3, 4)] == [by_kernel.of(rows) for rows in (2, 3, 4)]
    assert [mixed.of(rows) for rows in (5, 6, 8)] == [by_mlx.of(rows) for rows in (5, 6, 8)]
    assert row_costs(4.5, True, "M4", {2, 3}) is ROW_COSTS["M4"]["mixture"], "experts stay"
    for chip, bits in product(ROW_COSTS, (2.5, 4.5, 8.5, 16.0)):
        costs = row_costs(bits, False, chip, SEVERAL_ROWS)
        others = StepCost.relative(row_costs(bits, False, chip))
        assert [rows for rows, cost in costs.items() if cost > others.of(rows)] == []


def test_an_engine_whose_linear_layers_multiply_by_rows_drafts_by_their_costs(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(device, "is_cpu", lambda: False)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    linears = Linears.of([model])
    matmul = Matmul(linears, dict.fromkeys(linears.shapes, SEVERAL_ROWS))
    assert matmul.usual_rows == set(SEVERAL_ROWS)
    rules = [speculation_of(3, model, None, False, True, rows) for rows in ((), matmul.usual_rows)]
    shares = [rule.step.of(4) / rule.step.of(1) for rule in rules]
    assert shares[0] == 2.0 and shares[1] < 1.01
    # In the smaller part of the weights only.
    few = Matmul(linears, {min(linears.shapes, key=lambda shape: shape.num_outputs): SEVERAL_ROWS})
    assert few.is_used and few.usual_rows == set()


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


# Conversations

# A pass of a head takes this share of a step, and a step with drafts is not launched ahead.
HEAD_SHARE, WAITING_SHARE = 0.03, 0.3
# The rows of the table, each with one of the places where it is.
ROWS = {id(row): (chip, kind) for chip, kinds in ROW_COSTS.items() for kind, row in kinds.items()}


def dearest(chip: str, kind: str) -> StepCost:
    """The cost by the dearest of the figures, which the rule does not read."""
    row = ROW_COSTS[chip][kind]
    known = [figures for chip, kind, figures in FIGURES if ROW_COSTS[chip][kind] is row]
    costs = {
        rows: max(StepCost.relative(each).of(rows) for each in known if rows <= max(each))
        for rows in sorted({rows for figures in known for rows in figures})
    }
    return StepCost.relative(costs)


class Head(Drafter):
    """Drafts always, and observes what becomes of it as a draft model does."""

    first_acceptance = DraftModel.first_acceptance

    def acceptances(self, completion: Completion, record: DraftRecord) -> Sequence[float]:
        record.forget_old(completion.num_tokens)
        return record.acceptances


class Streams:
    """Conversations that decode together on a chip, with drafts that are accepted at random."""

    def __init__(
        self,
        chip: str,
        kind: str,
        num_streams: int = 1,
        seed: int = 0,
        wait: float = 0,
        by_rows: bool = False,
    ):
        row = COSTS_BY_ROWS[chip][kind] if by_rows else ROW_COSTS[chip][kind]
        costs = StepCost.relative(row), StepCost.relative(row, HEAD_SHARE)
        self.rule = Speculation(Head(), 3, *costs, wait)
        self.cost = costs[0] if by_rows else dearest(chip, kind)
        self.completions = [new_completion(str(n), [0]) for n in range(num_streams)]
        self.rng = random.Random(seed)
        self.num_drafts: list[int] = []  # of each step
        self.was_drafted = False

    def run(self, num_tokens: int, acceptances: Sequence[float]) -> float:
        """Generate tokens, and return the time over that without drafts.

        Args:
            num_tokens: of a conversation, on average.
            acceptances: by depth.
        """
        num_streams, num_made, cost = len(self.completions), 0, 0.0
        plain_cost = self.cost.of(num_streams)
        while num_made < num_tokens * num_streams:
            counts = self.rule.num_drafts(
                self.completions, [1] * num_streams, num_streams, num_streams
            )
            is_drafted = any(counts)
            cost += self.cost.of(num_streams + sum(counts))
            for depth in range(max(counts)):
                cost += HEAD_SHARE * self.cost.of(sum(count > depth for count in counts))
            # Neither it nor the step after it was launched before another one was read.
            if is_drafted or self.was_drafted:
                cost += self.rule.waiting_share * plain_cost
            self.was_drafted = is_drafted
            self.num_drafts.append(sum(counts))
            for completion, count in zip(self.completions, counts, strict=True):
                num_accepted = 0
                while num_accepted < count and self.rng.random() < acceptances[num_accepted]:
                    num_accepted += 1
                num_made += 1 + num_accepted
                completion.token_ids += [0] * (1 + num_accepted)
                if count:
                    assert completion.draft_record is not None
                    completion.draft_record.observe_drafts(count, num_accepted)
                    completion.draft_record.settle(num_accepted, completion.num_tokens)
        return cost / plain_cost * num_streams / num_made


@pytest.mark.parametrize(
    ("chip", "kind"), [("M2", "4 bits"), ("M3 Ultra", "4 bits"), ("M5", "mixture")]
)
def test_where_rows_are_dear_nothing_is_tried(chip: str, kind: str):
    streams = Streams(chip, kind, wait=WAITING_SHARE)
    assert streams.run(100, [1, 1, 1]) == 1 and not any(streams.num_drafts)


@pytest.mark.parametrize("wait", [0, WAITING_SHARE])
@pytest.mark.parametrize(("chip", "kind"), ROWS.values())
def test_a_conversation_is_never_more_than_2_percent_slower(chip: str, kind: str, wait: float):
    for acceptance in (0, 0.3, 0.6, 0.85):
        for num_streams, seed in ((1, 0), (1, 1), (4, 2), (16, 3)):
            streams = Streams(chip, kind, num_streams, seed, wait)
            slower = streams.run(1000, [acceptance] * 3)
            assert slower <= 1.02, (acceptance, num_streams, seed)


@pytest.mark.parametrize(
    ("chip", "kind", "times"),
    [
        ("M5", "4 bits", 1.8),
        ("M4", "4 bits", 1.5),
        ("M3", "4 bits", 1.65),
        ("M4", "8 bits", 2.0),
        ("M1", "8 bits", 1.7),
    ],
)
def test_where_rows_are_cheap_good_drafts_pay(chip: str, kind: str, times: float):
    """By how much 1,000 tokens are faster than without drafts, with 0.85 of them accepted."""
    for seed in range(3):
        assert Streams(chip, kind, 1, seed, WAITING_SHARE).run(1000, [0.85] * 3) < 1 / times


@pytest.mark.parametrize("chip", COSTS_BY_ROWS)
def test_where_rows_matmul_runs_good_drafts_pay_on_every_chip(chip: str):
    streams = [Streams(chip, "4 bits", 1, 0, WAITING_SHARE, by_rows=True) for _ in range(2)]
    assert streams[0].run(1000, [0.85] * 3) < 1 / 1.9
    assert streams[1].run(1000, [0, 0, 0]) <= 1.02


def test_a_conversation_may_have_many_turns_without_paying_again():
    """A turn begins with what is known of the one before, whose answer the client sends back."""
    streams = Streams("M4", "4 bits", wait=WAITING_SHARE)
    times = []
    for turn in range(10):
        (completion,) = streams.completions
        completion.block_hashes += [b"%d prompt" % turn, b"%d answer" % turn]
        times.append(streams.run(100, [0, 0, 0]))
        streams.rule.end(completion, 16)
        streams.completions = [new_completion("next", [*completion.token_ids, *range(30)])]
        streams.completions[0].block_hashes = [*completion.block_hashes]
    assert sum(times) / len(times) <= 1.02 < times[0]


@pytest.mark.parametrize(("chip", "kind"), [("M4", "4 bits"), ("M4", "8 bits"), ("M3", "16 bits")])
def test_wrong_estimates_cost_no_more_than_the_credit(
    chip: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Head, "acceptances", lambda *_: [0.9])
    assert 1.01 < Streams(chip, kind, wait=WAITING_SHARE).run(1000, [0, 0, 0]) <= 1.02


def test_other_conversations_have_records_of_their_own():
    records = DraftRecords()
    for number in range(2000):
        hashes = [b"system", b"%d" % number, b"%d answer" % number]
        records.keep(DraftRecord(0.5, 40), hashes, 2, 50)
    assert records.find([b"system"], 60) is None
    assert records.find([b"system", b"1999", b"without reasoning"], 60) is not None
    assert records.find([b"system", b"1", b"1 answer"], 60) is None, "long ago"


def test_deep_drafts_are_judged_by_themselves():
    """Some heads predict one token well and none after it."""
    streams = Streams("M4", "8 bits", wait=WAITING_SHARE)
    assert streams.run(1000, [0.85, 0.05, 0.05]) < 0.8
    assert streams.num_drafts[-100:].count(1) > 90


def test_drafts_are_tried_again_and_less_and_less():
    streams = Streams("M4", "4 bits", wait=WAITING_SHARE)
    streams.run(3000, [0, 0, 0])
    tried = [step for step, count in enumerate(streams.num_drafts) if count]
    first, rest = [step for step in tried if step < 300], [step for step in tried if step >= 300]
    assert len(first) / 300 > 2 * len(rest) / 2700 and tried[0] == 0 and tried[-1] > 2000
    # The text becomes predictable.
    assert streams.run(2000, [0.85] * 3) < 0.85
    assert min(streams.num_drafts[-100:]) > 0


def test_the_same_drafts_are_tried_again_in_the_same_conversation():
    counts = []
    for _ in range(2):
        streams = Streams("M4", "8 bits", 3, wait=WAITING_SHARE)
        streams.run(200, [0.7, 0.5, 0.3])
        counts.append(streams.num_drafts)
    assert counts[0] == counts[1] and any(counts[0])
