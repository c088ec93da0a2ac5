"""Accesses just outside of what they belong to, lanes that are not there and conversions without a
result; and their neighbours, which are right.
"""

import mlx.core as mx
import pytest
from kernel_helpers import INDEX, run
from metal_emulator import BarrierError, Checks, MemoryFault, UndefinedResult

pytestmark = pytest.mark.usefixtures("compiler")

ONE_RUN = Checks(orders=("ascending",))
slowly_watched = pytest.mark.parametrize(
    "checks",
    [
        pytest.param(ONE_RUN, id="watched", marks=pytest.mark.slow),
        pytest.param(Checks.quick(), id="quick"),
    ],
)


def run_one(body: str, size: int = 32, checks: Checks = ONE_RUN, **inputs: mx.array) -> mx.array:
    (out,) = run(
        f"{INDEX}\n{body}",
        inputs,
        {"out": ((size,), mx.float32)},
        threadgroup=(size,),
        checks=checks,
    )
    return out


@pytest.mark.parametrize(
    "dtype", [mx.uint8, mx.float16, mx.bfloat16, mx.float32, mx.int64], ids=str
)
@pytest.mark.parametrize(
    "size", [9, *(pytest.param(size, marks=pytest.mark.slow) for size in (10, 13, 16))]
)
def test_an_element_next_to_a_buffer(dtype, size):
    row = mx.zeros(size, dtype)
    nbytes = row.nbytes
    assert run_one(f"out[i] = float(row[{size - 1}]) + float(row[0]);", row=row).sum() == 0
    for index, byte in ((size, nbytes), (size + 1, nbytes + row.itemsize), (-1, -row.itemsize)):
        with pytest.raises(
            MemoryFault,
            match=rf"thread \(0, 0, 0\) .* read byte {byte} of row, which has {nbytes} bytes, "
            rf"in line 6: out",
        ):
            # The value doesn't matter to the result: the read is the mistake.
            run_one(f"out[i] = float(row[{index} + int(i / 1000)]) == 1;", row=row)


@pytest.mark.parametrize(
    "vector",
    [
        *("float4", "half2"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("float2", "uint4", "half4")),
    ],
)
def test_a_vector_that_is_partly_outside(vector):
    row = mx.zeros(9)  # 36 bytes: 4 behind a multiple of 8 and of 16
    whole = {"float2": 3, "float4": 1, "uint4": 1, "half4": 3, "half2": 8}[vector]
    # One element is enough to touch them all.
    body = f"{vector} v = ((const device {vector}*)row)[{{}} + int(i / 1000)]; out[i] = float(v.x);"
    run_one(body.format(whole), row=row)
    for index in (whole + 1, -1):
        with pytest.raises(MemoryFault, match=r"read byte (36|-\d+) of row, which has 36 bytes"):
            run_one(body.format(index), row=row)


def test_few_elements_in_the_constant_address_space():
    with pytest.raises(MemoryFault, match="read byte 12 of few, which has 12 bytes"):
        run_one("out[i] = few[3 + i / 1000];", few=mx.zeros(3))


def test_a_write_next_to_an_output():
    for index, byte in ((9, 36), (10, 40), (-1, -4)):
        with pytest.raises(MemoryFault, match=rf"wrote byte {byte} of out, which has 36 bytes"):
            run_one(f"out[i] = 1; if (i == 4) out[{index} + int(i / 1000)] = 1;", size=9)


def test_an_element_next_to_a_threadgroup_array():
    body = "threadgroup half shared[33]; threadgroup half* p = shared; p[i] = 1; p[32] = 1;"
    body = body.replace("p[32] = 1;", "if (i == 0) p[32 + {}] = 1; out[i] = 0;")
    run_one(body.format(0))
    for offset, byte in ((1, 66), (2, 68)):
        with pytest.raises(MemoryFault, match=rf"wrote byte {byte} of threadgroup array shared"):
            run_one(body.format(offset))


ARRAYS = {
    "thread": "float a[4] = {0, 1, 2, 3};",
    "threadgroup": "threadgroup float a[4]; a[i % 4] = 1;",
    "two_dimensions": "float b[3][4] = {}; thread float (&a)[4] = b[1];",
}


@slowly_watched
@pytest.mark.parametrize("array", ARRAYS)
def test_an_index_outside_of_an_array(array, checks):
    (body, size) = ARRAYS[array], (4 if array == "threadgroup" else 32)
    run_one(f"{body} a[i % 4] += 1; out[i] = a[i % 4];", size, checks)
    for thread, index, wrong in ((3, "i + 1", 4), (0, "int(i) - 1", -1)):
        with pytest.raises(
            MemoryFault, match=rf"used element {wrong} of '.*float.*\[4\]'.*, in line 5: "
        ):
            run_one(f"{body} if (i == {thread}) a[{index}] = 1; out[i] = a[i % 4];", size, checks)


@pytest.mark.parametrize("checks", [ONE_RUN, Checks.quick()], ids=["watched", "quick"])
def test_an_index_outside_of_a_vector(checks):
    body = "float4 a = float4(i); a[i % 4 + {}] = 1; out[i] = a.x;"
    run_one(body.format(0), checks=checks)
    with pytest.raises(MemoryFault, match="used element 4 of a vector of 4, in line 5"):
        run_one(body.format(1), checks=checks)


