"""The handle of one layer's K and V slabs: what every operation reads or writes."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

KV_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(slots=True, eq=False)
class KVHandle:
    """One layer's K and V slabs, ``[num_blocks, num_kv_heads, block_size, head_dim]`` each.

    Operations that write replace ``k`` and ``v`` of the handle in place. A slab is written without
    a copy only while nobody else holds it, so read it through a handle and do not keep ``handle.k``
    across a write.

    ``token`` is the last link of a chain of kernel calls that touch the slabs, where kernels do so
    behind MLX's back; each call binds it and leaves its own. Donated scatter, whose writes MLX does
    see, leaves it ``None``.

    Raises:
        ValueError: slabs of different or of other shapes or dtypes.
    """

    k: mx.array
    v: mx.array
    token: mx.array | None = None

    def __post_init__(self) -> None:
        if self.k.ndim != 4 or self.k.shape != self.v.shape:
            raise ValueError(
                f"[kv_handle] K and V slabs must both be [num_blocks, num_kv_heads, block_size, head_dim], "
                f"got {list(self.k.shape)} and {list(self.v.shape)}"
            )
        if self.k.dtype not in KV_DTYPES or self.v.dtype != self.k.dtype:
            raise ValueError(
                f"[kv_handle] slabs must be float32, float16 or bfloat16, got {self.k.dtype} and {self.v.dtype}"
            )

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: mx.Dtype = mx.float32,
    ) -> KVHandle:
        """Two evaluated slabs of zeros; ``2 * num_blocks * num_kv_heads * block_size * head_dim *
        itemsize`` bytes.
        """
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        handle = cls(mx.zeros(shape, dtype), mx.zeros(shape, dtype))
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
    def head_dim(self) -> int:
        return self.k.shape[3]

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
        return (self.k, self.v) if self.token is None else (self.k, self.v, self.token)

    def grow(self, num_new_blocks: int) -> None:
        """Add ``num_new_blocks`` blocks of zeros at the end. Copies the slabs once; block ids keep
        their meaning.

        Raises:
            RuntimeError: MLX's, when memory runs out; the slabs are as they were.
        """
        self.leave_chain()
        num_blocks = self.num_blocks
        extra = mx.zeros((num_new_blocks, *self.k.shape[1:]), self.dtype)
        # One slab after the other: the transient is one slab, not two.
        self.k = _evaluated(mx.concatenate([self.k, extra]))
        try:
            self.v = _evaluated(mx.concatenate([self.v, extra]))
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
                f"[kv_handle] shrink_to: num_blocks must be within 1..{self.num_blocks}, got {num_blocks}"
            )
        self.leave_chain()
        # A slice alone would be a view, and keep the whole slab. The product is exact and never
        # shares memory.
        self.k = _evaluated(self.k[:num_blocks] * 1)
        self.v = _evaluated(self.v[:num_blocks] * 1)

    def leave_chain(self) -> None:
        """Wait until the kernels called so far are done, before MLX's own operations, which no
        token orders.
        """
        if self.token is not None:
            mx.eval(self.token)
            self.token = None


def _evaluated(array: mx.array) -> mx.array:
    """So that what fails does so before the array takes another one's place."""
    mx.eval(array)
    return array
