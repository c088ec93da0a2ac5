"""Budget and scheduler settings, and the defaults of a cache. Imports no MLX."""

from __future__ import annotations

import numbers
import re
from dataclasses import dataclass

from mlx_paged.errors import shown

BLOCK_SIZES = (8, 16, 32, 64)
KV_CACHES = ("basic", "paged")

# The defaults of whatever makes a cache.
DEFAULT_BLOCK_SIZE = 16
DEFAULT_KV = "paged"
DEFAULT_BACKEND = "auto"

_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(blocks?|[kmgt]?i?b?)\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True)
class KVBudget:
    """How much K/V may be held, in bytes or in blocks: exactly one of the two is given."""

    nbytes: int | None = None
    num_blocks: int | None = None

    @classmethod
    def parse(cls, text: str | int) -> KVBudget:
        """``"512M"``, ``"2G"``, ``"1.5GiB"``, ``"65536"`` (bytes; K, M, G are powers of 1024) or
        ``"256blocks"``.

        Raises:
            ValueError: the text is none of these, or not positive.
        """
        is_integer = isinstance(text, numbers.Integral) and not isinstance(text, bool)
        match = _BUDGET.fullmatch(str(text)) if is_integer or isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"[kv-cache-bytes] can't read {shown(text)}; write bytes (65536, 512M, 2G) or "
                "blocks (256blocks)"
            )
        number, unit = float(match[1]), match[2].lower()
        if unit.startswith("block"):
            if not number.is_integer() or number < 1:
                raise ValueError(
                    f"[kv-cache-bytes] {shown(text)} must be a whole number of blocks, at least 1"
                )
            return cls(num_blocks=int(number))
        nbytes = int(number * _UNITS[unit.rstrip("ib")])
        if nbytes < 1:
            raise ValueError(f"[kv-cache-bytes] {shown(text)} must be at least 1 byte")
        return cls(nbytes=nbytes)


@dataclass(frozen=True)
class SchedulerConfig:
    """How many requests run at once, and how much a step may hold. The names are vLLM's.

    Args:
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: new tokens of a step, over all sequences: decodes and chunks of
            prompts. A larger number computes prompts a little faster, and running answers wait
            longer for each step.
        watermark: the share of the blocks that must stay free when a request is admitted beside
            others, so that these can continue for a while before one is preempted.
        priority_steps: a request whose priority is higher by 1 runs as if it had arrived this many
            steps later. So an urgent request overtakes others, but none is overtaken forever.
        enable_prefix_caching: whether requests with equal beginnings share their K/V.
        max_model_len: the most tokens that a prompt and its answer may have together; ``None``
            leaves the budget as the only limit.

    Raises:
        ValueError: for a value out of its range; the message names the argument.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    watermark: float = 0.05
    priority_steps: int = 1000
    enable_prefix_caching: bool = True
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "priority_steps"):
            _check_positive(name, getattr(self, name))
        if self.max_model_len is not None:
            _check_positive("max_model_len", self.max_model_len)
        if not isinstance(self.watermark, int | float) or not 0 <= self.watermark < 1:
            raise ValueError(
                f"[scheduler] watermark must be within 0..1, below 1, got {shown(self.watermark)}"
            )
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(
                f"[scheduler] enable_prefix_caching must be True or False, "
                f"got {shown(self.enable_prefix_caching)}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"[scheduler] max_num_batched_tokens {self.max_num_batched_tokens} must be at "
                f"least max_num_seqs {self.max_num_seqs}: a step holds a token of each running "
                f"sequence"
            )


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"[scheduler] {name} must be a positive integer, got {shown(value)}")