# An older clang finds another thing wrong with the same access.
OUTSIDE = r"used (memory outside of a thread array|a misaligned pointer), in line 6"


def test_a_thread_array_through_a_pointer():
    body = """float a[4] = {{0, 1, 2, 3}}; thread float* p = a;
        for (uint j = 0; j < 4; j++) p[(i + j) % 4 + {}] += 1;
        out[i] = p[i % 4];"""
    run_one(body.format(0))
    with pytest.raises(MemoryFault, match=OUTSIDE):
        run_one(body.format(1))


@pytest.mark.parametrize(
    ("expression", "lane"),
    [
        ("simd_shuffle(x, 32)", "32"),
        ("simd_shuffle(x, ushort(lane - 1))", "65535"),
        ("simd_shuffle_xor(x, 32)", "32"),
        ("simd_broadcast(x, 40)", "40"),
    ],
)
def test_a_lane_that_no_simdgroup_has(expression, lane):
    with pytest.raises(
        UndefinedResult,
        match=rf"thread \(0, 0, 0\) .* took a value by simd_\w+ from lane {lane}, which its "
        r"simdgroup does not have, in line 6: ",
    ):
        run_one(f"uint lane = thread_index_in_simdgroup; float x = i; out[i] = {expression};")


@pytest.mark.parametrize(
    ("expression", "lane"),
    [
        ("simd_shuffle_down(x, 1)", 8),
        pytest.param("simd_shuffle_xor(x, 8)", 8, marks=pytest.mark.slow),
        pytest.param("simd_broadcast(x, 8)", 8, marks=pytest.mark.slow),
        pytest.param("simd_shuffle_rotate_down(x, 1)", 8, marks=pytest.mark.slow),
        ("simd_shuffle_rotate_up(x, 1)", 31),
    ],
)
def test_a_lane_that_an_incomplete_simdgroup_lacks(expression, lane):
    body = f"float x = i; if (i >= 32) x = {expression}; out[i] = x;"
    with pytest.raises(UndefinedResult, match=rf"from lane {lane}, which its simdgroup does not"):
        run_one(body, size=40)
    run_one(f"float x = i; if (i < 32) x = {expression}; out[i] = x;", size=40)


def test_shuffles_beyond_the_ends_of_a_whole_simdgroup_keep_the_value():
    # Metal says so of these two, and reductions by halves rely on it.
    body = "float x = 1; for (ushort n = 16; n > 0; n /= 2) x += simd_shuffle_down(x, n);"
    assert run_one(f"{body} out[i] = x;")[0] == 32
    assert run_one("out[i] = simd_shuffle_up(float(i), 1);").tolist() == [0, *range(31)]


def test_a_lane_that_has_returned():
    body = "out[i] = 0; if (i >= 16) return; out[i] = simd_shuffle(float(i), {});"
    run_one(body.format("i ^ 8"))
    with pytest.raises(UndefinedResult, match="from lane 16, which has returned"):
        run_one(body.format("i ^ 16"))


def test_a_reduction_in_divergent_flow():
    body = "float x = 0; if (i < {}) x = simd_sum(1.0f); out[i] = simd_max(x);"
    assert run_one(body.format(32), size=64).sum() == 32 * 32
    with pytest.raises(BarrierError, match=r"threads 0\.\.19 at simd_sum .*; threads 20\.\.31 at"):
        run_one(body.format(20))


@slowly_watched
@pytest.mark.parametrize(
    ("value", "to", "said"),
    [
        (3e9, "int", "3e\\+09 to 'int'"),
        (-1.0, "uint", "-1 to '.*unsigned int'"),
        (float("nan"), "int", "nan to 'int'"),
        (float("inf"), "ushort", "inf to '.*unsigned short'"),
        (300.0, "uchar", "300 to '.*unsigned char'"),
        (1e30, "long", "1.* to 'long'"),
    ],
)
def test_a_float_that_an_integer_can_not_hold(value, to, said, checks):
    with pytest.raises(
        UndefinedResult, match=rf"converted {said}.*, which can't hold it, in line 6"
    ):
        run_one(f"out[i] = {to}(row[i]);", checks=checks, row=mx.full(32, value))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_a_half_that_an_integer_can_not_hold(dtype):
    row = mx.full(32, 300.0, dtype)
    assert run_one("out[i] = short(row[i]);", row=row)[0] == 300
    with pytest.raises(UndefinedResult, match="converted 300 to 'char'"):
        run_one("out[i] = char(row[i]);", row=row)
    with pytest.raises(UndefinedResult, match=r"converted 300 to '.*char'"):
        run_one("out[i] = uchar4(half4(row[i])).x;", row=mx.full(32, 300.0))


def test_floats_that_integers_hold():
    row = mx.array([-0.9, 255.9] * 16)
    assert run_one("out[i] = uchar(row[i]);", row=row).tolist() == [0, 255] * 16
    assert run_one("out[i] = int(row[i] * 1e6f);", row=row)[0] == -900000
