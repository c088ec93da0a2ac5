"""Kernels that write into their inputs, as slot writes do, and what of it is allowed."""

import mlx.core as mx
import pytest
from kernel_helpers import INDEX, run
from metal_emulator import Checks, ForbiddenWrite, MemoryFault

pytestmark = pytest.mark.usefixtures("compiler")

WRITE_SLOTS = """
    uint i = thread_position_in_grid.x;
    int slot = slot_mapping[i / 4];
    if (slot >= 0) ((device T*)slab)[slot * 4 + i % 4] = rows[i];
    if (i == 0) token[0] = 1;"""


def write_slots(
    slab: mx.array, rows: mx.array, slots: list[int], checks: Checks | None = None
) -> None:
    run(
        WRITE_SLOTS,
        {"slab": slab, "rows": rows, "slot_mapping": mx.array(slots)},
        {"token": ((1,), mx.int32)},
        grid=(rows.size,),
        template=[("T", slab.dtype)],
        checks=checks,
        name="write_slots",
    )


def only_slots(slots: list[int]) -> Checks:
    """A write outside these slots of ``slab``, or to any other input, is refused."""

    def writable(call):
        row_bytes = call.inputs["slab"].nbytes // 16
        return {"slab": [(slot * row_bytes, (slot + 1) * row_bytes) for slot in slots if slot >= 0]}

    return Checks(writable=writable)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_writes_are_seen_through_the_same_array(dtype):
    slab, rows = mx.zeros((2, 8, 4), dtype), mx.random.normal((3, 4)).astype(dtype)
    view = slab[1]
    write_slots(slab, rows, [3, -1, 12], only_slots([3, 12]))
    expected = mx.zeros((16, 4), dtype)
    expected[3], expected[12] = rows[0], rows[2]
    assert mx.array_equal(slab.reshape(16, 4), expected)
    # No copy was made: MLX's own view of the array sees the write, too.
    assert mx.array_equal(view, expected[8:])


def test_a_write_to_a_slot_that_is_not_in_the_slot_mapping():
    slab, rows = mx.zeros((2, 8, 4)), mx.ones((3, 4))
    with pytest.raises(
        ForbiddenWrite, match=r"\[write_slots\] wrote byte 19\d of slab, outside what it may write"
    ):
        write_slots(slab, rows, [3, -1, 12], only_slots([3]))
    assert mx.array_equal(slab, mx.zeros((2, 8, 4))), (
        "a refused call leaves its inputs as they were"
    )


def test_a_write_to_an_input_that_may_only_be_read():
    checks = Checks(writable=lambda call: {})
    with pytest.raises(MemoryFault, match=r"wrote byte 48 of slab, which it may only read"):
        write_slots(mx.zeros((2, 8, 4)), mx.ones((1, 4)), [3], checks)


def test_a_write_to_an_input_that_mlx_would_copy_is_lost():
    slab = mx.zeros((4, 8, 2)).T
    with pytest.raises(
        ForbiddenWrite, match=r"not row-contiguous: MLX copies it, the write is lost"
    ):
        write_slots(slab, mx.ones((1, 4)), [3])


def test_a_slot_written_twice_depends_on_the_order():
    from metal_emulator import OrderDependence

    with pytest.raises(
        OrderDependence, match="wrote byte 48 of slab, which thread 0 wrote in line"
    ):
        write_slots(mx.zeros((2, 8, 4)), mx.arange(8).reshape(2, 4).astype(mx.float32), [3, 3])


def test_the_trace_says_what_was_written():
    from metal_emulator import metal_kernel

    trace = []
    kernel = metal_kernel("mark", ["slab"], ["token"], f"{INDEX} ((device float*)slab)[i * 2] = 1;"
                          "token[i] = 1;",
                          trace=trace)  # fmt: skip
    slab = mx.zeros(16)
    kernel(
        inputs=[slab],
        grid=(3, 1, 1),
        threadgroup=(3, 1, 1),
        output_shapes=[(3,)],
        output_dtypes=[mx.uint8],
    )
    (call,) = trace
    # 1.0f is 00 00 80 3f: two bytes of each element changed.
    assert call.written_inputs == {"slab": [(2, 4), (10, 12), (18, 20)]}
    assert call.inputs["slab"] is slab
