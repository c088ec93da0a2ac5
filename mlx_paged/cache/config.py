"""``KVCacheConfig``: the layers and blocks of a cache, and how many blocks fit a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mlx_paged.cache.layer import LayerSpec
from mlx_paged.cache.layer_groups import LayerGroup
from mlx_paged.core import KEEP_ALL, Retention
from mlx_paged.errors import ArgumentError
from mlx_paged.ops import KVFormat
from mlx_paged.options.argument_values import POSITIVE
from mlx_paged.options.config import BLOCK_SIZES, DEFAULT_BLOCK_SIZE, KVBudget


@dataclass(frozen=True)
class KVCacheConfig:
    """The layers of a model's K/V, which may differ, and the budget for them.

    Args:
        block_size: tokens per block.
        num_blocks: the budget in blocks, without a paged cache's null block.
        groups: which layers share a block table; by default one group that keeps all tokens.
        state_nbytes: the size of a sequence's recurrent state, which does not depend on its length
            and is not part of these blocks.
        state_layout: per recurrent cache, a description of the dtypes and shapes of its arrays.
        keeps_kv: whether the model has any K/V; without them, blocks only count tokens.

    Raises:
        ValueError: there are no layers, or a number is out of range.
    """

    layers: tuple[LayerSpec, ...]
    block_size: int = DEFAULT_BLOCK_SIZE
    num_blocks: int = 256
    groups: tuple[LayerGroup, ...] = ()
    state_nbytes: int = 0
    state_layout: tuple[str, ...] = ()
    keeps_kv: bool = True

    def __post_init__(self) -> None:
        if not self.groups:
            everything = LayerGroup(KEEP_ALL, tuple(range(len(self.layers))))
            object.__setattr__(self, "groups", (everything,))
        POSITIVE.check("kv cache", "num_layers", len(self.layers))
        POSITIVE.check("kv cache", "num_blocks", self.num_blocks)
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"[kv cache] block_size must be one of {BLOCK_SIZES}, got {self.block_size!r}"
            )

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str = "float32",
        block_size: int = DEFAULT_BLOCK_SIZE,
        num_blocks: int = 256,
    ) -> KVCacheConfig:
        """A cache with equal layers, and K and V rows of the same width."""
        POSITIVE.check("kv cache", "num_layers", num_layers)
        POSITIVE.check("kv cache", "head_dim", head_dim)
        spec = LayerSpec(num_kv_heads, head_dim, head_dim, format=KVFormat.dense(dtype))
        return cls((spec,) * num_layers, block_size, num_blocks)

    @classmethod
    def within(
        cls,
        budget: KVBudget,
        layers: Sequence[LayerSpec],
        block_size: int = DEFAULT_BLOCK_SIZE,
        groups: tuple[LayerGroup, ...] = (),
        num_reserved: int = 0,
    ) -> KVCacheConfig:
        """The largest cache within ``budget``.

        Args:
            num_reserved: bytes of it that one sequence needs for its recurrent states.

        Raises:
            ArgumentError: not even one block fits; with the sum.
        """
        one = cls(tuple(layers), block_size, 1, groups)
        if budget.num_blocks is not None:
            num_blocks = budget.num_blocks
        else:
            # One block of the bytes is the null block.
            num_blocks = ((budget.nbytes or 0) - num_reserved) // one.nbytes_per_block - 1
        if num_blocks < 1:
            states = f", and the states of a sequence {num_reserved}" if num_reserved else ""
            raise ArgumentError(
                f"[kv cache] a budget of {budget.nbytes} bytes holds no block: one block of "
                f"{block_size} tokens and the null block take 2 * {one.nbytes_per_block} = "
                f"{one.nbytes} bytes{states}; raise kv_cache_bytes to at least "
                f"{one.nbytes + num_reserved}",
                "kv_cache_bytes",
            )
        return cls(one.layers, block_size, num_blocks, one.groups)

    @cached_property
    def slabs(self) -> tuple[tuple[int, ...], ...]:
        """The layers that share each slab: the i-th layer of each group uses the i-th slab."""
        indices = [group.layers for group in self.groups]
        return tuple(
            tuple(layers[slab] for layers in indices if slab < len(layers))
            for slab in range(max(map(len, indices)))
        )

    @cached_property
    def retentions(self) -> tuple[Retention, ...]:
        """What each group of layers keeps."""
        return tuple(group.retention for group in self.groups)

    @cached_property
    def keeps_all(self) -> bool:
        """Whether all layers keep all tokens, in one group."""
        return self.retentions == (KEEP_ALL,)

    def group_of(self, layer: int) -> int:
        """The index of a layer's group."""
        return next(index for index, group in enumerate(self.groups) if layer in group.layers)

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of one token in all layers, as long as all of them keep it."""
        return sum(layer.nbytes_per_token for layer in self.layers)

    @property
    def nbytes_per_block(self) -> int:
        """Bytes of a block in all slabs."""
        nbytes = sum(self.layers[users[0]].nbytes_per_token for users in self.slabs)
        return nbytes * self.block_size

    def block_nbytes(self, group: int) -> int:
        """Bytes of a block in the slabs that a group of layers uses."""
        layers = self.groups[group].layers
        return sum(self.layers[layer].nbytes_per_token for layer in layers) * self.block_size

    @property
    def num_slots(self) -> int:
        """Tokens that fit the budget, as long as all layers keep them."""
        return self.num_blocks // len(self.groups) * self.block_size

    @property
    def nbytes(self) -> int:
        """The budget in bytes, the null block included."""
        return (self.num_blocks + 1) * self.nbytes_per_block
