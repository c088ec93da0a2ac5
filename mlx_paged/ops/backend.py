"""``Backend``: the operations on paged K/V slabs.

K and V are stored as their format's parts (``formats``), slabs of
``[num_blocks, num_kv_heads, block_size, width]`` each. Rows and queries of all sequences are
packed, ``[num_tokens, heads, width]``, in the dtype of the model: a backend encodes rows, and
rotates queries where the format rotates keys. The method is PagedAttention (Kwon et al., 2023), and
the names follow vLLM's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

import mlx.core as mx

from mlx_paged.ops.attention_plan import AttentionPlan, PlanKey
from mlx_paged.ops.formats import Parts
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, AttentionParams, Rows, SlotMapping, StoredRows


class BackendError(ValueError):
    """The backend is unknown, or not available on this machine or for these slabs."""


class Backend(ABC):
    """The operations on the slabs of any layer. A backend keeps no state of a step.

    Every operation raises ``ValueError`` for shapes, dtypes, slots or block ids that don't fit the
    slabs; the message names the operation and the argument.
    """

    name: ClassVar[str]
    # Whether attention reads the slots past the end of a sequence in its last block. Their weight
    # is 0, but 0 * NaN is NaN, so they must hold finite numbers.
    reads_unused_slots: ClassVar[bool]
    # Whether slabs are written in place without MLX's knowledge, in the order of the calls. Writes
    # that MLX knows of copy a slab if a reader of it is in flight.
    writes_in_place: bool = False

    @abstractmethod
    def reshape_and_cache(
        self,
        k: Parts,  # [num_tokens, num_kv_heads, width of the part] each
        v: Parts,  # the same
        kv: KVHandle,
        slot_mapping: SlotMapping,  # of num_tokens
    ) -> None:
        """Write encoded rows into their slots of the slabs, in place; rows whose slot is below 0
        are padding and are skipped.

        ``write_slot`` and ``push_row`` elsewhere. Costs O(rows), whatever the size of the slab, as
        long as ``kv`` has the only reference to the slabs.
        """

    @abstractmethod
    def update(
        self,
        k: mx.array,  # [num_tokens, num_kv_heads, key_dim]
        v: mx.array,  # [num_tokens, num_kv_heads, value_dim]
        kv: KVHandle,
        slot_mapping: SlotMapping,  # of num_tokens
    ) -> None:
        """Encode rows of any floating dtype in the format of ``kv`` and write them into their
        slots, as :meth:`reshape_and_cache` does.
        """

    @abstractmethod
    def update_and_attend(
        self,
        q: mx.array,  # [num_tokens, num_heads, key_dim]
        k: mx.array,  # [num_tokens, num_kv_heads, key_dim]
        v: mx.array,  # [num_tokens, num_kv_heads, value_dim]
        kv: KVHandle,
        step: AttentionMetadata,
        params: AttentionParams,
    ) -> mx.array:
        """:meth:`update` the slots of ``step.slot_mapping``, then :meth:`attend`: one layer of one
        step.

        The result is that of the two operations in turn; kernels do both in one dispatch, or in two
        where rows are encoded. If a sequence reads blocks that another one writes in this step,
        ``step.shares_new_blocks`` must be set.
        """

    @abstractmethod
    def attend(
        self,
        q: mx.array,  # [num_tokens, num_heads, key_dim]
        kv: KVHandle,
        step: AttentionMetadata,
        params: AttentionParams,
    ) -> mx.array:
        """Attention of any step, causal within each query run. Short runs are decoded block by
        block, longer ones prefilled; the backend sets the limit.

        Returns:
            ``[num_tokens, num_heads, value_dim]`` in the dtype of ``q``.
        """

    @abstractmethod
    def gather_blocks(self, kv: KVHandle, block_table: Sequence[int], num_tokens: int) -> Rows:
        """The decoded K and V of the first ``num_tokens`` tokens of a table, ``[num_kv_heads,
        num_tokens, key_dim]`` and ``[..., value_dim]``, in the dtype of the activations.

        ``materialize`` elsewhere. The result may be a view of the slabs: while it is held, the next
        write copies them whole.
        """

    @abstractmethod
    def gather_step(self, kv: KVHandle, step: AttentionMetadata) -> list[Rows]:
        """The result of :meth:`gather_blocks` for each sequence of a step."""

    @abstractmethod
    def gather_parts(self, kv: KVHandle, block_table: Sequence[int], num_tokens: int) -> StoredRows:
        """The stored bits of these tokens: the parts of K and of V,
        ``[num_kv_heads, num_tokens, width]`` each. They may be views, as in :meth:`gather_blocks`.
        """

    @abstractmethod
    def copy_blocks(self, kv: KVHandle, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks within the slabs, in place, for copy-on-write.

        No block may be named twice as a destination, or be both source and destination.
        """

    @abstractmethod
    def write_blocks(
        self,
        kv: KVHandle,
        block_ids: Sequence[int],
        k: Parts,  # [num_blocks, num_kv_heads, block_size, width of the part] each
        v: Parts,  # the same
    ) -> None:
        """Write whole blocks, in place. No block may be named twice."""

    @abstractmethod
    def zero_blocks(self, kv: KVHandle, block_ids: Sequence[int]) -> None:
        """Fill whole blocks with zeros, in place: for partly filled blocks, where the backend
        :attr:`reads_unused_slots`.
        """

    @abstractmethod
    def decode_plans(
        self, step: AttentionMetadata, keys: Collection[PlanKey]
    ) -> list[AttentionPlan] | None:
        """The plans of a step of single tokens, one per key, if attention reads nothing else of the
        step. One trace then computes all steps whose plans have the same sizes.

        ``None`` otherwise, as in plain MLX, whose graph depends on host values.
        """
