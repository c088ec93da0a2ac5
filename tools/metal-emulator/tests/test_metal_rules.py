"""What C++ would take and Metal's compiler refuses: each is a compile error with its line."""

import mlx.core as mx
import pytest
from kernel_helpers import INDEX, run
from metal_emulator import CompileError

pytestmark = pytest.mark.usefixtures("compiler")

START = f"{INDEX} threadgroup float shared[32]; float local[4] = {{}}; "
START += "half h = 1; bfloat b = bfloat(1);"


def compile_row(statement: str, header: str = "") -> mx.array:
    (out,) = run(
        f"{START}\n{statement}\n out[i] = row[i] + few[0];",
        {"row": mx.ones(32), "few": mx.zeros(3)},
        {"out": ((32,), mx.float32)},
        header=header,
        template=[("T", mx.bfloat16)],
    )
    return out


@pytest.mark.parametrize(
    "cast",
    [
        "device float* p = (device float*)shared;",
        "device float* p = (device float*)few;",
        "const device float* p = (const device float*)few;",
        "thread float* p = (thread float*)row;",
        "threadgroup float* p = (threadgroup float*)row;",
        "const constant float* p = (const constant float*)row;",
        "threadgroup float4* p = (threadgroup float4*)local;",
        "device T* p = (device T*)(shared + 4);",
    ],
)
def test_a_cast_between_address_spaces(cast):
    with pytest.raises(
        CompileError, match=r"line 8: a pointer can't be cast .*: (const )?\w+ \w+\* p = "
    ):
        compile_row(cast)


@pytest.mark.parametrize(
    "cast",
    [
        "device float* p = (device float*)row;",
        "const device half* p = (const device half*)row;",
        "threadgroup half4* p = (threadgroup half4*)shared;",
        "const constant uint* p = (const constant uint*)few;",
        "thread float* p = (thread float*)&local[1];",
        "device float* p = nullptr;",
    ],
)
def test_a_cast_within_an_address_space(cast):
    assert compile_row(cast).sum() == 32


BFLOATS = {
    "a_variable": "bfloat x = row[i];",
    "a_literal": "bfloat x = 1.0f;",
    "an_assignment": "b = row[i];",
    "an_operation": "b += 0.5f;",
    "a_mixed_product": "b = b * row[i];",
    "through_a_template": "T x = row[i] * 2;",
    "an_element": "bfloat a[2]; a[i % 2] = row[i];",
    "a_conditional": "bfloat x = i > 3 ? row[i] : 0.0f;",
    "an_argument": "auto f = [](bfloat x) { return x; }; f(row[i]);",
    "a_result": "auto f = [](float x) -> bfloat { return x; }; f(1);",
}


@pytest.mark.parametrize("statement", BFLOATS.values(), ids=BFLOATS)
def test_a_float_that_becomes_a_bfloat_by_itself(statement):
    with pytest.raises(CompileError, match="line 8: a float does not become a bfloat by itself"):
        compile_row(statement)


@pytest.mark.parametrize("statement", ["half x = b;", "bfloat x = h;", "b = h;", "h = b;"])
def test_half_and_bfloat_do_not_become_each_other(statement):
    with pytest.raises(CompileError, match=r"kernel\.metal:8:.* error: "):
        compile_row(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "bfloat x = bfloat(row[i]); x = static_cast<bfloat>(1.0f); x = (bfloat)row[i];",
        "T x = T(row[i] * 2); x = -x + x * x;",
        "float x = b; x = x + b;",
        "half x = row[i]; x = 1.0f; x += 0.5f;",
        "bfloat4 x = bfloat4(row[i]); vec<T, 4> y = vec<T, 4>(float4(1));",
        "bfloat x = bfloat(float(h)); half y = half(float(b));",
        "bfloat x = 0;",
    ],
)
def test_conversions_that_metal_makes(statement):
    assert compile_row(statement).sum() == 32


@pytest.mark.parametrize(
    "statement",
    ["double x = 1;", "float x = double(1);", "const double twice = row[i] * 2;"],
)
def test_there_is_no_double(statement):
    with pytest.raises(CompileError, match="line 8: Metal has no double: "):
        compile_row(statement)


def test_a_literal_without_a_suffix_is_a_float():
    # In double 0.1 * 3 rounds to another float than in float.
    (out,) = run(
        f"{INDEX} out[i] = few[0] * 0.1 + 0.7; // as double would",
        {"few": mx.array([3.3])},
        {"out": ((1,), mx.float32)},
    )
    product = mx.array(3.3) * mx.array(0.1)
    assert mx.array_equal(out[0], product + mx.array(0.7))
    (size,) = run(f"{INDEX} out[i] = sizeof(0.1);", outputs={"out": ((1,), mx.int32)})
    assert size.item() == 4


@pytest.mark.parametrize(
    "declaration",
    [
        "int counter;",
        "constexpr int kFour = 4;",
        "const float kTable[2] = {1, 2};",
        "static const int kFour = 4;",
        "namespace tables { constexpr int kFour = 4; }",
        "template <typename T> constexpr int size_of = sizeof(T);",
        "struct Shape { static constexpr int width = 4; };",
        "inline int next() { static int count = 0; return ++count; }",
    ],
)
def test_a_variable_of_the_program_that_is_not_constant(declaration):
    with pytest.raises(
        CompileError,
        match="line 1: a variable of the program must be in the constant address space",
    ):
        compile_row("", header=declaration + "\n")


@pytest.mark.parametrize(
    "declaration",
    [
        "constant constexpr int kFour = 4;",
        "constant float kTable[2] = {1, 2};",
        "static constant constexpr const int kFour = 4;",
        "#define SHARED_CONST static constant constexpr const\nSHARED_CONST int kFour = 4;",
        "template <typename T> constexpr constant int size_of = sizeof(T);",
        "struct Shape { static constant constexpr int width = 4; float x; };",
        "inline int next(int n) { const int one = 1; constexpr int two = 2; return one + two; }",
        "template <typename T> METAL_FUNC T twice(T x) { T a[2] = {x, x}; return a[0] + a[1]; }",
    ],
)
def test_variables_that_metal_takes(declaration):
    assert compile_row("", header=declaration + "\n").sum() == 32
