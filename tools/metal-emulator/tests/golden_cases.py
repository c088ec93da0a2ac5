"""The calls whose generated source is pinned: every rule of the signature at least once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass
class GoldenCase:
    """One call of one kernel; ``inputs`` are shapes and dtypes, their values don't matter."""

    name: str
    body: str
    inputs: dict[str, tuple[tuple[int, ...], mx.Dtype]]
    outputs: dict[str, mx.Dtype] = field(default_factory=lambda: {"out": mx.float32})
    template: list[tuple[str, Any]] = field(default_factory=list)
    header: str = ""
    atomic_outputs: bool = False


INDEX = "uint i = thread_position_in_grid.x;"
DTYPES = (
    *(mx.bool_, mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64),
    *(mx.float16, mx.bfloat16, mx.float32),
)
ATTRIBUTES = """
uint3 position =
    thread_position_in_grid + thread_position_in_threadgroup + threadgroup_position_in_grid;
uint3 sizes = threads_per_threadgroup + threadgroups_per_grid + threads_per_grid +
    dispatch_threads_per_threadgroup;
uint lane =
    thread_index_in_simdgroup + simdgroup_index_in_threadgroup + thread_index_in_threadgroup;
uint counts = simdgroups_per_threadgroup + threads_per_simdgroup + thread_execution_width;
uint quads =
    thread_index_in_quadgroup + quadgroup_index_in_threadgroup + quadgroups_per_threadgroup;
uint rest = dispatch_quadgroups_per_threadgroup + dispatch_simdgroups_per_threadgroup +
    grid_origin.x + grid_size.x;
out[position.x] = sizes.x + lane + counts + quads + rest;"""

CASES = [
    *(
        GoldenCase(
            f"dtype_{str(dtype).split('.')[-1]}",
            f"{INDEX} out[i] = row[i];",
            {"row": ((16,), dtype)},
        )
        for dtype in DTYPES
    ),
    GoldenCase(
        "address_spaces",
        f"{INDEX} out[i] = eight[i] + seven[0] + scalar + empty[0] + matrix[0];",
        {
            "eight": ((8,), mx.float32),
            "seven": ((7,), mx.float32),
            "scalar": ((), mx.int32),
            "empty": ((0, 4), mx.float16),
            "matrix": ((2, 3), mx.bfloat16),
        },
    ),
    GoldenCase(
        "shapes_and_strides",
        f"{INDEX} out[i] = rows_shape[0] + rows_strides[1] + rows_ndim + table_shape[0] + "
        "scalar_shape;",
        {"rows": ((4, 4), mx.float32), "table": ((3,), mx.int32), "scalar": ((), mx.int32)},
    ),
    GoldenCase(
        "substrings",
        f"// thread_index_in_simdgroup is in a comment\n{INDEX} out[i] = k[i] + mask_shape[0];  // "
        "so k has one",
        {"k": ((8,), mx.float32), "mask": ((8, 8), mx.bool_)},
    ),
    GoldenCase(
        "header_is_not_searched",
        "out[0] = first(row);",
        {"row": ((8,), mx.float32)},
        header="// row_shape thread_position_in_grid\n"
        "inline float first(const device float* row) { return row[0]; }\n",
    ),
    GoldenCase(
        "templates",
        f"{INDEX} out[i] = Flag ? T(row[i]) : T(Count);",
        {"row": ((8,), mx.float16)},
        {"out": mx.bfloat16},
        [("T", mx.bfloat16), ("Count", 64), ("Flag", True), ("Off", False), ("I", mx.int64)],
    ),
    GoldenCase(
        "negative_template", "out[0] = N;", {"row": ((8,), mx.float32)}, template=[("N", -3)]
    ),
    GoldenCase("one_output", "out[0] = row[0];", {"row": ((8,), mx.float32)}),
    GoldenCase(
        "several_outputs",
        f"{INDEX} partial[i] = row[i]; token[0] = 1;",
        {"row": ((8,), mx.float32)},
        {"partial": mx.float16, "token": mx.uint8},
    ),
    GoldenCase(
        "several_outputs_without_attribute",
        "partial[0] = row[0]; token[0] = 1;",
        {"row": ((8,), mx.float32)},
        {"partial": mx.float16, "token": mx.uint8},
    ),
    GoldenCase(
        "broken_by_a_shape_without_attribute",
        "partial[0] = row_shape[0]; token[0] = 1;",
        {"row": ((8,), mx.float32)},
        {"partial": mx.float16, "token": mx.uint8},
    ),
    GoldenCase(
        "atomic_outputs",
        f"{INDEX} atomic_fetch_add_explicit(&out[0], row[i], memory_order_relaxed);",
        {"row": ((8,), mx.float32)},
        {"out": mx.float32, "count": mx.uint32},
        atomic_outputs=True,
    ),
    GoldenCase("thread_attributes", ATTRIBUTES, {"row": ((8,), mx.float32)}, {"out": mx.uint32}),
    GoldenCase("no_inputs", f"{INDEX} out[i] = i;", {}, {"out": mx.uint32}),
]
