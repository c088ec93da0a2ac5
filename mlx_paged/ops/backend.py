"""What a backend does: the operations on paged K/V slabs.

K and V are stored as their format's parts (``formats``), slabs of
``[num_blocks, num_kv_heads, block_size, width]`` each. Rows and queries of all sequences are
packed, ``[num_tokens, heads, width]``. What a model computes comes in as it is: a backend encodes
rows, and rotates queries where the format rotates keys. The method is PagedAttention (Kwon et al.,
2023), and the names follow vLLM's.
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
    """The backend is unknown, or can't be had on this machine or for these slabs."""


class Backend(ABC):
    """The operations on the slabs of any layer. A backend keeps nothing of a step.

    Every operation raises ``ValueError`` for shapes, dtypes, slots or block ids that don't fit the
    slabs; the message names the operation and the argument.
    """

    name: ClassVar[str]
    # Whether attention reads the slots past the end of a sequence in its last block. It hides
    # them by a weight of 0, and 0 * NaN is NaN, so they must hold finite numbers.
    reads_unused_slots: ClassVar[bool]
    # Whether slabs are written behind MLX's back, in the order of the calls. Where MLX sees the
    # writes, one that finds a reader of its slab in flight copies the slab.
    writes_in_place: bool = False

    @abstractmethod
    def reshape_and_cache(
        self,
        k: Parts,  # [num_tokens, num_kv_heads, width of the part] each
        v: Parts,  # the same
        kv: KVHandle,
        slot_mapping: SlotMapping,  # of num_tokens
    ) -> None:
        """Write each row, which is encoded, into its slot of the slabs, in place; rows whose slot
        is below 0 are padding and are skipped.

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
        """What :meth:`reshape_and_cache` does, of rows in any floating dtype that the format of
        ``kv`` encodes.
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

        The result is that of the two operations one after the other; a kernel does both in one
        dispatch, or two where rows are encoded. Where a sequence reads what another one writes in
        this step, ``step`` has to say so (``shares_new_blocks``).
        """

    @abstractmethod
    def attend(
        self,
        q: mx.array,  # [num_tokens, num_heads, key_dim]
        kv: KVHandle,
        step: AttentionMetadata,
        params: AttentionParams,
    ) -> mx.array:
        """Attention of any step, causal within each query run: runs that are short enough for the
        backend are decoded, longer ones prefilled.

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
        """What :meth:`gather_blocks` returns, of each sequence of a step."""

    @abstractmethod
    def gather_parts(self, kv: KVHandle, block_table: Sequence[int], num_tokens: int) -> StoredRows:
        """What the slabs hold of these tokens, bit for bit: the parts of K and of V,
        ``[num_kv_heads, num_tokens, width]`` each. They may be views, as above.
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
        """Fill whole blocks with zeros, in place: for blocks that a sequence will fill only in
        part, where the backend :attr:`reads_unused_slots`.
        """

    @abstractmethod
    def decode_plans(
        self, step: AttentionMetadata, keys: Collection[PlanKey]
    ) -> list[AttentionPlan] | None:
        """The plans of a step of single tokens, one per key, if they are all that attention reads
        of the step; then one trace computes all steps whose plans have the same sizes.

        ``None`` otherwise, as in plain MLX, where the graph is made from the host's numbers.
        """
