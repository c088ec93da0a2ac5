"""Kernels with one mistake each: every kind is caught, and the message says what and where."""

import mlx.core as mx
import pytest
from kernel_helpers import INDEX, run
from metal_emulator import (
    BarrierError,
    Checks,
    CompileError,
    LaunchError,
    MemoryFault,
    OrderDependence,
    TimeLimit,
    UnwrittenOutput,
)

pytestmark = pytest.mark.usefixtures("compiler")

ROW = mx.arange(100).astype(mx.float32)
OUT = {"out": ((100,), mx.float32)}


def run_row(body: str, **options):
    return run(
        f"{INDEX} {body}", {"row": ROW}, options.pop("outputs", OUT), threadgroup=(100,), **options
    )


@pytest.mark.parametrize(
    "body, message",
    [
        (
            "out[i] = row[i + 1];",
            r"thread \(99, 0, 0\) .* read byte 400 of row, which has 400 bytes",
        ),
        ("out[i] = row[int(i) - 1];", r"thread \(0, 0, 0\) .* read byte -4 of row"),
        ("out[i] = row[i * 1000000];", r"thread \(1, 0, 0\) .* read byte 4000000 of row"),
        (
            "out[i + 1] = row[i];",
            r"thread \(99, 0, 0\) .* wrote byte 400 of out, which has 400 bytes",
        ),
        ("out[int(i) - 1] = row[i];", r"wrote byte -4 of out"),
        (
            "out[i] = ((const device float4*)row)[i % 26].y;",
            r"thread \(25, 0, 0\) .* read byte 40\d of row",
        ),
    ],
)
def test_an_access_outside_a_buffer(body, message):
    with pytest.raises(MemoryFault, match=message):
        run_row(body)


# Without the watching of each access, guard pages and poison are what finds these.
UNWATCHED = Checks(watch_accesses=False)


def test_a_write_between_a_buffer_and_its_guard_page():
    # 5 floats end 12 bytes before a multiple of 16, so there is room between the end and the guard
    # page.
    body = f"{INDEX} out[i] = 1; if (i == 4) out[5] = 1;"
    with pytest.raises(MemoryFault, match="a thread wrote right behind out"):
        run(body, outputs={"out": ((5,), mx.float32)}, checks=UNWATCHED)


def test_a_read_between_a_buffer_and_its_guard_page_that_matters():
    with pytest.raises(OrderDependence, match="output out differs"):
        run(
            f"{INDEX} out[i] = row[i + 1];",
            {"row": mx.ones(9)},
            {"out": ((9,), mx.float32)},
            checks=UNWATCHED,
        )


@pytest.mark.parametrize("checks", [Checks(), UNWATCHED], ids=["watched", "unwatched"])
def test_an_access_outside_threadgroup_memory(checks):
    for index, byte in (("i + 1", 400), ("int(i) - 1", -4)):
        # Through a pointer: an index of the array itself is held against its size.
        body = f"""threadgroup float shared[100]; threadgroup float* p = shared;
            p[{index}] = row[i]; out[i] = p[{index}];"""
        with pytest.raises(
            MemoryFault,
            match=rf"wrote byte {byte} of threadgroup array shared, which has 400 bytes, in line 6",
        ):
            run_row(body, checks=checks)


def test_a_misaligned_vector():
    with pytest.raises(MemoryFault, match=r"thread \(0, 0, 0\) .* used a misaligned pointer"):
        run_row("float4 v = *(const device float4*)(row + 1); out[i] = v.x;")


def test_a_stack_that_is_too_small():
    with pytest.raises(MemoryFault, match="the thread's stack"):
        run_row("volatile float large[100000]; large[i] = row[i]; out[i] = large[i];")


def test_an_integer_division_by_zero():
    with pytest.raises(MemoryFault, match="divided an integer by zero"):
        run("out[0] = 7 / few[0];", {"few": mx.array([0])}, {"out": ((1,), mx.int32)})


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int16, mx.uint8], ids=str)
def test_an_output_element_that_nobody_writes(dtype):
    with pytest.raises(
        UnwrittenOutput, match=r"1 of 100 elements of out were not written, the first at \(8, 5\)"
    ):
        run_row(
            "if (i != 85) out[i] = T(row[i]);",
            outputs={"out": ((10, 10), dtype)},
            template=[("T", dtype)],
        )


def test_one_run_is_enough_for_an_unwritten_float():
    with pytest.raises(UnwrittenOutput, match="50 of 100"):
        run_row("if (i % 2) out[i] = row[i];", checks=Checks.quick())


def test_a_barrier_that_some_threads_do_not_reach():
    message = r"threads 0\.\.49 at threadgroup_barrier \(line 5\); threads 50\.\.99 returned"
    with pytest.raises(BarrierError, match=message):
        run_row("out[i] = 0; if (i < 50) threadgroup_barrier(mem_flags::mem_threadgroup);")


def test_threads_at_two_different_barriers():
    with pytest.raises(
        BarrierError, match=r"threads 0\.\.31 at .* \(line 6\); threads 32\.\.99 at .* \(line 7\)"
    ):
        run_row("""out[i] = 0;
            if (i < 32) threadgroup_barrier(mem_flags::mem_threadgroup);
            else threadgroup_barrier(mem_flags::mem_threadgroup);""")


