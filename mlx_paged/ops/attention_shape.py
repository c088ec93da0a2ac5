"""``AttentionShape``: what the kernels of a layer are specialised for. Layers with equal shapes
share kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_paged.ops.formats import KVFormat
from mlx_paged.ops.kernels import why_no_attention, why_unsupported


@dataclass(frozen=True)
class AttentionShape:
    """The heads of a layer and how its slabs store them."""

    num_kv_heads: int
    group: int  # query heads per KV head
    key_dim: int
    value_dim: int
    block_size: int
    format: KVFormat
    softcap: float | None = None  # of the scores
    holds_latents: bool = False  # in place of K, and their rotated keys in place of V

    @property
    def dtype(self) -> mx.Dtype:
        """Of queries and of dense rows."""
        return self.format.dtype

    @property
    def why_unsupported(self) -> str | None:
        """Why no kernel can write and read slabs of this shape, or ``None``."""
        return why_unsupported(self.key_dim, self.value_dim, self.block_size, self.format)

    @property
    def why_no_attention(self) -> str | None:
        """Why the attention kernel does not support this shape, or ``None``."""
        rotates_keys = self.format.rotates_keys
        return why_no_attention(
            self.key_dim, self.value_dim, self.group, self.holds_latents, rotates_keys
        )

    def __str__(self) -> str:
        width = f"head_dim {self.key_dim}"
        if self.key_dim != self.value_dim:
            width = f"key_dim {self.key_dim} beside value_dim {self.value_dim}"
        cap = "" if self.softcap is None else f", scores capped at {self.softcap:g}"
        return (
            f"{self.format}, {width}, blocks of "
            f"{self.block_size}, {self.group} query heads for each of {self.num_kv_heads} KV heads"
            f"{cap}"
        )
