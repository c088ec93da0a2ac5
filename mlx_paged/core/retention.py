"""``Retention``: which tokens of a sequence a group of layers keeps."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_paged.core.errors import BlockTableError

# Positions of an endless sequence start over after this many: the angle of RoPE is a float32
# product of position and frequency, which is exact to 0.004 here, and to 0.06 at a million.
POSITION_WRAP = 2**16


@dataclass(frozen=True)
class Retention:
    """Which tokens a group of layers keeps: all of them, or the first and the most recent ones.

    Tokens are evicted in whole blocks, so their counts are rounded up to blocks. What is kept
    depends only on the number of tokens of a sequence.

    Make one with :data:`KEEP_ALL`, :meth:`sliding_window` or :meth:`streaming`.

    Attributes:
        num_recent_tokens: the least number of tokens kept before the next one; ``None`` keeps all.
        num_sink_tokens: how many of the first tokens are kept, in whole blocks.
        stride: tokens that are evicted at a time, in whole blocks.
        cuts_runs: whether all tokens of a step must see the same earlier tokens, so that a step
            ends where tokens are evicted. Otherwise attention masks what is outside the window of
            each query.
        position_wrap: evicted tokens after which positions start over; ``None`` for never.
        primary: the retention that counts those tokens, if it is that of other layers.
    """

    num_recent_tokens: int | None = None
    num_sink_tokens: int = 0
    stride: int = 1
    cuts_runs: bool = False
    position_wrap: int | None = None
    primary: Retention | None = None

    @classmethod
    def sliding_window(
        cls, window: int, block_size: int, primary: Retention | None = None
    ) -> Retention:
        """For layers in which each query sees its last ``window`` tokens, itself included.

        Args:
            primary: of the streaming layers of the same model.
        """
        return cls(window - 1, 0, block_size, primary=primary)

    @classmethod
    def streaming(
        cls,
        window: int,
        num_sink_tokens: int,
        block_size: int,
        max_stride: int,
        position_wrap: int = POSITION_WRAP,
    ) -> Retention:
        """For a model with full attention that is limited to the first ``num_sink_tokens`` and the
        last ``window`` tokens (StreamingLLM, Xiao et al. 2023).

        Up to ``max_stride`` tokens are evicted at a time, so that prompts are computed in runs of
        that length; until then, up to a quarter more than ``window`` tokens are seen.
        """
        window, sinks = (-(-n // block_size) * block_size for n in (window, num_sink_tokens))
        stride = max(min(window // 4, max_stride) // block_size, 1) * block_size
        position_wrap = max(1, position_wrap // stride) * stride
        return cls(window, sinks, stride, cuts_runs=True, position_wrap=position_wrap)

    def num_evicted(self, num_tokens: int) -> int:
        """How many tokens after the sinks the next token of a sequence of ``num_tokens`` does not
        see.
        """
        if self.num_recent_tokens is None:
            return 0
        num_beyond = num_tokens - self.num_sink_tokens - self.num_recent_tokens
        return max(0, num_beyond // self.stride * self.stride)

    def kept_blocks(self, num_blocks: int, block_size: int) -> list[int]:
        """The indices of the blocks that the next token of a sequence of ``num_blocks`` full blocks
        sees: the sinks, and those after the evicted ones.
        """
        num_sinks = min(num_blocks, self.num_sink_tokens // block_size)
        return [
            *range(num_sinks),
            *range(self.first_recent_block(num_blocks, block_size), num_blocks),
        ]

    def first_recent_block(self, num_blocks: int, block_size: int) -> int:
        """The index of the first of these blocks after the sinks and the evicted ones."""
        num_evicted = self.num_evicted(num_blocks * block_size)
        return min(num_blocks, (self.num_sink_tokens + num_evicted) // block_size)

    def position_origin(self, num_tokens: int) -> int:
        """The token of a sequence of ``num_tokens`` whose position is 0. It is the first one until
        positions start over; sinks are shifted with the others.
        """
        counted = self.primary or self
        if counted.position_wrap is None:
            return 0
        return counted.num_evicted(num_tokens) // counted.position_wrap * counted.position_wrap

    def is_findable(self, num_tokens: int) -> bool:
        """Whether all kept blocks of this many tokens have the positions at which they were
        computed, so that they may be in the prefix cache.
        """
        first = self.num_sink_tokens + self.num_evicted(num_tokens)
        return self.position_origin(first) == self.position_origin(num_tokens)

    def max_run(self, num_tokens: int) -> int | None:
        """How many tokens may be added to ``num_tokens`` in one step; ``None`` for any number."""
        if not self.cuts_runs or self.num_recent_tokens is None:
            return None
        num_kept = self.num_sink_tokens + self.num_recent_tokens
        return num_kept + self.num_evicted(num_tokens) + self.stride - num_tokens

    def num_moved_sink_tokens(self, num_tokens: int) -> int:
        """How many sink tokens of a sequence of ``num_tokens`` are shifted from the positions at
        which they were computed, and therefore held twice: all or none.
        """
        return (
            self.num_sink_tokens
            if self.num_evicted(num_tokens) > self.position_origin(num_tokens)
            else 0
        )

    def max_num_held(self, num_tokens: int) -> int:
        """The peak number of tokens held by a sequence that grows to ``num_tokens``, in steps of
        one token or, where ``cuts_runs``, of up to ``max_run``. A longer step of n tokens holds
        n - 1 more.
        """
        if self.num_recent_tokens is None:
            return num_tokens
        num_kept = self.num_sink_tokens + self.num_recent_tokens + self.stride
        if self.num_evicted(num_tokens):
            num_kept += self.num_sink_tokens  # as they were computed and shifted
        return min(num_tokens, num_kept)

    def check_evicted(self, num_tokens: int, num_evicted_tokens: int) -> None:
        """Raise ``BlockTableError`` if evicted tokens are needed after a trim to ``num_tokens``."""
        if num_evicted_tokens > self.num_evicted(num_tokens):
            raise BlockTableError(
                f"BlockTable.trim_to: tokens {self.num_sink_tokens} to "
                f"{self.num_sink_tokens + num_evicted_tokens} have left the window, and a sequence "
                f"of {num_tokens} tokens needs some of them"
            )


KEEP_ALL = Retention()