def test_a_simdgroup_operation_that_some_lanes_do_not_reach():
    with pytest.raises(
        BarrierError,
        match=r"threads 0\.\.9 at simd_sum \(line 6\); threads 10\.\.99 at threadgroup_barr",
    ):
        run_row("""float x = 0;
            if (i < 10) x = simd_sum(row[i]);
            threadgroup_barrier(mem_flags::mem_none); out[i] = x;""")


def test_lanes_at_two_different_simdgroup_operations():
    with pytest.raises(BarrierError, match=r"thread 0 at simd_max .*; thread 1 at simd_sum"):
        run_row("out[i] = i % 2 ? simd_sum(row[i]) : simd_max(row[i]);")


def test_a_missing_threadgroup_barrier():
    body = "threadgroup float shared[100]; shared[i] = row[i]; {} out[i] = shared[99 - i];"
    run_row(body.format("threadgroup_barrier(mem_flags::mem_threadgroup);"))
    with pytest.raises(
        OrderDependence, match=r"output out differs .* ascending and in descending order"
    ):
        run_row(body.format(""), checks=UNWATCHED)


def test_a_missing_second_barrier_in_a_loop():
    body = """threadgroup float shared[100]; float x = row[i];
        for (int r = 0; r < 3; r++) {{
          shared[i] = x + r;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          x = shared[(i + 50) % 100];
          {}
        }}
        out[i] = x;"""
    run_row(body.format("threadgroup_barrier(mem_flags::mem_threadgroup);"))
    with pytest.raises(OrderDependence, match="output out differs"):
        run_row(body.format(""), checks=UNWATCHED)


def test_a_missing_simdgroup_barrier():
    body = "threadgroup float shared[100]; shared[i] = row[i]; {} out[i] = shared[i ^ 1];"
    run_row(body.format("simdgroup_barrier(mem_flags::mem_threadgroup);"))
    with pytest.raises(OrderDependence, match="output out differs"):
        run_row(body.format(""), checks=UNWATCHED)


def test_two_threadgroups_that_write_the_same_place():
    with pytest.raises(OrderDependence, match="output out differs"):
        run(
            f"{INDEX} out[i % 32] = i;",
            grid=(64,),
            checks=Checks(num_workers=1, watch_accesses=False),
        )


def test_an_order_that_only_chance_finds():
    # The middle lane comes last or first in neither of the two plain orders.
    body = "threadgroup int turn; if (i == 0 || i == 50 || i == 99) turn = i; "
    body += "threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = turn == 50;"
    run_row(body, checks=Checks(("ascending", "descending"), watch_accesses=False))
    with pytest.raises(OrderDependence, match="random"):
        run_row(body, checks=Checks(("ascending", *["random"] * 20), watch_accesses=False))


def test_a_variable_that_nobody_set():
    with pytest.raises(CompileError, match="variable 'total' is uninitialized when used here"):
        run_row("float total; for (int j = 0; j < int(i); j++) total += row[j]; out[i] = total;")
    # What the compiler can't tell is NaN.
    (out,) = run_row("float last[2]; if (row[i] > 50) last[0] = row[i]; out[i] = last[0];")
    assert mx.isnan(out).sum() == 51


@pytest.mark.parametrize(
    "statement",
    [
        "threadgroup float* p = row;",
        "const thread float* p = row;",
        "const constant float* p = row;",
        "threadgroup float shared[4]; device float* p = shared;",
        "float local[4]; device float* p = local;",
        "device float* p = row;",  # drops const
    ],
)
def test_a_wrong_address_space(statement):
    with pytest.raises(
        CompileError, match=r"kernel\.metal:5:.* error: cannot initialize a variable"
    ):
        run_row(f"{statement} out[i] = p[0];")


def test_a_call_for_another_address_space():
    header = "inline float first(const threadgroup float* row) { return row[0]; }\n"
    with pytest.raises(CompileError, match="no matching function for call to 'first'"):
        run_row("out[i] = first(row);", header=header)


@pytest.mark.parametrize(
    "statement",
    [
        "float local[4]; float* p = local;",
        "const device float* p = (const float*)row + 0;",
        "float local = 1; const float& r = local;",
        "const device float* p = row; auto f = [](vec<float, 4> const& v) { return v.x; };",
    ],
)
def test_a_pointer_without_an_address_space(statement):
    with pytest.raises(
        CompileError, match="line 5 has a pointer or reference without an address space"
    ):
        run_row(f"{statement} out[i] = 0;")


def test_what_no_device_has():
    with pytest.raises(LaunchError, match=r"\(1056\) is greater than .* \(1024\)"):
        run(f"{INDEX} out[i] = 0;", threadgroup=(33, 32))
    with pytest.raises(LaunchError, match="32800 bytes of threadgroup memory, a device has 32768"):
        run_row("threadgroup float a[8192], b[8]; a[i] = row[i]; b[i % 8] = row[i]; out[i] = 0;")


def test_a_kernel_that_does_not_end():
    with pytest.raises(TimeLimit, match="did not end in time"):
        run_row(
            "volatile int n = 0; while (true) n = n + 1; out[i] = n;",
            checks=Checks(time_limit_s=0.2),
        )


def test_the_next_kernel_runs_as_if_nothing_had_happened():
    for _ in range(3):
        with pytest.raises(MemoryFault):
            run_row("out[i] = row[i + 1];")
        assert mx.array_equal(run_row("out[i] = row[i];")[0], ROW)
