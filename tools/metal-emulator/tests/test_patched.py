"""Code that calls ``mx.fast.metal_kernel`` runs unchanged, and every call leaves a trace."""

import mlx.core as mx
import pytest
from metal_emulator import Checks, compiler, patched

pytestmark = pytest.mark.usefixtures("compiler")


def exp_elementwise(a: mx.array) -> mx.array:
    kernel = mx.fast.metal_kernel(
        name="myexp",
        input_names=["inp"],
        output_names=["out"],
        source="""
            uint elem = thread_position_in_grid.x;
            T tmp = inp[elem];
            out[elem] = metal::exp(tmp);
        """,
    )
    return kernel(
        inputs=[a],
        template=[("T", mx.float32)],
        grid=(a.size, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[a.shape],
        output_dtypes=[a.dtype],
    )[0]


def test_the_example_of_mlx_runs_unchanged():
    a = mx.random.normal((4, 16)).astype(mx.float16)
    original = mx.fast.metal_kernel
    with patched() as trace:
        b = exp_elementwise(a)
    assert mx.fast.metal_kernel is original
    assert mx.allclose(b, mx.exp(a), rtol=2**-10)
    (call,) = trace
    assert (call.kernel, call.grid, call.threadgroup) == ("myexp", (64, 1, 1), (64, 1, 1))
    assert call.template == {"T": mx.float32}
    assert call.inputs["inp"] is a and call.outputs["out"] is b


def test_inputs_may_be_lazy_and_outputs_go_on_into_mlx():
    with patched(Checks.quick()):
        a = mx.ones((3, 8)) * 2
        b = exp_elementwise(a.T.reshape(-1) + 1).sum()
    assert abs(b.item() - 24 * 2.718281828**3) < 1e-3


def test_the_trace_shows_which_inputs_share_memory():
    with patched(Checks.quick()) as trace:
        a = mx.zeros((2, 16))
        first = exp_elementwise(a)
        exp_elementwise(a.reshape(4, 8))
        exp_elementwise(first)
    addresses = [call.addresses["inp"] for call in trace]
    assert addresses[0] == addresses[1] != addresses[2]
    assert trace[2].inputs["inp"] is trace[0].outputs["out"]


def test_the_trace_counts_what_threads_did_together():
    with patched(Checks.quick()) as trace:
        kernel = mx.fast.metal_kernel("count", [], ["out"], """
            threadgroup float shared[64];
            uint i = thread_position_in_grid.x;
            shared[i % 64] = simd_sum(1.0f);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            out[i] = shared[63 - i % 64];""")  # fmt: skip
        kernel(
            inputs=[],
            grid=(192, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(192,)],
            output_dtypes=[mx.float32],
        )
    # Three threadgroups of two simdgroups.
    assert trace[0].counts == {"barriers": 3, "exchanges": 6, "threadgroup_bytes": 256}


def test_the_trace_counts_bytes_of_device_and_threadgroup_memory():
    with patched(Checks.quick(count_accesses=True)) as trace:
        kernel = mx.fast.metal_kernel(
            "count",
            ["rows", "table"],
            ["out"],
            """
            threadgroup float4 shared[32];
            uint i = thread_position_in_grid.x;
            shared[i % 32] = float4(((const device vec<half, 4>*)rows)[table[i]]);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            float sum = 0;
            for (int j = 0; j < 8; j++) sum += shared[(i + j) % 32].x;
            if (i % 2 == 0) out[i] = sum;""",
        )
        kernel(
            inputs=[mx.ones(256, mx.float16), mx.arange(64)],
            grid=(64, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[mx.float32],
            init_value=0,
        )
    (call,) = trace
    # Each thread loads four halves and their index. Only those that write add up the eight floats:
    # what the compiler leaves out is not counted.
    assert call.loaded_bytes == {
        "rows": 64 * 8,
        "table": 64 * 4,
        "out": 0,
        "threadgroup": 32 * 8 * 4,
    }
    assert call.stored_bytes == {"rows": 0, "table": 0, "out": 32 * 4, "threadgroup": 64 * 16}


@pytest.mark.parametrize("reduction", ["simd_sum", "simd_max", "simd_min"])
def test_a_reduction_of_a_simdgroup_loads_nothing(reduction):
    with patched(Checks.quick(count_accesses=True)) as trace:
        kernel = mx.fast.metal_kernel(
            "reduce",
            ["row"],
            ["out"],
            f"uint i = thread_position_in_grid.x; out[i] = {reduction}(row[i]);",
        )
        (out,) = kernel(
            inputs=[mx.ones(64)],
            grid=(64, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[mx.float32],
        )
    assert out.tolist() == [32.0 if reduction == "simd_sum" else 1.0] * 64
    assert trace[0].loaded_bytes == {"row": 256, "out": 0, "threadgroup": 0}
    assert trace[0].stored_bytes == {"row": 0, "out": 256, "threadgroup": 0}


def test_what_threads_of_a_threadgroup_load_twice_is_distinct_once():
    body = """
        uint i = thread_position_in_grid.x;
        out[i] = row[i / 2] + row[0];"""
    with patched(Checks.quick(count_accesses=True)) as trace:
        kernel = mx.fast.metal_kernel("pairs", ["row"], ["out"], body)
        kernel(
            inputs=[mx.ones(64)],
            grid=(128, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(128,)],
            output_dtypes=[mx.float32],
        )
    # The second threadgroup loads words 32 to 63, and word 0 once more.
    assert trace[0].loaded_bytes["row"] == 128 * 2 * 4
    assert trace[0].distinct_bytes["row"] == (32 + 33) * 4


def test_what_is_built_does_not_depend_on_where_the_compiler_is_installed(tmp_path):
    versions = set()
    for folder, number in (("one", 20), ("other", 20), ("newer", 21)):
        program = tmp_path / folder
        program.write_text(f"#!/bin/sh\nprintf 'clang {number}\nInstalledDir: {folder}\n'")
        program.chmod(0o755)
        versions.add(compiler._version((str(program),)))
    assert versions == {"clang 20", "clang 21"}
