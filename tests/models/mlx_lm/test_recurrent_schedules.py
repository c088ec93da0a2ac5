"""All recurrent architectures of mlx-lm, tiny: every row of logits of random schedules is that of
mlx-lm's own caches, and planted faults show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from helpers.model_zoo import config_of, make
from helpers.model_zoo.page import rows_on_page
from helpers.recurrent_schedules import TOLERANCE, Schedule

from mlx_paged.core.sequence_states import SequenceState, SequenceStates
from mlx_paged.models.mlx_lm import adapt, run_groups
from mlx_paged.models.mlx_lm.run_groups import RunGroup, RunGroups
from mlx_paged.ops import StateRow, StateStack

ARCHITECTURES = [name for name, row in rows_on_page().items() if "state" in row.traits]
IN_THE_FAST_LANE = {"falcon_h1", "mamba2", "qwen3_5"}


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in IN_THE_FAST_LANE else pytest.mark.slow)
        for name in ARCHITECTURES
    ],
)
def test_every_row_of_logits_is_that_of_mlx_lm(architecture: str):
    stock = make(architecture)
    # With this seed windows, too, are hit before their blocks have left them.
    schedule = Schedule(stock, adapt(stock, config_of(architecture)), seed=2)
    schedule.run(60)
    while schedule.events["hit"] < 3 and schedule.events["steps"] < 120:
        schedule.run(10)
    assert schedule.worst <= TOLERANCE
    least = {"steps": 45, "left out": 15, "cut": 7, "hit": 3, "forked": 4, "preempted": 1}
    least |= {"drafted": 40, "fell back": 15}
    assert all(schedule.events[event] >= count for event, count in least.items()), schedule.events


@pytest.mark.parametrize("num_states", [20, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "architecture", ["falcon_h1", "mamba2", pytest.param("qwen3_5", marks=pytest.mark.slow)]
)
def test_rows_of_logits_are_the_same_on_a_tiny_budget_that_states_share(
    architecture: str, num_states: int
):
    """The budget is checked after each step, while slabs shrink and blocks in use move."""
    stock = make(architecture)
    model = adapt(stock, config_of(architecture))
    schedule = Schedule(stock, model, seed=3, num_states=num_states)
    schedule.run(60)
    assert schedule.worst <= TOLERANCE
    assert schedule.events["shrunk"] >= 2 and schedule.events["moved"] >= 10, schedule.events


def test_there_are_25_recurrent_architectures():
    assert len(ARCHITECTURES) == 25


Patch = Callable[[pytest.MonkeyPatch], None]


def plant_a_state_of_too_few_tokens(patch: pytest.MonkeyPatch) -> None:
    """Once, a sequence goes on from the state before the one before."""
    put, num_puts = SequenceStates.put, [0]

    def late(states: SequenceStates, newest: Any) -> None:
        num_puts[0] += 1
        if num_puts[0] == 30:
            newest = {
                seq: SequenceState(state.num_tokens, states._states.get(seq, state).content)
                for seq, state in newest.items()
            }
        put(states, newest)

    patch.setattr(SequenceStates, "put", late)


def plant_states_of_other_sequences(patch: pytest.MonkeyPatch) -> None:
    """The rows of a stack are handed out in another order."""
    rows = StateStack.rows

    def swapped(stack: StateStack) -> list[StateRow]:
        return rows(stack)[::-1]

    patch.setattr(StateStack, "rows", swapped)


def plant_a_second_wave_from_the_old_states(patch: pytest.MonkeyPatch) -> None:
    """What follows a cut begins with the state before the run."""

    def before(places: Sequence[tuple[RunGroup, int]]) -> Any:
        group, rows = places[0][0], [row for _, row in places]

        def read(cache: int, slot: int) -> mx.array | None:
            array = group.caches[cache]._read(slot)
            return None if array is None else array[mx.array(rows)]

        return read

    patch.setattr(run_groups, "_reader_within", before)


def plant_rows_in_the_order_of_their_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunGroups, "_row_order", None)


def plant_a_checkpoint_of_too_many_tokens(patch: pytest.MonkeyPatch) -> None:
    """The state at the end of a block is that at the end of the run."""
    put_states = RunGroups.put_states

    def put(groups: RunGroups) -> list[mx.array]:
        leaves = put_states(groups)
        for state in groups._states:
            state.at_cuts[:] = [state.after for _ in state.at_cuts]
        return leaves

    patch.setattr(RunGroups, "put_states", put)


def plant_a_copy_of_another_row(patch: pytest.MonkeyPatch) -> None:
    """A sequence that is left out keeps the first state of its stack."""
    alone = StateRow.alone

    def first(row: StateRow) -> StateRow:
        return alone(StateRow(row.stack, 0))

    patch.setattr(StateRow, "alone", first)


def plant_a_state_that_stays_after_a_rejected_draft(patch: pytest.MonkeyPatch) -> None:
    """A sequence falls back, with the state of the drafts."""
    trim = SequenceStates.trim

    def kept(states: SequenceStates, seq: Any, num_tokens: int) -> int:
        newest = states._states[seq]
        num_kept = trim(states, seq, num_tokens)
        states._states[seq] = SequenceState(num_kept, newest.content)
        return num_kept

    patch.setattr(SequenceStates, "trim", kept)


@pytest.mark.parametrize(
    "plant",
    [
        plant_a_state_of_too_few_tokens,
        plant_states_of_other_sequences,
        plant_a_second_wave_from_the_old_states,
        plant_rows_in_the_order_of_their_groups,
        plant_a_checkpoint_of_too_many_tokens,
        plant_a_copy_of_another_row,
        plant_a_state_that_stays_after_a_rejected_draft,
    ],
)
@pytest.mark.parametrize("architecture", ["qwen3_5", pytest.param("rwkv7", marks=pytest.mark.slow)])
def test_a_planted_fault_shows_in_the_logits(
    architecture: str, plant: Patch, monkeypatch: pytest.MonkeyPatch
):
    stock = make(architecture)
    model = adapt(stock, config_of(architecture))
    plant(monkeypatch)
    schedule = Schedule(stock, model)
    while schedule.worst <= 20 * TOLERANCE:
        assert schedule.events["steps"] < 60, "it does not show"
        schedule.run(1)
