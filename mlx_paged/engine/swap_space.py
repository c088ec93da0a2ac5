"""What becomes of the K/V of a preempted request: thrown away and computed anew, or swapped out to
host memory.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from mlx_paged.request import SeqId

T = TypeVar("T")


class SwapSpace(Generic[T]):
    """The K/V of preempted requests in host memory, and the rule for when it pays to put some
    there.

    Swap what fits if copying it out and in again takes less time than computing it anew,

        2 * num_tokens * seconds_per_copied_token < num_tokens * seconds_per_computed_token

    where both are means of what this engine measured so far. Before a chunk of a prompt was
    computed, nothing is swapped; before anything was copied, a copy counts as nothing, so the first
    preemption that fits measures it. Prompts that would be found in the prefix cache again are not
    foreseen.

    Args:
        num_tokens: the most tokens to keep; 0 never swaps.
    """

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self._places: dict[SeqId, int] = {}  # tokens of each
        self._contents: dict[SeqId, T] = {}
        self._computed_tokens, self._compute_seconds = 0, 0.0
        self._copied_tokens, self._copy_seconds = 0, 0.0

    @property
    def num_used_tokens(self) -> int:
        return sum(list(self._places.values()))  # a copy: stats are asked for from any thread

    def num_tokens_of(self, seq_id: SeqId) -> int:
        """Tokens of a sequence that are swapped out."""
        return self._places.get(seq_id, 0)

    def take_place(self, seq_id: SeqId, num_tokens: int) -> bool:
        """Whether these tokens shall be swapped out; they have their place then, until
        :meth:`give_back`.
        """
        if num_tokens > self.num_tokens - self.num_used_tokens or not self._is_cheaper():
            return False
        self._places[seq_id] = num_tokens
        return True

    def put(self, seq_id: SeqId, content: T) -> None:
        """The K/V of a sequence that has a place."""
        self._contents[seq_id] = content

    def get(self, seq_id: SeqId) -> T:
        return self._contents[seq_id]

    def give_back(self, seq_id: SeqId) -> None:
        """A sequence's K/V are back, or not needed any more."""
        self._places.pop(seq_id, None)
        self._contents.pop(seq_id, None)

    def clear(self) -> None:
        """Nobody's K/V are needed any more."""
        self._places.clear()
        self._contents.clear()

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, most of them of prompts, took so long."""
        self._computed_tokens += num_tokens
        self._compute_seconds += seconds

    def note_copied(self, num_tokens: int, seconds: float) -> None:
        """Copying so many tokens' K/V, one way, took so long."""
        self._copied_tokens += num_tokens
        self._copy_seconds += seconds

    def _is_cheaper(self) -> bool:
        copy = self._copy_seconds / max(1, self._copied_tokens)
        compute = self._compute_seconds / max(1, self._computed_tokens)
        return 2 * copy < compute
