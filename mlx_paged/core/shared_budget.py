"""``SharedBudget``: one budget for K/V blocks, the states of running sequences and checkpoints.

Nothing is set aside for one of the three. A running sequence comes first: its states and its K/V
take the memory of cached K/V and of checkpoints. What is left is for the prefix cache, where a hit
needs K/V and a checkpoint at their end, so that memory is worth most to the one of which there is
too little. A checkpoint that no later one has superseded is evicted for another: then there are too
few of them, and K/V leave memory for one more. Or it is lost because its K/V were evicted: then
there are enough, and K/V may take its memory.

Arrays of states are freed when they are dropped. Slabs shrink only between two steps, by a copy, so
cached K/V do not take what may soon be needed: the states of as many sequences as have run at once,
and a few checkpoints for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mlx_paged.core.block_pool import BlockPool
from mlx_paged.core.sequence_states import SequenceStates

# Checkpoints for which cached K/V leave memory, per sequence: at the end of its prompt, where that
# diverges from an earlier one, and at the end of its answer.
CHECKPOINTS_PER_SEQUENCE = 3


@dataclass(frozen=True)
class BudgetSizes:
    """The sizes of what shares a budget, in bytes.

    Attributes:
        budget: for everything.
        block: of K/V, in all slabs.
        state: of one sequence.
        num_copies: copies of a running sequence's state that exist at once.
    """

    budget: int
    block: int
    state: int
    num_copies: int

    @property
    def sequence(self) -> int:
        """States of a running sequence."""
        return self.num_copies * self.state

    def max_num_blocks(self, num_seqs: int) -> int:
        """The most blocks beside the states of running sequences, without the null block."""
        return (self.budget - num_seqs * self.sequence) // self.block - 1


class SharedBudget:
    """Divides a budget between the blocks of a pool and recurrent states.

    The sum of slabs, states of running sequences and checkpoints never exceeds the budget: each of
    them grows only into what the others leave, and :meth:`make_room` and
    :meth:`make_room_for_states` make them leave more. Decisions depend on counts alone, so all
    ranks decide alike.

    Args:
        pool: of the blocks; its slabs have its size.
        states: of the sequences; its checkpoints are limited by this budget from now on.

    Attributes:
        count_seqs: returns the number of sequences that run, including those that running requests
            will be forked into.
    """

    def __init__(self, sizes: BudgetSizes, pool: BlockPool, states: SequenceStates) -> None:
        self.sizes = sizes
        self.count_seqs: Callable[[], int] = states.__len__
        self._pool = pool
        self._states = states
        self._most = sizes.budget
        self._max_num_seqs = 1  # that have run at once; cached K/V leave their states free
        states.checkpoints.num_free = lambda: self._num_free_bytes(self._num_seqs()) // sizes.state
        pool.on_eviction = states.checkpoints.drop

    def set_budget(self, nbytes: int) -> int:
        """Change the budget, to at most the first one and at least what one sequence of one block
        needs; returns by how many blocks the pool has to shrink for it, so that K/V lose the same
        share as checkpoints, which :meth:`evict_excess` evicts afterwards.
        """
        least = self.sizes.sequence + 2 * self.sizes.block
        self.sizes = replace(self.sizes, budget=min(max(nbytes, least), self._most))
        num_used = self.sizes.budget - self._num_free_bytes(self._num_seqs())
        if num_used <= self.sizes.budget:
            return 0
        num_blocks = self._pool.num_blocks
        num_kept = num_blocks * (self.sizes.budget - self.sizes.sequence) // num_used
        return num_blocks - max(2, num_kept)

    def evict_excess(self) -> None:
        """Evict checkpoints until the rest is within the budget."""
        checkpoints = self._states.checkpoints
        while self._num_free_bytes(self._num_seqs()) < 0 and checkpoints.evict():
            pass

    def _num_seqs(self, num_new: int = 0) -> int:
        """Sequences whose states are in memory, or will be; one at least, so that one can run."""
        return max(1, self.count_seqs() + num_new + self._states.num_released)

    @property
    def nbytes_used(self) -> int:
        """Slabs, states of running sequences, and checkpoints."""
        num_seqs = self.count_seqs() + self._states.num_released
        return self.sizes.budget - self._num_free_bytes(num_seqs)

    def max_num_blocks(self, num_new_seqs: int = 0) -> int:
        """The most blocks that the pool may have without any checkpoints, while these more
        sequences run.
        """
        return self.sizes.max_num_blocks(self._num_seqs(num_new_seqs))

    def make_room(self, num_blocks: int, num_new_seqs: int = 0) -> int:
        """How many blocks may be added to a pool that has fewer than ``num_blocks`` empty ones. For
        the prefix cache, what nothing else may need soon; as far as its free blocks are not enough,
        more, for which checkpoints are evicted.
        """
        num_lacking = num_blocks - self._pool.num_free_blocks
        num_seqs = self._num_seqs(num_new_seqs)
        if num_lacking > 0:  # These blocks are not for the prefix cache.
            self._max_num_seqs = num_seqs
        self._max_num_seqs = max(self._max_num_seqs, num_seqs)
        checkpoints, block = self._states.checkpoints, self.sizes.block
        while self._num_free_bytes(num_seqs) < num_lacking * block and checkpoints.evict():
            pass
        num_free = self._num_free_bytes(self._max_num_seqs)
        num_free -= self._num_wanted(self._max_num_seqs) * self.sizes.state
        needed = min(self._num_free_bytes(num_seqs) // block, num_lacking)
        return max(0, num_free // block, needed)

    def make_room_for_states(self, num_new_seqs: int) -> bool:
        """Evict checkpoints for the states of more sequences. False, without a change, if slabs
        have to shrink first (:meth:`num_blocks_to_shrink_by`).
        """
        num_seqs = self._num_seqs(num_new_seqs)
        if self._pool.num_usable_blocks > self.sizes.max_num_blocks(num_seqs):
            return False
        self._max_num_seqs = max(self._max_num_seqs, num_seqs)
        while self._num_free_bytes(num_seqs) < 0:
            if not self._states.checkpoints.evict():
                return False  # States of which the blocks have no hash yet.
        return True

    def num_blocks_to_shrink_by(self, num_new_seqs: int) -> int:
        """By how many blocks slabs have to shrink for the states of more sequences and for the
        checkpoints that are worth more than cached K/V.
        """
        num_free = self._num_free_bytes(self._num_seqs(num_new_seqs))
        num_missing = self._num_wanted(1) * self.sizes.state - num_free
        return max(0, -(-num_missing // self.sizes.block))

    @property
    def _num_states(self) -> int:
        """Checkpoints, including those that have no hash yet."""
        return len(self._states.checkpoints) + self._states.num_pending

    def _num_wanted(self, num_seqs: int) -> int:
        """Checkpoints for which cached K/V leave memory, beside those that are there."""
        checkpoints = self._states.checkpoints
        wanted = max(CHECKPOINTS_PER_SEQUENCE * num_seqs, checkpoints.num_wanted)
        return max(0, min(wanted, checkpoints.num_checkpoints) - self._num_states)

    def _num_free_bytes(self, num_seqs: int) -> int:
        """Bytes that nothing uses while these sequences run; negative if too much is used."""
        num_free = self.sizes.budget - self._pool.num_blocks * self.sizes.block
        return num_free - num_seqs * self.sizes.sequence - self._num_states * self.sizes.state
