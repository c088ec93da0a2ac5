"""The handle of one layer's K and V slabs: what every operation reads or writes."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

KV_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(slots=True, eq=False)
class KVHandle:
    """One layer's K slab ``[num_blocks, num_kv_heads, block_size, key_dim]`` and its V slab, which
    may have another width, ``value_dim``.

    Operations that write replace ``k`` and ``v`` of the handle in place. A slab is written without
    a copy only while nobody else holds it, so read it through a handle and do not keep ``handle.k``
    across a write.

    Kernels write slabs behind MLX's back. ``fence`` is the last link of the chain of kernel calls
    that touch these slabs: each call binds it and leaves its own. It is ``None`` where MLX sees all
    writes.

    Raises:
        ValueError: slabs that don't fit each other, or of another shape or dtype.
    """

    k: mx.array
    v: mx.array
    fence: mx.array | None = None

    def __post_init__(self) -> None:
        if self.k.ndim != 4 or self.k.shape[:3] != self.v.shape[:3] or self.v.ndim != 4:
            raise ValueError(
                "[kv_handle] K and V slabs must be [num_blocks, num_kv_heads, block_size, key_dim] "
                f"and [..., value_dim], got {list(self.k.shape)} and {list(self.v.shape)}"
            )
        if self.k.dtype not in KV_DTYPES or self.v.dtype != self.k.dtype:
            raise ValueError(
                "[kv_handle] slabs must be float32, float16 or bfloat16, "
                f"got {self.k.dtype} and {self.v.dtype}"
            )

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        key_dim: int,
        value_dim: int,
        dtype: mx.Dtype = mx.float32,
    ) -> KVHandle:
        """Two evaluated slabs of zeros, ``num_blocks * num_kv_heads * block_size * (key_dim +
        value_dim) * itemsize`` bytes.
        """
        rows = (num_blocks, num_kv_heads, block_size)
        handle = cls(mx.zeros((*rows, key_dim), dtype), mx.zeros((*rows, value_dim), dtype))
        mx.eval(handle.k, handle.v)
        return handle

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def key_dim(self) -> int:
        return self.k.shape[3]

    @property
    def value_dim(self) -> int:
        return self.v.shape[3]

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def dtype(self) -> mx.Dtype:
        return self.k.dtype

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What has to be evaluated for every write so far to have happened."""
        return (self.k, self.v) if self.fence is None else (self.k, self.v, self.fence)

    def grow(self, num_new_blocks: int) -> None:
        """Add ``num_new_blocks`` blocks of zeros at the end. Copies the slabs once; block ids keep
        their meaning.

        Raises:
            RuntimeError: MLX's, when memory runs out; the slabs are as they were.
        """
        self.leave_chain()
        num_blocks = self.num_blocks
        # One slab after the other: the transient is one slab, not two.
        self.k = _grown(self.k, num_new_blocks)
        try:
            self.v = _grown(self.v, num_new_blocks)
        except RuntimeError:
            self.k = _evaluated(self.k[:num_blocks] * 1)
            raise

    def shrink_to(self, num_blocks: int) -> None:
        """Drop the blocks with id >= ``num_blocks``. Copies what stays, one slab after the other.

        Raises:
            ValueError: unless 1 <= ``num_blocks`` <= the present number.
        """
        if not 1 <= num_blocks <= self.num_blocks:
            raise ValueError(
                f"[kv_handle] shrink_to: num_blocks must be within 1..{self.num_blocks}, "
                f"got {num_blocks}"
            )
        self.leave_chain()
        # A slice alone would be a view, and keep the whole slab. The product is exact and never
        # shares memory.
        self.k = _evaluated(self.k[:num_blocks] * 1)
        self.v = _evaluated(self.v[:num_blocks] * 1)

    def leave_chain(self) -> None:
        """Wait for the kernels called so far: no fence orders MLX's own operations behind them."""
        if self.fence is not None:
            mx.eval(self.fence)
            self.fence = None


def _grown(slab: mx.array, num_new_blocks: int) -> mx.array:
    extra = mx.zeros((num_new_blocks, *slab.shape[1:]), slab.dtype)
    return _evaluated(mx.concatenate([slab, extra]))


def _evaluated(array: mx.array) -> mx.array:
    """Evaluate, so that a failure comes before the array takes another one's place."""
    mx.eval(array)
    return array
