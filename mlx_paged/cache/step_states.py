"""The recurrent states of the sequences of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlx_paged.core import KVCacheManager, SequenceState
from mlx_paged.ops import StateStack, StepState, separate_states
from mlx_paged.request import SeqId


def states_before(
    manager: KVCacheManager,
    seq_ids: Sequence[SeqId],
    num_new_tokens: Sequence[int],
    num_drafts: Sequence[int] | None = None,
) -> list[StepState] | None:
    """The states from which the sequences of a step continue, and where it has to leave
    checkpoints; ``None`` for a model without states. The slots of the step are allocated.

    Args:
        num_drafts: per sequence, how many of its last new tokens are drafts, which get no
            checkpoint; ``None`` for none.
    """
    states = manager.states
    if states is None:
        return None
    made = []
    drafts = [0] * len(seq_ids) if num_drafts is None else num_drafts
    block_size, num_planned = manager.pool.block_size, 0
    for seq, num_new, num_drafted in zip(seq_ids, num_new_tokens, drafts, strict=True):
        end = manager.num_tokens(seq)
        begin = end - num_new
        planned = states.plan_cuts(seq, begin, end - num_drafted, block_size, num_planned)
        num_planned += len(planned)
        cuts = [cut.num_tokens - begin for cut in planned]
        # A full block before the drafts has a hash, so the sequence can't fall back behind it.
        full = (end - num_drafted) // block_size * block_size - begin
        if num_drafted and full > 0 and full not in cuts:
            cuts.append(full)
        made.append(StepState(states.get(seq, begin), cuts, len(planned), num_drafted))
    return made


def put_states(
    manager: KVCacheManager,
    seq_ids: Sequence[SeqId],
    num_new_tokens: Sequence[int],
    made: Sequence[StepState],
) -> None:
    """Store the states that a step has computed, and keep earlier ones of sequences with drafts:
    those at the last end of a block before the drafts, or those before the step.

    Raises:
        ValueError: the step ran no model, so that it has no states.
    """
    states = manager.states
    assert states is not None, "a step has states where its manager keeps them"
    if any(state.after is None for state in made):
        raise ValueError(
            "[paged cache] this model has a recurrent state, which only the model can compute: "
            "rows of K/V can't be appended or restored without it"
        )
    newest = {
        seq: SequenceState(manager.num_tokens(seq), state.after)
        for seq, state in zip(seq_ids, made, strict=True)
    }
    at_block_ends, before_drafts = {}, {}
    for seq, num_new, state in zip(seq_ids, num_new_tokens, made, strict=True):
        end = manager.num_tokens(seq)
        begin = end - num_new
        if planned := state.cuts[: state.num_checkpoints]:
            cuts = states.cuts(seq, begin, end - state.num_drafts, manager.pool.block_size)
            # Some may have been left out when the step was planned.
            cuts = [cut for cut in cuts if cut.num_tokens - begin in planned]
            at_block_ends[seq] = list(zip(cuts, state.at_cuts, strict=False))
        if state.num_drafts:
            before_drafts[seq] = SequenceState(begin, state.before)
            if state.cuts:
                before_drafts[seq] = SequenceState(begin + state.cuts[-1], state.at_cuts[-1])
    states.end_step(newest, at_block_ends, manager.tables, before_drafts)


def forget_before(
    made: Sequence[StepState], earlier: Iterable[StateStack] = ()
) -> Sequence[StateStack]:
    """Release the previous states after those of a step are stored, and move states that are still
    held out of their stacks (:func:`separate_states`).

    Args:
        earlier: the result for the previous step.

    Returns:
        Stacks of which every state is held, so that none was copied. Don't keep them alive.
    """
    stacks = {*earlier, *(state.before.stack for state in made if state.before)}
    for state in made:
        state.before = None
    return separate_states(list(stacks))
