"""Threads that use one place without a barrier between them: each is caught in a single run, and a
kernel that orders them passes.
"""

import mlx.core as mx
import pytest
from kernel_helpers import INDEX, run
from metal_emulator import Checks, DataRace, UnwrittenRead

pytestmark = pytest.mark.usefixtures("compiler")

ONE_RUN = Checks(orders=("descending",))
# Whole simdgroups, so that neighbours within one and across two can be told apart.
NUM_THREADS = 64
BARRIERS = {
    "mem_none": "threadgroup_barrier(mem_flags::mem_none);",
    "mem_device": "threadgroup_barrier(mem_flags::mem_device);",
    "mem_threadgroup": "threadgroup_barrier(mem_flags::mem_threadgroup);",
    "both": "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);",
    "simdgroup": "simdgroup_barrier(mem_flags::mem_threadgroup);",
    "simdgroup_mem_none": "simdgroup_barrier(mem_flags::mem_none);",
    "simdgroup_mem_device": "simdgroup_barrier(mem_flags::mem_device);",
    "simd_sum": "simd_sum(1);",
    "none": "",
}


def run_threads(body: str, checks: Checks = ONE_RUN, grid: int = NUM_THREADS, **options) -> None:
    run(
        f"{INDEX}\n{body}",
        outputs={"out": ((grid,), mx.int32)},
        threadgroup=(NUM_THREADS,),
        checks=checks,
        **options,
    )


# Shared memory that is written whole at first, so that what follows is a race and nothing else.
SHARE = "threadgroup int shared[64]; shared[i % 64] = 0; "
SHARE += BARRIERS["both"] + " shared[i % 64] = i;"


@pytest.mark.parametrize("barrier", ["mem_threadgroup", "both"])
def test_threadgroup_memory_is_shared_behind_its_barrier(barrier):
    run_threads(f"{SHARE} {BARRIERS[barrier]} out[i] = shared[63 - i];")


@pytest.mark.parametrize("barrier", ["mem_none", "mem_device", "simdgroup", "simd_sum", "none"])
def test_threadgroup_memory_needs_a_threadgroup_barrier_with_its_flag(barrier):
    with pytest.raises(
        DataRace,
        match=r"thread \(\d+, 0, 0\) of threadgroup \(0, 0, 0\) (read|wrote) byte \d+ of "
        r"threadgroup array shared, which thread \d+ (read|wrote)( in line 5)?; no barrier with "
        r"mem_threadgroup lies between, in line 5: threadgroup int shared",
    ):
        run_threads(f"{SHARE} {BARRIERS[barrier]} out[i] = shared[63 - i];")


def test_a_simdgroup_barrier_is_enough_within_a_simdgroup():
    run_threads(f"{SHARE} {BARRIERS['simdgroup']} out[i] = shared[i ^ 1];")


@pytest.mark.parametrize("barrier", ["simdgroup_mem_none", "simdgroup_mem_device", "simd_sum"])
def test_a_simdgroup_barrier_needs_the_flag_as_well(barrier):
    with pytest.raises(DataRace, match="no barrier with mem_threadgroup"):
        run_threads(f"{SHARE} {BARRIERS[barrier]} out[i] = shared[i ^ 1];")


@pytest.mark.parametrize("barrier", ["mem_device", "both"])
def test_device_memory_is_shared_within_a_threadgroup_behind_its_barrier(barrier):
    run_threads(f"out[i] = i; {BARRIERS[barrier]} if (i == 0) out[0] = out[63];")


@pytest.mark.parametrize("barrier", ["mem_none", "mem_threadgroup", "simdgroup", "none"])
def test_device_memory_needs_a_barrier_with_its_flag(barrier):
    with pytest.raises(
        DataRace, match=r"byte 252 of out, which thread \d+ .* no barrier with mem_device"
    ):
        run_threads(f"out[i] = i; {BARRIERS[barrier]} if (i == 0) out[0] = out[63];")


def test_reading_first_and_writing_behind_a_barrier():
    body = (
        f"{SHARE} {BARRIERS['both']} int x = shared[(i + 5) % 64]; {{}} shared[i] = x; out[i] = x;"
    )
    run_threads(body.format(BARRIERS["mem_threadgroup"]))
    with pytest.raises(DataRace, match=r"(read|wrote) byte \d+ .*, which thread \d+ (read|wrote)"):
        run_threads(body.format(""))


