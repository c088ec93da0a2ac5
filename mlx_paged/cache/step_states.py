"""What a step does with the states of its sequences, for a model with recurrent layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlx_paged.core import Cut, KVCacheManager, SequenceState, SequenceStates
from mlx_paged.ops import StateStack, StepState, part_ways
from mlx_paged.request import SeqId


def states_before(
    manager: KVCacheManager,
    seq_ids: Sequence[SeqId],
    num_new_tokens: Sequence[int],
    num_drafts: Sequence[int] | None = None,
) -> list[StepState] | None:
    """The states from which the sequences of a step continue, and where it is to leave others;
    ``None`` for a model without. Their slots are allocated.

    Args:
        num_drafts: of the new tokens of each sequence, the last ones, after which no state is left;
            ``None`` for none.
    """
    states = manager.states
    if states is None:
        return None
    made = []
    drafts = [0] * len(seq_ids) if num_drafts is None else num_drafts
    for seq, num_new, num_drafted in zip(seq_ids, num_new_tokens, drafts, strict=True):
        begin = manager.num_tokens(seq) - num_new
        cuts = [cut.num_tokens - begin for cut in _cuts(manager, states, seq, num_new, num_drafted)]
        made.append(StepState(states.get(seq, begin), cuts, num_drafted))
    return made


def _cuts(
    manager: KVCacheManager, states: SequenceStates, seq: SeqId, num_new: int, num_drafts: int
) -> list[Cut]:
    end = manager.num_tokens(seq)
    return states.cuts(seq, end - num_new, end - num_drafts, manager.pool.block_size)


def put_states(
    manager: KVCacheManager,
    seq_ids: Sequence[SeqId],
    num_new_tokens: Sequence[int],
    made: Sequence[StepState],
) -> None:
    """Keep the states that a step has made, and those before it of sequences with drafts.

    Raises:
        ValueError: the step ran no model, which alone can make them.
    """
    states = manager.states
    assert states is not None, "a step has states where its manager keeps them"
    if any(state.after is None for state in made):
        raise ValueError(
            "[paged cache] this model keeps a recurrent state beside K/V, which nothing but the "
            "model can make: rows of K/V can't be appended or restored alone"
        )
    newest = {
        seq: SequenceState(manager.num_tokens(seq), state.after)
        for seq, state in zip(seq_ids, made, strict=True)
    }
    at_block_ends, drafted = {}, []
    for seq, num_new, state in zip(seq_ids, num_new_tokens, made, strict=True):
        if state.cuts:
            cuts = _cuts(manager, states, seq, num_new, state.num_drafts)
            at_block_ends[seq] = list(zip(cuts, state.at_cuts, strict=True))
        if state.num_drafts:
            drafted.append(seq)
    states.end_step(newest, at_block_ends, manager.tables, drafted)


def forget_before(
    made: Sequence[StepState], earlier: Iterable[StateStack] = ()
) -> Sequence[StateStack]:
    """When the states of a step are kept: those before it are not needed any more, and what others
    still hold of their stacks goes to stacks of its own.

    Args:
        earlier: what was returned for the step before.

    Returns:
        Stacks of which every state is held, so that none was copied. Don't keep them alive.
    """
    stacks = {*earlier, *(state.before.stack for state in made if state.before)}
    for state in made:
        state.before = None
    return part_ways(list(stacks))
