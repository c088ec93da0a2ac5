"""``Retention``: which tokens of a sequence a group of layers keeps."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_paged.core.errors import BlockTableError

# Positions of a sequence without end start over after this many: an angle of RoPE is a float32
# product of position and frequency, which is exact to 0.004 here, and to 0.06 at a million.
POSITION_WRAP = 2**16


@dataclass(frozen=True)
class Retention:
    """Which tokens a group of layers keeps: all of them, or the first and the most recent ones.

    Tokens leave in whole blocks, so counts of tokens are those of blocks rounded up. What is kept
    depends on nothing but how many tokens a sequence has.

    Make one with :data:`KEEP_ALL`, :meth:`sliding_window` or :meth:`streaming`.

    Attributes:
        num_recent_tokens: how many tokens before the next one stay, at least; ``None`` keeps all.
        num_sink_tokens: how many of the first tokens stay, in whole blocks.
        stride: tokens that leave at a time, in whole blocks.
        cuts_runs: whether tokens of a step have to see the same ones as its first token, so that a
            step has to end where tokens leave. Otherwise attention masks what has left the window
            of each query.
        position_wrap: tokens that leave before positions start over; ``None`` for never.
        primary: the retention whose tokens are counted for that, if it is that of other layers.
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
            primary: of the layers beside them that stream.
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
        """For a model that was made to see all tokens, and is to see only the first
        ``num_sink_tokens`` and the last ``window`` ones (StreamingLLM, Xiao et al. 2023).

        Tokens leave up to ``max_stride`` at a time, so that prompts are computed in runs of that
        length: until then, up to a quarter more than ``window`` tokens are seen.
        """
        window, sinks = (-(-n // block_size) * block_size for n in (window, num_sink_tokens))
        stride = max(min(window // 4, max_stride) // block_size, 1) * block_size
        position_wrap = max(1, position_wrap // stride) * stride
        return cls(window, sinks, stride, cuts_runs=True, position_wrap=position_wrap)

    def num_evicted(self, num_tokens: int) -> int:
        """How many tokens of a sequence of ``num_tokens`` the next one does not see: those after
        the first ``num_sink_tokens``.
        """
        if self.num_recent_tokens is None:
            return 0
        num_beyond = num_tokens - self.num_sink_tokens - self.num_recent_tokens
        return max(0, num_beyond // self.stride * self.stride)

    def kept_blocks(self, num_blocks: int, block_size: int) -> list[int]:
        """Which blocks of a sequence of ``num_blocks`` full ones the next token sees, by their
        index: the first ones, and those after what is evicted.
        """
        num_sinks = min(num_blocks, self.num_sink_tokens // block_size)
        return [
            *range(num_sinks),
            *range(self.first_recent_block(num_blocks, block_size), num_blocks),
        ]

    def first_recent_block(self, num_blocks: int, block_size: int) -> int:
        """Of these blocks, the index of the first after the sinks and what is evicted."""
        num_evicted = self.num_evicted(num_blocks * block_size)
        return min(num_blocks, (self.num_sink_tokens + num_evicted) // block_size)

    def position_origin(self, num_tokens: int) -> int:
        """The token of a sequence of ``num_tokens`` whose position is 0, as if those before it had
        never been: what is kept of them has moved on with the others.
        """
        counted = self.primary or self
        if counted.position_wrap is None:
            return 0
        return counted.num_evicted(num_tokens) // counted.position_wrap * counted.position_wrap

    def is_findable(self, num_tokens: int) -> bool:
        """Whether all that is kept of this many tokens has the positions that it was computed at,
        so that it may be found in the prefix cache.
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
        """Of the first tokens of a sequence of ``num_tokens``, how many have other positions now
        than those that they were computed at, and are therefore held twice: all sinks or none.
        """
        return (
            self.num_sink_tokens
            if self.num_evicted(num_tokens) > self.position_origin(num_tokens)
            else 0
        )

    def max_num_held(self, num_tokens: int) -> int:
        """The most tokens that are held at a time until a sequence has ``num_tokens``, if its steps
        are no longer than one token or, where ``cuts_runs``, than ``max_run``. A step of n tokens
        that is not cut holds n - 1 more.
        """
        if self.num_recent_tokens is None:
            return num_tokens
        num_kept = self.num_sink_tokens + self.num_recent_tokens + self.stride
        if self.num_evicted(num_tokens):
            num_kept += self.num_sink_tokens  # once as they were computed, and once shifted
        return min(num_tokens, num_kept)

    def check_evicted(self, num_tokens: int, num_evicted_tokens: int) -> None:
        """Raise ``BlockTableError`` if a sequence cut to ``num_tokens`` would need tokens that are
        evicted.
        """
        if num_evicted_tokens > self.num_evicted(num_tokens):
            raise BlockTableError(
                f"BlockTable.trim_to: tokens {self.num_sink_tokens} to "
                f"{self.num_sink_tokens + num_evicted_tokens} have left the window, and a sequence "
                f"of {num_tokens} tokens needs some of them"
            )


KEEP_ALL = Retention()
