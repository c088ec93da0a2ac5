"""The configuration of cache and scheduler: frozen, and passed on as values. Imports no MLX."""

from __future__ import annotations

import numbers
import re
from dataclasses import dataclass

from mlx_paged.errors import ArgumentError, shown

BLOCK_SIZES = (8, 16, 32, 64)
ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}

_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(blocks?|[kmgt]?i?b?)\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MAX_BUDGET = 2**63
BUDGET_NOTATION = "bytes (65536, 512M, 2G) or whole blocks (256blocks), within 1..2**63"


@dataclass(frozen=True)
class KVBudget:
    """How much K/V may be held: a number of bytes or of blocks; exactly one of them is given."""

    nbytes: int | None = None
    num_blocks: int | None = None

    @classmethod
    def parse(cls, text: str | int, argument: str = "kv_cache_bytes") -> KVBudget:
        """``"512M"``, ``"2G"``, ``"1.5GiB"``, ``"65536"`` (bytes; K, M, G are powers of 1024) or
        ``"256blocks"``.

        Args:
            argument: the name of the argument that has the budget, for the error.

        Raises:
            ArgumentError: the text is none of these, not positive, or too large.
        """
        is_integer = isinstance(text, numbers.Integral) and not isinstance(text, bool)
        match = _BUDGET.fullmatch(str(text)) if is_integer or isinstance(text, str) else None
        if match is not None:
            unit = match[2].lower()
            is_blocks = unit.startswith("block")
            count = float(match[1]) * (1 if is_blocks else _UNITS[unit.rstrip("ib")])
            if 1 <= count < _MAX_BUDGET and (count.is_integer() or not is_blocks):
                return cls(num_blocks=int(count)) if is_blocks else cls(nbytes=int(count))
        raise ArgumentError(
            f"[kv cache] {argument} must be {BUDGET_NOTATION}, got {shown(text)}", argument
        )


@dataclass(frozen=True)
class KVCacheConfig:
    """The shape of a model's K/V and the budget for it.

    ``num_blocks`` is what sequences can hold together; a paged cache's slabs have one block more,
    the null block."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"  # of the K/V: float32, float16 or bfloat16
    block_size: int = 16  # tokens per block
    num_blocks: int = 256

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "num_blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"[kv cache] {name} must be a positive integer, got {value!r}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"[kv cache] block_size must be one of {BLOCK_SIZES}, got {self.block_size!r}"
            )
        if self.dtype not in ITEM_SIZES:
            raise ValueError(
                f"[kv cache] dtype must be one of {tuple(ITEM_SIZES)}, got {self.dtype!r}"
            )

    @property
    def nbytes_per_token(self) -> int:
        """K and V of one token in all layers: ``2 * num_layers * num_kv_heads * head_dim *
        itemsize`` bytes.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ITEM_SIZES[self.dtype]

    @property
    def nbytes_per_block(self) -> int:
        return self.nbytes_per_token * self.block_size

    @property
    def num_slots(self) -> int:
        """Tokens that the budget holds."""
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        """The budget in bytes, the paged cache's null block included."""
        return (self.num_blocks + 1) * self.nbytes_per_block

    @classmethod
    def within(
        cls,
        budget: KVBudget,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str = "float32",
        block_size: int = 16,
    ) -> KVCacheConfig:
        """The largest cache inside ``budget``; raises ``ValueError`` with the sum when not even one
        block fits.
        """
        one = cls(num_layers, num_kv_heads, head_dim, dtype, block_size, num_blocks=1)
        if budget.num_blocks is not None:
            num_blocks = budget.num_blocks
        else:
            # One block of the bytes is the null block.
            num_blocks = (budget.nbytes or 0) // one.nbytes_per_block - 1
        if num_blocks < 1:
            raise ArgumentError(
                f"[kv cache] a budget of {budget.nbytes} bytes holds no block: one block of "
                f"{block_size} tokens and the null block take 2 * {one.nbytes_per_block} = "
                f"{one.nbytes} bytes; raise kv_cache_bytes",
                "kv_cache_bytes",
            )
        return cls(num_layers, num_kv_heads, head_dim, dtype, block_size, num_blocks)


@dataclass(frozen=True)
class SchedulerConfig:
    """How many requests run at once, and what a step may hold. Names as in vLLM.

    Args:
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: new tokens of a step, over all sequences: a chunk of a prompt beside
            the decodes. Larger ones compute prompts a little faster and make running answers wait
            for them longer.
        watermark: the share of the blocks that stays free when a request is admitted beside others,
            so that these can go on for a while before anybody is preempted.
        priority_steps: a request whose priority is higher by 1 runs as if it had come so many steps
            later. So a late urgent request overtakes, and no request is overtaken for ever.
        enable_prefix_caching: whether requests share the K/V of equal beginnings.
        max_model_len: the most tokens that a prompt and its answer have together; ``None`` is no
            limit but the budget.

    Raises:
        ValueError: a value out of its range, named.
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
                f"[scheduler] enable_prefix_caching must be True or False, got {shown(self.enable_prefix_caching)}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"[scheduler] max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs "
                f"{self.max_num_seqs}: a step holds a token of each running sequence"
            )


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"[scheduler] {name} must be a positive integer, got {shown(value)}")
