"""Reading and writing arrays: dtypes, vectors, address spaces, strides, templates."""

import mlx.core as mx
import numpy as np
import pytest
from kernel_helpers import INDEX, run, to_numpy
from metal_emulator import CompileError

pytestmark = pytest.mark.usefixtures("compiler")

DTYPES = (
    *(mx.bool_, mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64),
    *(mx.float16, mx.bfloat16, mx.float32),
)
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_is_the_same_in_every_dtype(dtype):
    row = mx.random.randint(0, 2 if dtype == mx.bool_ else 100, (77,)).astype(dtype)
    (out,) = run(f"{INDEX} out[i] = row[i];", {"row": row}, {"out": ((77,), dtype)})
    assert out.dtype == dtype and mx.array_equal(out, row)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_vectors_of_four_are_loaded_and_stored(dtype):
    row = mx.random.normal((256,)).astype(dtype)
    body = f"""{INDEX}
        const device vec<T, 4>* source = (const device vec<T, 4>*)row;
        vec<T, 4> v = source[i];
        ((device vec<T, 4>*)out)[i] = v.wzyx;"""
    (out,) = run(body, {"row": row}, {"out": ((256,), dtype)}, grid=(64,), template=[("T", dtype)])
    assert mx.array_equal(out, row.reshape(64, 4)[:, ::-1].reshape(256))


def test_vectors_behave_as_in_metal():
    body = """
        float4 a = float4(1, 2, 3, 4);
        a.xy = a.zw + 1;              // 4 5 3 4
        half4 h = half4(a) * 2.0h;    // 8 10 6 8
        float4 b(h.xyz, 0.5f);        // 8 10 6 0.5
        b += a;                       // 12 15 9 4.5
        b[3] = dot(a, float4(1));     // 12 15 9 16
        bool4 large = b > float4(10);
        float4 c = select(float4(-1), b, large);
        c = fma(c, float4(2), 1.0f);  // 25 31 -1 33
        uint3 u = uint3(7, 8, 9) % 4u;
        for (int j = 0; j < 4; j++) out[j] = c[j];
        out[4] = u.x * 100 + u.y * 10 + u.z;
        out[5] = any(large) && !all(large);
        out[6] = length(float2(3, 4)) + max(b, a).w + clamp(b, 0.0f, 13.0f).y;
        out[7] = as_type<float>(0x40490fdbu);"""
    (out,) = run(body, outputs={"out": ((8,), mx.float32)}, grid=(1,))
    assert out.tolist() == [25, 31, -1, 33, 301, 1, 5 + 16 + 13, np.float32(np.pi)]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_and_bfloat_round_to_nearest_even_after_each_operation(dtype):
    a, b = mx.random.normal((512,)), mx.random.normal((512,))
    # Ties, and what a device keeps: infinities, NaN, the largest and the smallest numbers.
    special = [
        1 + 2**-8,
        1 + 3 * 2**-8,
        1 + 2**-11,
        1 + 3 * 2**-11,
        float("inf"),
        -float("inf"),
        float("nan"),
        65519,
        65520,
        1e-7,
    ]
    a[: len(special)] = mx.array(special)
    template = [("T", dtype)]
    (rounded,) = run(
        f"{INDEX} out[i] = T(a[i]);", {"a": a}, {"out": ((512,), dtype)}, template=template
    )
    assert mx.array_equal(rounded, a.astype(dtype), equal_nan=True)
    x, y = a.astype(dtype), b.astype(dtype)
    (out,) = run(
        f"{INDEX} out[i] = x[i] * y[i] + y[i];",
        {"x": x, "y": y},
        {"out": ((512,), dtype)},
        template=template,
    )
    product = (x.astype(mx.float32) * y.astype(mx.float32)).astype(dtype)
    expected = (product.astype(mx.float32) + y.astype(mx.float32)).astype(dtype)
    assert mx.array_equal(out, expected, equal_nan=True)


def test_functions_agree_with_numpy():
    x = mx.random.uniform(0.1, 4, (64,))
    body = f"""{INDEX} float v = x[i];
        out[i * 8] = metal::exp(v); out[i * 8 + 1] = fast::exp2(v); out[i * 8 + 2] = log(v);
        out[i * 8 + 3] = rsqrt(v); out[i * 8 + 4] = metal::max(v, 1.0f);
        out[i * 8 + 5] = fma(v, v, -v);
        out[i * 8 + 6] = precise::tanh(v);
        out[i * 8 + 7] = metal::exp(-INFINITY) + numeric_limits<float>::lowest();"""
    (out,) = run(body, {"x": x}, {"out": ((64, 8), mx.float32)}, grid=(64,))
    v = np.array(x, np.float64)
    lowest = np.full_like(v, np.finfo(np.float32).min)
    expected = [
        np.exp(v),
        np.exp2(v),
        np.log(v),
        v**-0.5,
        np.maximum(v, 1),
        v * v - v,
        np.tanh(v),
        lowest,
    ]
    np.testing.assert_allclose(np.array(out), np.stack(expected, axis=1), rtol=1e-6, atol=1e-7)


