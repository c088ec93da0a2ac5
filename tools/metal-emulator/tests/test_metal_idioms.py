"""Ways to write Metal that kernels in the wild use, and that C++ alone would not take."""

import mlx.core as mx
import pytest
from kernel_helpers import INDEX, run
from metal_emulator.threadgroup_variables import share_threadgroup_variables

pytestmark = pytest.mark.usefixtures("compiler")

HEADER = """
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;

#define SQUARE(x) ((x) * (x))
constant float kTable[4] = {1.0f, 2.0f, 4.0f, 8.0f};
constant constexpr int kFour = 4;
typedef half4 row_t;

template <typename T> struct FourOf { using type = vec<T, 4>; };

template <typename T, int N>
struct Accumulator {
  thread float4* lanes;
  const threadgroup T* shared;
  METAL_FUNC Accumulator(thread float4* lanes_, const threadgroup T* shared_)
      : lanes(lanes_), shared(shared_) {}
  METAL_FUNC void add(const thread vec<T, 4>& value) {
    MLX_MTL_PRAGMA_UNROLL
    for (short n = 0; n < N; n++) lanes[n] += float4(value) * float(shared[n]);
  }
};

template <typename T>
METAL_FUNC void load_row(const device T* source, thread vec<T, 4>& row, uint n) {
  row = *reinterpret_cast<const device vec<T, 4>*>(source + 4 * n);
}
inline float half_of(threadgroup float& x) { return x / 2; }
inline uint unpack(uint word, ushort n) { return extract_bits(word, 8 * n, 8); }
"""


def test_helpers_structs_and_tables():
    body = """
        threadgroup T shared[kFour]; threadgroup float scalar;
        uint i = thread_position_in_grid.x;
        if (i < 4) shared[i] = static_cast<T>(kTable[i]);
        if (i == 0) scalar = 6;
        threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
        using T4 = typename FourOf<T>::type;
        float4 lanes[2] = {float4(0.0f), 0};
        T4 row;
        load_row<T>(rows, row, i);
        Accumulator<T, 2> accumulator(lanes, shared);
        accumulator.add(row);
        accumulator.add(T4(T(1)));
        auto total = [&](thread const float4& v) { return v.x + v.y + v.z + v.w; };
        #pragma clang loop unroll(full)
        for (int n = 0; n < 2; ++n) out[i * 4 + n] = total(lanes[n]);
        out[i * 4 + 2] = half_of(scalar) + SQUARE(2) + float(Limits<T>::finite_max > T(1));
        out[i * 4 + 3] = float(row_t(row)[3]) + float(T4(row.xy, row.zw).w);"""
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        rows = mx.arange(32).astype(dtype)
        (out,) = run(
            body,
            {"rows": rows},
            {"out": ((8, 4), mx.float32)},
            grid=(8,),
            template=[("T", dtype)],
            header=HEADER,
        )
        sums = rows.reshape(8, 4).sum(axis=1).astype(mx.float32)
        expected = mx.stack(
            [sums + 4, 2 * sums + 8, mx.full(8, 8.0), 2 * rows.reshape(8, 4)[:, 3]], axis=1
        )
        assert mx.array_equal(out, expected)


def test_casting_const_away_in_all_spellings():
    body = f"""{INDEX}
        const_cast<device float*>(a)[i] = 1; ((device float*)b)[i] = 2;
        *const_cast<device float4*>(reinterpret_cast<const device float4*>(c) + i) = float4(3);
        out[i] = 0;"""
    arrays = {name: mx.zeros(32) for name in "abc"}
    run(body, arrays, {"out": ((8,), mx.int32)})
    assert [array.sum().item() for array in arrays.values()] == [8, 16, 96]


def test_packed_integers_are_taken_apart():
    body = f"""{INDEX}
        uchar4 bytes = as_type<uchar4>(words[i]);
        half2 pair = as_type<half2>(0x40003c00u);
        out[i] = bytes.w * 1000 + unpack(words[i], 0) + float(pair.x + pair.y);
        out[i] += (words[i] >> 8) & 0xff;"""
    words = mx.array([0x04030201 + 16 * i for i in range(8)], dtype=mx.uint32)
    (out,) = run(body, {"words": words}, {"out": ((8,), mx.float32)}, header=HEADER)
    assert out.tolist() == [4000 + 1 + 16 * i + 3 + 2 for i in range(8)]


def test_reading_vectors_from_threadgroup_and_constant_memory():
    body = f"""{INDEX}
        threadgroup float4 rows[8]; rows[i] = float4(i, i + 1, i + 2, i + 3);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        threadgroup float4* next = &rows[(i + 1) % 8];
        float4 sum = *next + max(*next, rows[i]) + float4(few[0], few[1], 0, 0);
        next = nullptr;
        out[i] = sum.x + dot(rows[i], float4(0, 0, 0, 1));"""
    (out,) = run(body, {"few": mx.array([0.5, 1])}, {"out": ((8,), mx.float32)})
    assert out.tolist() == [2 * (i + 1) + 0.5 + i + 3 for i in range(7)] + [0 + 7 + 0.5 + 10]


@pytest.mark.parametrize(
    "source, shared",
    [
        (
            "threadgroup float a[4];",
            'auto& a = *emulator::threadgroup_variable<float[ 4 ]>(0, "a");',
        ),
        (
            "f(x); threadgroup int n;",
            'f(x); auto& n = *emulator::threadgroup_variable<int>(0, "n");',
        ),
        ("threadgroup float* p = a;", None),
        ("g((threadgroup float*)a);", None),
        ("for (threadgroup T* p = a; p < b; p++) {}", None),
        ("threadgroup_barrier(mem_flags::mem_threadgroup);", None),
        ("const threadgroup float& r = a[0];", None),
        ('"threadgroup int n;"; // threadgroup int m;', None),
        ("threadgroup float* rows[4];", None),
    ],
)
def test_only_declarations_of_variables_are_replaced(source, shared):
    assert share_threadgroup_variables(source) == (shared or source)
