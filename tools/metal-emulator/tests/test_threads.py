"""Grids, threadgroups, what threads of a threadgroup share, and simdgroup operations."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from kernel_helpers import INDEX, run
from metal_emulator import Checks

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.mark.parametrize(
    "grid, threadgroup", [((10, 6, 4), (5, 3, 2)), ((7, 5, 3), (4, 2, 2)), ((3, 1, 1), (32, 4, 1))]
)
def test_every_thread_of_a_grid_runs_once_and_knows_where_it_is(grid, threadgroup):
    body = """
        uint3 at = thread_position_in_grid, size = threads_per_grid;
        uint n = at.x + size.x * (at.y + size.y * at.z);
        uint3 group = threadgroup_position_in_grid, inside = thread_position_in_threadgroup;
        uint3 groups = threadgroups_per_grid, full = dispatch_threads_per_threadgroup,
              own = threads_per_threadgroup;
        out[n * 15] = at.x; out[n * 15 + 1] = at.y; out[n * 15 + 2] = at.z;
        out[n * 15 + 3] = group.x; out[n * 15 + 4] = group.y; out[n * 15 + 5] = group.z;
        out[n * 15 + 6] = inside.x; out[n * 15 + 7] = inside.y; out[n * 15 + 8] = inside.z;
        out[n * 15 + 9] = own.x; out[n * 15 + 10] = own.y; out[n * 15 + 11] = own.z;
        out[n * 15 + 12] = groups.x * 100 + groups.y * 10 + groups.z;
        out[n * 15 + 13] = full.x * 100 + full.y * 10 + full.z;
        out[n * 15 + 14] = thread_index_in_threadgroup;"""
    count = int(np.prod(grid))
    (out,) = run(body, outputs={"out": ((count, 15), mx.int32)}, grid=grid, threadgroup=threadgroup)
    full = [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]
    groups = [-(-g // t) for g, t in zip(grid, full, strict=True)]
    expected = []
    for z, y, x in itertools.product(*map(range, grid[::-1])):
        at = (x, y, z)
        group = [a // f for a, f in zip(at, full, strict=True)]
        inside = [a % f for a, f in zip(at, full, strict=True)]
        # A threadgroup at the end of the grid is cut off.
        own = [min(f, n - f * g) for f, n, g in zip(full, grid, group, strict=True)]
        index = inside[0] + own[0] * (inside[1] + own[1] * inside[2])
        digits = [a * 100 + b * 10 + c for a, b, c in (groups, full)]
        expected.append([*at, *group, *inside, *own, *digits, index])
    assert out.tolist() == expected


def test_simdgroups_are_32_threads_in_a_row():
    body = """uint n = thread_index_in_threadgroup, group = simdgroup_index_in_threadgroup;
        out[n] = thread_index_in_simdgroup + 100 * group + 10000 * simdgroups_per_threadgroup;"""
    (out,) = run(body, outputs={"out": ((70,), mx.int32)}, grid=(35, 2), threadgroup=(35, 2))
    assert out.tolist() == [n % 32 + 100 * (n // 32) + 30000 for n in range(70)]


@pytest.mark.parametrize("threads", [32, 64, 256, 1024])
def test_a_tree_reduction_through_threadgroup_memory(threads):
    body = f"""
        threadgroup float partial[{threads}];
        uint t = thread_index_in_threadgroup;
        partial[t] = row[thread_position_in_grid.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint step = {threads} / 2; step > 0; step /= 2) {{
          if (t < step) partial[t] += partial[t + step];
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }}
        if (t == 0) out[threadgroup_position_in_grid.x] = partial[0];"""
    row = mx.random.randint(0, 100, (threads * 5,)).astype(mx.float32)
    (out,) = run(
        body, {"row": row}, {"out": ((5,), mx.float32)}, grid=(threads * 5,), threadgroup=(threads,)
    )
    assert mx.array_equal(out, row.reshape(5, threads).sum(axis=1))


def test_threadgroup_variables_of_all_kinds():
    body = """
        // threadgroup float not_this[4];
        threadgroup vec<T, 4> rows[8][2], last;   threadgroup int total;
        alignas(16) threadgroup unsigned int
            flags[N + 1];
        threadgroup float* view = (threadgroup float*)flags;  // a pointer declares no memory
        uint i = thread_index_in_threadgroup;
        rows[i][0] = vec<T, 4>(T(i)); rows[i][1] = rows[i][0] * T(2); flags[i] = i;
        if (i == 0) { total = 5; last = vec<T, 4>(T(1)); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = float(rows[7 - i][1].w) + total + float(last.x);
        out[i] += flags[7 - i] + (view == nullptr);"""
    (out,) = run(body, outputs={"out": ((8,), mx.float32)}, template=[("T", mx.float16), ("N", 7)])
    assert out.tolist() == [(7 - i) * 3 + 6 for i in range(8)]


LANES = 45  # a whole simdgroup and one of 13 lanes


def simd(expression: str) -> list[float]:
    (out,) = run(f"{INDEX} float x = i + 1; uint lane = thread_index_in_simdgroup;"
                 f"out[i] = {expression};",
                 outputs={"out": ((LANES,), mx.float32)}, threadgroup=(LANES,))  # fmt: skip
    return out.tolist()


def per_simdgroup(function) -> list[float]:
    """What ``function(values of the simdgroup, lane)`` gives for each thread."""
    groups = [list(range(1, 33)), list(range(33, LANES + 1))]
    return [function(values, lane) for values in groups for lane in range(len(values))]


def test_reductions_take_the_lanes_that_are_there():
    assert simd("simd_sum(x)") == per_simdgroup(lambda values, lane: sum(values))
    assert simd("simd_max(x)") == per_simdgroup(lambda values, lane: max(values))
    assert simd("simd_min(-x)") == per_simdgroup(lambda values, lane: -max(values))
    assert simd("simd_sum(half4(x)).w") == per_simdgroup(lambda values, lane: sum(values))
    assert simd("simd_prefix_exclusive_sum(x)") == per_simdgroup(
        lambda values, lane: sum(values[:lane])
    )
    assert simd("simd_prefix_inclusive_sum(int(x))") == per_simdgroup(
        lambda values, lane: sum(values[: lane + 1])
    )
    assert simd("simd_all(x > 1) * 2 + simd_any(x > 33)") == per_simdgroup(
        lambda values, lane: values[0] // 33 * 3
    )


def test_shuffles_move_values_between_lanes():
    assert simd("simd_broadcast(x, 3)") == per_simdgroup(lambda values, lane: values[3])
    assert simd("simd_shuffle(x, ushort(lane / 2))") == per_simdgroup(
        lambda values, lane: values[lane // 2]
    )
    assert simd("simd_shuffle_xor(x, 4 * (lane < 8))") == per_simdgroup(
        lambda values, lane: values[lane ^ 4 if lane < 8 else lane]
    )
    # Beyond the ends of the simdgroup a lane keeps its own value; others have none.
    down = simd("simd_shuffle_down(x, simdgroup_index_in_threadgroup == 0 ? 8 : 0)")
    assert down[:32] == [i + 9 if i < 24 else i + 1 for i in range(32)]
    assert simd("simd_shuffle_up(x, 5)") == per_simdgroup(
        lambda values, lane: values[lane - 5 if lane >= 5 else lane]
    )


def test_lanes_that_have_returned_take_no_part():
    body = f"{INDEX} if (i >= 10) {{ out[i] = 0; return; }} out[i] = simd_sum(1.0f);"
    assert run(body)[0].tolist() == [10] * 10 + [0] * 22


def test_uniform_branches_and_loops_of_simdgroups_go_their_own_ways():
    body = f"""{INDEX} float x = 1;
        for (uint r = 0; r <= simdgroup_index_in_threadgroup; r++) x = simd_sum(x) / 16;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup_index_in_threadgroup == 2) x = simd_max(x + thread_index_in_simdgroup);
        out[i] = x;"""
    (out,) = run(body, outputs={"out": ((128,), mx.float32)}, threadgroup=(128,))
    assert out.reshape(4, 32)[:, 5].tolist() == [2, 4, 8 + 31, 16]


def test_thousands_of_threadgroups_take_seconds():
    body = f"""{INDEX}
        threadgroup float partial[8];
        float x = simd_sum(row[i % 1024]);
        if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = x;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i % 256 == 0) out[i / 256] = partial[0] + partial[7];"""
    outputs = {"out": ((4000,), mx.float32)}
    (out,) = run(
        body,
        {"row": mx.ones(1024)},
        outputs,
        grid=(4000 * 256,),
        threadgroup=(256,),
        checks=Checks.quick(),
    )
    assert out.tolist() == [64] * 4000