def test_small_and_scalar_inputs_lie_in_the_constant_address_space():
    inputs = {
        "row": mx.arange(8),
        "few": mx.array([10, 20, 30]),
        "scale": mx.array(2.5),
        "number": 4,
    }
    body = f"""{INDEX}
        const device int* r = row; const constant int* f = few; const constant float& s = scale;
        out[i] = (r[i] + f[i % 3]) * s + number;"""
    (out,) = run(body, inputs, {"out": ((8,), mx.float32)})
    assert out.tolist() == [(i + [10, 20, 30][i % 3]) * 2.5 + 4 for i in range(8)]


def test_a_helper_for_device_memory_does_not_take_a_small_input():
    header = "inline float first(const device float* row) { return row[0]; }\n"
    body = f"{INDEX} out[i] = first(row);"
    assert run(body, {"row": mx.ones(8)}, header=header)[0].tolist() == [1] * 32
    with pytest.raises(CompileError, match="no matching function for call to 'first'"):
        run(body, {"row": mx.ones(7)}, header=header)


def test_template_arguments_are_types_numbers_and_flags():
    body = f"{INDEX} T value = row[i]; out[i] = Double ? T(value * N) : T(N);"
    for double, expected in ((True, [0, 5, 10, 15]), (False, [5, 5, 5, 5])):
        template = [("T", mx.bfloat16), ("N", 5), ("Double", double)]
        (out,) = run(body, {"row": mx.arange(4)}, {"out": ((4,), mx.bfloat16)}, template=template)
        assert out.tolist() == expected


def test_a_negative_template_argument_works():
    assert run("out[0] = N;", outputs={"out": ((1,), mx.int32)}, template=[("N", -3)])[
        0
    ].tolist() == [-3]


@pytest.mark.parametrize("ensure_row_contiguous", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_strided_inputs_are_copied_or_passed_with_their_strides(ensure_row_contiguous, dtype):
    whole = mx.random.normal((6, 10)).astype(dtype)
    for rows in (
        whole.T,
        whole[1:5, 2:9],
        whole[::-1, ::2],
        mx.broadcast_to(whole[:, :1], (6, 10)),
    ):
        body = f"""{INDEX}
            long location = (i / rows_shape[1]) * rows_strides[0];
            location += (i % rows_shape[1]) * rows_strides[1];
            out[i] = rows[location];
            if (i == 0) strides[0] = rows_strides[0];"""
        outputs = {"out": (rows.shape, dtype), "strides": ((1,), mx.int64)}
        out, strides = run(
            body, {"rows": rows}, outputs, ensure_row_contiguous=ensure_row_contiguous
        )
        assert mx.array_equal(out, rows)
        assert not ensure_row_contiguous or strides.item() == rows.shape[1]


def test_outputs_start_from_the_initial_value():
    (out,) = run(
        f"{INDEX} if (i % 2) out[i] = 1;", outputs={"out": ((6,), mx.bfloat16)}, init_value=3
    )
    assert out.tolist() == [3, 1, 3, 1, 3, 1]


def test_atomic_outputs_add_up():
    body = f"{INDEX} atomic_fetch_add_explicit(&out[i % 2], row[i], memory_order_relaxed);"
    row = mx.arange(1000, dtype=mx.uint32)
    outputs = {"out": ((2,), mx.uint32)}
    (out,) = run(body, {"row": row}, outputs, grid=(1000,), init_value=0, atomic_outputs=True)
    assert out.tolist() == [sum(range(0, 1000, 2)), sum(range(1, 1000, 2))]


def test_what_mlx_generates_without_a_thread_attribute_is_broken_here_too():
    with pytest.raises(CompileError):
        run(
            "a[0] = row_shape[0]; b[0] = 1;",
            {"row": mx.ones(8)},
            {"a": ((1,), mx.int32), "b": ((1,), mx.int32)},
        )


def test_what_python_may_pass_is_checked_as_mlx_does():
    with pytest.raises(ValueError, match=r"Expected `inputs` to have size 1 but got size 0"):
        from metal_emulator import metal_kernel

        metal_kernel("k", ["row"], ["out"], "")(
            inputs=[],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
    assert to_numpy(mx.ones(2, mx.bfloat16)).tolist() == [1, 1]
