"""The check that kernels write slabs in place on this device, in the order of the fences. It runs
once, before the first real write.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_paged.ops import kernels
from mlx_paged.ops.formats import KVFormat
from mlx_paged.ops.gather_plan import GatherPlan
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import padded
from mlx_paged.ops.tried_once import GoOn, TrialResult, TriedOnce

NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 64, 4, 16, 128
NUM_TURNS = 8
NUM_LOOKS = 16  # for a copy of a slab
FORMAT = KVFormat.dense("float16")


def _try_writes_in_place(go_on: GoOn) -> TrialResult[bool]:
    try:
        failure = check_writes_in_place()
    except Exception as error:  # any error of a compiler or a driver
        failure = f"a write in place raised {type(error).__name__}: {error}"
    if failure is None:
        return TrialResult(True)
    instead = "slots are written by donated scatter instead, which is slower"
    return TrialResult(False, (f"[metal] {failure}; {instead}",))


writes_in_place = TriedOnce(_try_writes_in_place)
"""Whether :func:`check_writes_in_place` succeeds; a warning says what failed."""


def check_writes_in_place() -> str | None:
    """Write and read a slab of a megabyte in turns, in one graph; returns the failure, or ``None``.

    Each turn writes another number to every slot and gathers all slots, so a write that is lost or
    out of order is visible in the results. A copied slab is visible in the memory counters.
    """
    kv = KVHandle.allocate(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM, FORMAT)
    before = kv.k[0]
    slots = mx.arange(kv.num_slots)
    plan = GatherPlan.pack([range(NUM_BLOCKS)], [kv.num_slots], BLOCK_SIZE)
    rows = [
        mx.full((kv.num_slots, NUM_KV_HEADS, HEAD_DIM), turn, kv.dtype)
        for turn in range(1, NUM_TURNS + 1)
    ]
    mx.eval(rows)
    gathered = []
    for turn, row in enumerate(rows, 1):
        (kv.fence,) = kernels.write_slots((row,), (-row,), kv, slots)()
        keys, values, kv.fence = kernels.gather(kv, plan)()
        gathered.append((turn, keys, values))
    verdicts = [mx.all(keys == turn) & mx.all(values == -turn) for turn, keys, values in gathered]
    del gathered
    mx.eval(verdicts)
    wrong = [turn for turn, verdict in enumerate(verdicts, 1) if not verdict.item()]
    if wrong:
        turns = f"(turns {wrong} of {NUM_TURNS})"
        return f"writes in place are lost or out of order on this device {turns}"
    if kv.k[0] is not before or not mx.all(before == NUM_TURNS).item():
        return "the last write in place is not visible to MLX on this device"
    return _check_no_copy(kv)


def _check_no_copy(kv: KVHandle) -> str | None:
    # Another thread may be reading weights. A copy would be visible every time.
    limit = kv.k[0].nbytes // 2
    if any(_nbytes_of_a_write(kv) < limit for _ in range(NUM_LOOKS)):
        return None
    return (
        f"each write of one row in place allocates {limit} bytes or more, "
        f"so MLX copies the slab of {kv.k[0].nbytes} bytes"
    )


def _nbytes_of_a_write(kv: KVHandle) -> int:
    """The memory that the process allocates during a write of one row."""
    row = mx.zeros((1, NUM_KV_HEADS, HEAD_DIM), kv.dtype)
    mx.eval(row)
    mx.synchronize()
    mx.clear_cache()
    base = mx.get_active_memory()
    (kv.fence,) = kernels.write_slots((row,), (row,), kv, padded([0]))()
    mx.eval(kv.fence)
    mx.synchronize()
    # Freed memory is in MLX's cache. Its peak counter is not used: that would need a reset.
    return mx.get_active_memory() + mx.get_cache_memory() - base
