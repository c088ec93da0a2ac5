"""What a step does with the states of its sequences, for a model with recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_paged.core import KVCacheManager, SequenceState
from mlx_paged.ops import StepState, part_ways
from mlx_paged.request import SeqId


def states_before(
    manager: KVCacheManager,
    seq_ids: Sequence[SeqId],
    num_new_tokens: Sequence[int],
    num_logit_rows: Sequence[int] | None,
) -> list[StepState] | None:
    """The states from which the sequences of a step continue; ``None`` for a model without. Their
    slots are allocated.
    """
    states, block_size = manager.states, manager.pool.block_size
    if states is None:
        return None
    counts = num_logit_rows or [1] * len(seq_ids)
    made = []
    for seq, num_new, num_logits in zip(seq_ids, num_new_tokens, counts, strict=True):
        num_tokens = manager.num_tokens(seq)
        num_behind = num_tokens % block_size
        num_first = 0
        # A prompt is cut once, where it ends: each cut is a pass of its own.
        if states.num_checkpoints and num_new > num_behind and (num_logits or not num_behind):
            num_first = num_new - num_behind
        made.append(StepState(states.get(seq, num_tokens - num_new), num_first))
    return made


def put_states(
    manager: KVCacheManager, seq_ids: Sequence[SeqId], made: Sequence[StepState]
) -> None:
    """Keep the states that a step has made.

    Raises:
        ValueError: the step ran no model, which alone can make them.
    """
    states, block_size = manager.states, manager.pool.block_size
    assert states is not None, "a step has states where its manager keeps them"
    if any(state.after is None for state in made):
        raise ValueError(
            "[paged cache] this model keeps a recurrent state beside K/V, which nothing but the "
            "model can make: rows of K/V can't be appended or restored alone"
        )
    lengths = {seq: manager.num_tokens(seq) for seq in seq_ids}
    of_seqs = list(zip(seq_ids, made, strict=True))
    newest = {seq: SequenceState(lengths[seq], state.after) for seq, state in of_seqs}
    at_block_ends = {
        seq: (
            SequenceState(lengths[seq] // block_size * block_size, state.after_first),
            state.num_first == 1,
        )
        for seq, state in of_seqs
        if state.num_first
    }
    manager.put_states(states, newest, at_block_ends)


def forget_before(made: Sequence[StepState]) -> None:
    """When the states of a step are kept: those before it are not needed any more, and what others
    still hold of their stacks goes to stacks of its own.
    """
    stacks = {id(state.before.stack): state.before.stack for state in made if state.before}
    for state in made:
        state.before = None
    part_ways(stacks.values())
