"""Host memory for the K/V of preempted requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from mlx_paged.argument_values import as_integer
from mlx_paged.config import KVBudget
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.request import SeqId

if TYPE_CHECKING:  # the scheduler, which uses this room, imports no arrays
    from mlx_paged.cache import KVCache

T = TypeVar("T")

# Floating-point operations that a chip does in the time in which it moves one byte: an M1 does
# 2.6 TFLOPS at 68 GB/s, and its successors are close to that.
OPERATIONS_PER_BYTE = 38
# The default swap space, as a share of the K/V budget.
DEFAULT_SWAP_SHARE = 1 / 8


def is_moving_cheaper(num_parameters: int, nbytes_per_token: int, operations_per_byte: int) -> bool:
    """Whether a token's K/V are moved in less time than they are computed, which takes two
    operations per parameter. The rule knows sizes and no clock, so that every machine decides
    alike.

    Args:
        operations_per_byte: that the chip does in the time in which one byte is moved.
    """
    return nbytes_per_token * operations_per_byte < 2 * num_parameters


def is_swapping_cheaper(num_parameters: int, kv_nbytes_per_token: int) -> bool:
    """Whether K/V are copied out and in again in less time than they are computed."""
    return is_moving_cheaper(num_parameters, 2 * kv_nbytes_per_token, OPERATIONS_PER_BYTE)


def num_swap_tokens(swap_bytes: str | int | None, cache: KVCache, num_parameters: int) -> int:
    """The tokens that a swap space of ``swap_bytes`` holds, by default ``DEFAULT_SWAP_SHARE`` of
    the budget if swapping is cheaper than computing.

    Raises:
        ArgumentError: it is no budget and not 0, or the cache can't swap.
    """
    config = cache.config
    if swap_bytes is None:
        is_cheaper = is_swapping_cheaper(num_parameters, config.nbytes_per_token)
        return int(config.num_slots * DEFAULT_SWAP_SHARE) if cache.can_swap and is_cheaper else 0
    is_zero = isinstance(swap_bytes, str) and swap_bytes.strip() == "0"
    if is_zero or as_integer(swap_bytes) == 0:
        return 0
    budget = KVBudget.parse(swap_bytes, "swap_bytes")
    if not cache.can_swap:
        kind = f"a {cache.kind} cache" if cache.manager.keeps_all else "a cache with windows"
        if config.state_nbytes:
            kind = "a model with a recurrent state"
        raise ArgumentError(
            f"[engine] swap_bytes={shown(swap_bytes)} needs kv='paged' and layers that keep all "
            f"tokens: preempted requests of {kind} are computed again; leave it out",
            "swap_bytes",
        )
    if budget.num_blocks is not None:
        return budget.num_blocks * config.block_size
    return (budget.nbytes or 0) // config.nbytes_per_token


class SwapSpace(Generic[T]):
    """The K/V of preempted requests; what fits is swapped, anything else is computed again.

    Beside them, K/V that can't be computed may be held for all requests of a salt, which begin with
    them. They take none of the room.

    Args:
        num_tokens: the most tokens to keep; 0 never swaps.
    """

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self._num_tokens_of: dict[SeqId, int] = {}
        self._contents: dict[SeqId, T] = {}
        self._held: dict[str, tuple[int, T]] = {}  # by salt

    def hold(self, cache_salt: str, num_tokens: int, content: T) -> None:
        """Keep the first tokens of all requests of a salt."""
        self._held[cache_salt] = num_tokens, content

    def num_held_tokens(self, cache_salt: str | None) -> int:
        """Tokens that are held for requests of a salt."""
        return self._held[cache_salt][0] if cache_salt in self._held else 0

    def lend(self, seq_id: SeqId, cache_salt: str | None) -> None:
        """Let a sequence that has nothing here have what is held for its salt."""
        if cache_salt in self._held and seq_id not in self._num_tokens_of:
            self._num_tokens_of[seq_id], self._contents[seq_id] = self._held[cache_salt]

    @property
    def num_used_tokens(self) -> int:
        return sum(list(self._num_tokens_of.values()))  # a copy: any thread may ask for stats

    def num_tokens_of(self, seq_id: SeqId) -> int:
        """Tokens of a sequence that are swapped out."""
        return self._num_tokens_of.get(seq_id, 0)

    def reserve(self, seq_id: SeqId, num_tokens: int) -> bool:
        """Keep room for a sequence until :meth:`release`; False if there is none."""
        if num_tokens > self.num_tokens - self.num_used_tokens:
            return False
        self._num_tokens_of[seq_id] = num_tokens
        return True

    def put(self, seq_id: SeqId, content: T) -> None:
        """Store the K/V of a sequence that has room."""
        self._contents[seq_id] = content

    def get(self, seq_id: SeqId) -> T:
        return self._contents[seq_id]

    def release(self, seq_id: SeqId) -> None:
        """Forget a sequence's K/V, if there are any."""
        self._num_tokens_of.pop(seq_id, None)
        self._contents.pop(seq_id, None)

    def clear(self) -> None:
        """Forget everybody's K/V."""
        self._num_tokens_of.clear()
        self._contents.clear()
