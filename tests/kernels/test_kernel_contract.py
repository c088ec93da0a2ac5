"""What Python and the kernels have to agree on: constants, names, and one signature for each
library.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import replace

import mlx.core as mx
import pytest
from helpers.backends import METAL
from helpers.kernel_checks import checked_metal
from helpers.numpy_attention import before_the_step, make_problem
from helpers.quantised_problems import quantised
from metal_emulator.signature import MIN_DEVICE_ELEMENTS, InputType
from paged_testing.by_hand import step_of

from mlx_paged.ops import AttentionParams, KVFormat, KVHandle, attention_plan, kernels
from mlx_paged.ops.metal_sources import read_source
from mlx_paged.ops.rows_matmul import rows_matmul


def header_constants():
    found = {}
    for declaration in re.findall(r"constant constexpr int ([^;]*);", read_source("paged_kv.h")):
        for assignment in declaration.split(","):
            name, value = assignment.split("=")
            found[name.strip()] = int(value)
    return found


HEADER = header_constants()

# Constants


def test_the_header_has_the_constants_of_python():
    names = [
        *("SIMDGROUP_LANES", "MERGE_STREAMS"),
        *(name for name in HEADER if name.startswith("WORK_")),
        *("PLAN_HAS_ROWS", "PLAN_WORK"),
    ]
    assert {name: HEADER[name] for name in names} == {
        name: getattr(attention_plan, name) for name in names
    }
    assert kernels.MIN_ELEMENTS == MIN_DEVICE_ELEMENTS == 8


def test_the_header_names_every_number_of_a_plan():
    assert {name for name in HEADER if name.partition("_")[0] in ("PLAN", "WORK", "ROW")} == {
        *("PLAN_ROWS", "PLAN_WINDOW", "PLAN_HAS_ROWS", "PLAN_WORK"),
        *("WORK_BEGIN", "WORK_END", "WORK_CONTEXT_LEN", "WORK_QUERY_LEN", "WORK_FIRST_ROW"),
        *("WORK_FIRST_OUT_ROW", "WORK_BLOCKS", "WORK_FIELDS"),
        *("ROW_FIRST_PARTIAL", "ROW_STRIDE", "ROW_NUM_PARTITIONS", "ROW_FIELDS"),
    }


def test_a_plan_read_by_the_header_says_what_was_packed():
    metadata = step_of([[3], [9, 1, 7, 4, 5]], [3, 257], [2, 1], 64)
    packed = attention_plan.AttentionPlan.pack(metadata, 300, num_kv_heads=16)
    plan = packed.array.tolist()

    def records(kind, count, begin):
        fields = {
            name: HEADER[name]
            for name in HEADER
            if name.startswith(kind) and name != f"{kind}_FIELDS"
        }
        size = HEADER[f"{kind}_FIELDS"]
        return [
            {name: plan[begin + size * i + field] for name, field in fields.items()}
            for i in range(count)
        ]

    work = records("WORK", packed.num_partitions, HEADER["PLAN_WORK"])
    for partition, seq in zip(work, (0, 1, 1), strict=True):
        begin, table = partition.pop("WORK_BLOCKS"), metadata.block_tables[seq].tolist()
        assert plan[begin : begin + len(table)] == table
    names = ["BEGIN", "END", "CONTEXT_LEN", "QUERY_LEN", "FIRST_ROW", "FIRST_OUT_ROW"]
    assert work == [
        dict(zip([f"WORK_{name}" for name in names], numbers, strict=True))
        for numbers in ((0, 256, 3, 2, 0, 0), (0, 256, 257, 1, 2, 2), (256, 512, 257, 1, 2, 3))
    ]
    assert records("ROW", 3, plan[HEADER["PLAN_ROWS"]]) == [
        {"ROW_FIRST_PARTIAL": 0, "ROW_STRIDE": 2, "ROW_NUM_PARTITIONS": 1},
        {"ROW_FIRST_PARTIAL": 1, "ROW_STRIDE": 2, "ROW_NUM_PARTITIONS": 1},
        {"ROW_FIRST_PARTIAL": 2, "ROW_STRIDE": 1, "ROW_NUM_PARTITIONS": 2},
    ]
    assert (plan[HEADER["PLAN_WINDOW"]], plan[HEADER["PLAN_HAS_ROWS"]]) == (300, 1)
    assert (
        max(HEADER[name] for name in HEADER if name.startswith("PLAN_") and name != "PLAN_WORK")
        < HEADER["PLAN_WORK"]
    )


# Names


def contract(name):
    """The names in the comments at the top of the files of a kernel, one after the other."""
    names = {"template": [], "inputs": [], "outputs": []}
    for part in kernels.parts_of(name):
        for section, found in contract_of_file(f"{part}.metal").items():
            names[section] += found
    return names


def contract_of_file(name):
    """The names in the comment at the top, which has columns: section, names, what they are."""
    comment = re.match(r"(?://.*\n)+", read_source(name))[0]
    sections = dict(
        re.findall(r"^// (template|inputs|outputs|grid)   *((?:.*\n//    )*.*)", comment, re.M)
    )
    # Without remarks in parentheses, the template is a list of names over one line or more.
    template = re.sub(r"\([^)]*\)|\n//", "", sections.get("template", ""))
    names = {"template": [word.strip() for word in template.split(",") if word]}
    for section in {"inputs", "outputs"} & sections.keys():
        # A line that begins further to the right goes on with what stands above it.
        first, *others = sections[section].splitlines()
        lines = [first, *(line.removeprefix("//            ") for line in others)]
        columns = [re.split(r"\s{2,}", line)[0] for line in lines if not line.startswith(" ")]
        names[section] = [word.strip() for column in columns for word in column.split(",")]
    return names


def varied_calls():
    """All kernels with few and many rows, blocks, heads and pairs, of a few instances."""
    for num_kv_heads in (1, 3):
        setting = {"num_kv_heads": num_kv_heads, "group": 4, "head_dim": 64, "dtype": mx.float16}
        for seqs in (
            [(1, 1)],
            [(300, 1)],
            [(17, 1)] * 9,
            [(2, 2), (600, 2)],
            [(40, 40)],
            [(300, 12), (9, 1)],
        ):
            context_lens, query_lens = zip(*seqs, strict=True)
            for extras in ({}, {"window": 20, "sinks": True}):
                problem = make_problem(context_lens, query_lens, **setting, **extras)
                q, kv, metadata, params = problem.args
                rows = mx.ones((q.shape[0], num_kv_heads, 64), mx.float16)
                if params.sinks is not None:
                    params = replace(params, sinks=params.sinks.astype(mx.bfloat16))
                METAL.update_and_attend(q, rows, rows, kv, metadata, params)
                METAL.attend(q.astype(mx.float32), kv, metadata, replace(params, scale=1))
                other = replace(params, scale=0.5)
                METAL.attend(q.swapaxes(0, 1).swapaxes(0, 1), kv, metadata, other)
                METAL.reshape_and_cache((rows,), (rows,), kv, metadata.slot_mapping)
                METAL.gather_blocks(kv, problem.tables[0], 1)
                METAL.gather_blocks(kv, problem.tables[0], kv.block_size * len(problem.tables[0]))
                kv.leave_chain()
                METAL.copy_blocks(kv, [(0, 1)])
        METAL.copy_blocks(kv, [(0, n) for n in range(1, 20)])
    quantised_calls()
    latent_calls()
    matmul_calls()


def latent_calls():
    params = AttentionParams(0.125, holds_latents=True)
    for num_tokens in (1, 2, 16, 17, 100, 255):
        kv = KVHandle.allocate(20, 1, 16, 256, 64, KVFormat.dense("float16"))
        step = step_of([list(range(20))], [num_tokens], [1], 16)
        rows = mx.ones((1, 1, 256), mx.float16), mx.ones((1, 1, 64), mx.float16)
        METAL.update_and_attend(mx.ones((1, 4, 320), mx.float16), *rows, kv, step, params)
        mx.eval(kv.arrays)


def quantised_calls():
    """With so few heads that the scales of a row are fewer than eight."""
    steps = ([300], [17], [600], [17] * 9, [40, 300], [40, 5])
    for num_kv_heads, lens in zip((1, 3) * 3, steps, strict=True):
        problem = make_problem(
            lens, 1, num_kv_heads=num_kv_heads, group=4, head_dim=64, dtype=mx.float16
        )
        kv, k, v = before_the_step(quantised(problem, 8, 4))
        METAL.update_and_attend(problem.q, k, v, kv, problem.metadata, problem.params)
        METAL.attend(problem.q, kv, problem.metadata, problem.params)
        METAL.gather_blocks(kv, problem.tables[0], 1)
        METAL.gather_blocks(kv, problem.tables[0], kv.block_size * len(problem.tables[0]))


def matmul_calls():
    """One and two passes of four rows, with one simdgroup and several to share K."""
    for num_columns, width, num_rows in itertools.product((8, 41), (64, 2112), (4, 8)):
        weights = mx.quantize(mx.ones((num_columns, width), mx.float16))
        x = mx.ones((num_rows, 1, width), mx.float16)
        rows_matmul(x, *weights, bits=4, group_size=64, mode="affine")


@pytest.fixture(scope="module")
def varied_trace(compiler):
    """Made once for all tests below."""
    with checked_metal() as trace:
        varied_calls()
    return trace


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_the_head_of_each_source_names_what_is_passed(name, varied_trace):
    calls = [call for call in varied_trace if call.kernel == f"mlx_paged_{name}"]
    inputs, outputs = kernels.KERNELS[name]
    for call in calls:
        assert contract(name) == {
            "template": list(call.template),
            "inputs": list(call.inputs),
            "outputs": list(call.outputs),
        }
        assert (tuple(call.inputs), tuple(call.outputs)) == (inputs, outputs)
    assert calls


def test_each_kernel_and_template_is_one_library(varied_trace):
    """Another dtype of an input, or fewer than eight elements, would be another function for Metal
    to compile.
    """
    signatures = defaultdict(list)
    for call in varied_trace:
        types = [InputType.of(array) for array in call.inputs.values()]
        signature = [(t.dtype, "scalar" if t.ndim == 0 else t.address_space) for t in types]
        signature += [output.dtype for output in call.outputs.values()]
        signatures[(call.kernel, *call.template.items())].append(tuple(signature))
    assert {library: len(set(found)) for library, found in signatures.items()} == dict.fromkeys(
        signatures, 1
    )
    # Five of attention, for one and two queries, merged or not, and for latents; two of quantised
    # decodes, and one of each other kernel.
    assert sorted(library[0].removeprefix("mlx_paged_") for library in signatures) == sorted(
        [*kernels.KERNELS, *["paged_attention"] * 4, "paged_attention_affine"]
    )
    assert min(map(len, signatures.values())) >= 6
    small = [
        s
        for found in signatures.values()
        for s in found[0]
        if isinstance(s, tuple) and s[1] == "constant"
    ]
    assert small == []