def test_many_readers_before_one_writer():
    body = (
        f"{SHARE} {BARRIERS['both']} int x = shared[7]; {{}} if (i == 9) shared[7] = 1; out[i] = x;"
    )
    run_threads(body.format(BARRIERS["mem_threadgroup"]))
    with pytest.raises(DataRace, match="wrote byte 28 of threadgroup array shared"):
        run_threads(body.format(""))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("threadgroup int one; one = 5;", "wrote byte 0 of threadgroup array one, which thread"),
        ("out[0] = 5;", "wrote byte 0 of out, which thread"),
        ("if (i < 2) out[0] = 5;", "wrote byte 0 of out, which thread 1 wrote in line 5"),
        (
            f"{SHARE} {BARRIERS['both']} if (i == 3) shared[3] = 3; "
            "if (i > 9) shared[i] = shared[3];",
            "byte 12 of threadgroup array shared",
        ),
    ],
    ids=["threadgroup_memory", "device_memory", "two_lanes", "the_value_that_was_there"],
)
def test_the_same_value_is_no_excuse(body, message):
    with pytest.raises(DataRace, match=message):
        run_threads(f"{body} if (i) out[i] = 0;")


def test_one_thread_for_all_is_the_way_to_write_one_value():
    body = f"threadgroup int one; if (i == 0) one = 5; {BARRIERS['mem_threadgroup']} out[i] = one;"
    run_threads(body)


def test_two_threadgroups_that_write_the_same_value():
    with pytest.raises(
        DataRace,
        match=r"wrote byte \d+ of out, which a thread of another threadgroup wrote in line 5; "
        r"nothing orders the threadgroups of a launch",
    ):
        run_threads("out[i % 64] = 5; out[i] = 5;", grid=128)


def test_a_threadgroup_that_reads_what_another_one_writes():
    with pytest.raises(DataRace, match="which a thread of another threadgroup"):
        run_threads(f"out[i] = i; {BARRIERS['mem_device']} out[i] = out[0] > 70;", grid=128)


def test_threadgroups_that_only_read_one_place():
    row = mx.arange(8)
    run(
        f"{INDEX} out[i] = row[0] + row[i % 8];",
        {"row": row},
        {"out": ((128,), mx.int32)},
        checks=ONE_RUN,
    )


def test_neighbouring_bytes_are_different_places():
    run(f"{INDEX} out[i] = uchar(i);", outputs={"out": ((64,), mx.uint8)}, checks=ONE_RUN)
    run(
        f"{INDEX} ((device uchar*)out)[i] = uchar(i);",
        outputs={"out": ((16,), mx.float32)},
        grid=(64,),
        checks=ONE_RUN,
    )
    body = "threadgroup float4 shared[16]; ((threadgroup half*)shared)[i] = i; "
    run_threads(f"{body} {BARRIERS['mem_threadgroup']} out[i] = shared[i / 8].x > -1;")


def test_part_of_a_vector_that_another_thread_writes():
    body = "threadgroup float4 shared[64]; threadgroup float* p = (threadgroup float*)shared; "
    body += "shared[i] = float4(i); {} p[4 * ((i + 1) % 64) + 3] = 1; out[i] = 0;"
    run_threads(body.format(BARRIERS["mem_threadgroup"]))
    with pytest.raises(DataRace, match=r"wrote byte \d+ of threadgroup array shared"):
        run_threads(body.format(""))


def test_atomics_are_ordered_with_each_other_and_with_nothing_else():
    atomic = "atomic_fetch_add_explicit(&count, 1, memory_order_relaxed);"
    start = "threadgroup atomic_int count; "
    start += "if (i == 0) atomic_store_explicit(&count, 0, memory_order_relaxed); "
    read = " out[i] = atomic_load_explicit(&count, memory_order_relaxed) > 0;"
    run_threads(start + BARRIERS["mem_threadgroup"] + atomic + read)
    plain = " out[i] = *(threadgroup int*)&count;"
    behind = start + BARRIERS["mem_threadgroup"] + atomic
    run_threads(behind + BARRIERS["mem_threadgroup"] + plain)
    with pytest.raises(DataRace, match="threadgroup array count"):
        run_threads(behind + plain)


@pytest.mark.parametrize(
    ("body", "byte"),
    [
        ("threadgroup float total; out[i] = total > 0;", 0),
        (
            f"threadgroup float a[65]; a[i] = i; {BARRIERS['mem_threadgroup']} out[i] = a[i + 1];",
            256,
        ),
    ],
    ids=["nothing_written", "one_element"],
)
def test_threadgroup_memory_that_nobody_wrote(body, byte):
    with pytest.raises(
        UnwrittenRead,
        match=rf"thread \(63, 0, 0\) .* read byte {byte} of threadgroup array \w+, "
        r"which no thread has written, in line 5",
    ):
        run_threads(body)


def test_what_another_threadgroup_wrote_is_not_there():
    body = "threadgroup int a; if (i < 64) a = 1; "
    body = body.replace("i < 64", "i == 127")
    with pytest.raises(UnwrittenRead):
        run_threads(f"{body} {BARRIERS['mem_threadgroup']} out[i] = a;", grid=128)


def test_quick_checks_watch_nothing():
    run_threads("out[0] = 5; out[i] = 5;", checks=Checks.quick())
