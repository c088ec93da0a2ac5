"""Which bytes of the slabs each call of our kernels may write: what its slot mapping, plan or block
ids name.
"""

from __future__ import annotations

import itertools

import mlx.core as mx
from metal_emulator.checks import Call, Ranges

from mlx_paged.ops import kernels


def slots_of_the_step(call: Call) -> dict[str, Ranges]:
    """A rule for ``Checks(writable=...)``: nothing but the slots of new rows and the blocks that
    are named.
    """
    name = call.kernel.removeprefix("mlx_paged_")
    if name in ("reshape_and_cache", "encode_and_cache"):
        num_tokens = call.grid[1]
        if name == "encode_and_cache":
            num_tokens = call.inputs["num_tokens"].item()
        slots = call.inputs["slot_mapping"].tolist()[:num_tokens]
        return _slots(call, [slot for slot in slots if slot >= 0])
    if name == "paged_attention":
        return _slots(
            call, _new_slots(call.inputs["plan"].tolist(), call.inputs["key_slab"].shape[2])
        )
    if name == "copy_blocks":
        return _blocks(call, call.inputs["src_dst_pairs"].tolist()[1 : 2 * call.grid[1] : 2])
    return {}


def _new_slots(plan: list[int], block_size: int) -> list[int]:
    work_end, _, has_rows = plan[:3]
    if not has_rows:
        return []
    slots = []
    for record in range(8, work_end, 7):
        begin, end, context_len, query_len, _, _, blocks = plan[record : record + 7]
        for position in range(max(begin, context_len - query_len), min(end, context_len)):
            slots.append(plan[blocks + position // block_size] * block_size + position % block_size)
    return slots


def _slots(call: Call, slots: list[int]) -> dict[str, Ranges]:
    ranges = {}
    for name, slab in _slabs(call).items():
        _, num_kv_heads, block_size, width = slab.shape
        row = width * slab.itemsize
        starts = [
            ((slot // block_size * num_kv_heads + head) * block_size + slot % block_size) * row
            for slot, head in itertools.product(slots, range(num_kv_heads))
        ]
        ranges[name] = sorted((start, start + row) for start in starts)
    return ranges


def _blocks(call: Call, block_ids: list[int]) -> dict[str, Ranges]:
    ranges = {}
    for name, slab in _slabs(call).items():
        nbytes = slab.nbytes // slab.shape[0]
        ranges[name] = sorted((block * nbytes, (block + 1) * nbytes) for block in set(block_ids))
    return ranges


def _slabs(call: Call) -> dict[str, mx.array]:
    """Every part of them."""
    return {name: array for name, array in call.inputs.items() if name in kernels.AFFINE_SLABS}
