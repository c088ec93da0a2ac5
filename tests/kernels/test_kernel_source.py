"""The text of the kernels: what MLX makes of it, what may be in it, and how many libraries a Mac
has to compile.
"""

from __future__ import annotations

import re

import mlx.core as mx
import pytest
from helpers.backends import METAL
from make_kernel_golden import GOLDEN, call_every_kernel, head, mlx_sources
from metal_emulator.signature import InputType, KernelSource
from paged_testing.by_hand import step_of

from mlx_paged.ops import AttentionParams, KVFormat, KVHandle, kernels
from mlx_paged.ops.metal_sources import METAL_FOLDER, read_source

FILES = [
    *dict.fromkeys([*kernels.HEADERS, *kernels.MATMUL_HEADERS]),
    *sorted({f"{part}.metal" for name in kernels.KERNELS for part in kernels.parts_of(name)}),
]


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    return mlx_sources()


@pytest.fixture
def recorded(monkeypatch) -> list[tuple[str, dict]]:
    """Every kernel call, which computes nothing."""
    calls = []

    def record(name):
        def call(**arguments):
            calls.append((name, arguments))
            return [
                mx.zeros(*output)
                for output in zip(
                    arguments["output_shapes"], arguments["output_dtypes"], strict=True
                )
            ]

        return call

    monkeypatch.setattr(kernels, "kernel", record)
    return calls


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_the_head_of_each_kernel_is_the_golden_one(name, printed):
    assert head(printed[name]) == (GOLDEN / f"{name}.metal").read_text()


def test_the_emulator_runs_what_the_installed_mlx_would_compile(printed, recorded):
    call_every_kernel()
    sources = {}
    for name, call in recorded:
        source = KernelSource(
            f"mlx_paged_{name}",
            *kernels.KERNELS[name],
            kernels.body(name),
            kernels.header(name),
        )
        inputs = [InputType.of(array) for array in call["inputs"]]
        sources[name] = source.instantiate(inputs, call["output_dtypes"], call["template"]).source
    assert set(sources) == set(kernels.KERNELS)
    assert sources == printed


def test_every_kernel_has_a_file_and_every_file_a_kernel():
    assert {path.name for path in METAL_FOLDER.iterdir()} == {"README.md", *FILES}


def test_no_length_is_compiled_into_a_kernel(recorded):
    kv = KVHandle.allocate(700, 2, 8, 128, 128, KVFormat.dense("float16"))
    libraries = []
    for context_lens in ([9], [10, 11, 12], [300], [5000, 3], [4999, 2, 700], [257] * 9):
        tables = [list(range(1, 1 + -(-n // 8))) for n in context_lens]
        metadata = step_of(tables, context_lens, [1] * len(context_lens), 8)
        rows = mx.zeros((len(context_lens), 2, 128), mx.float16)
        queries = mx.zeros((len(context_lens), 4, 128), mx.float16)
        recorded.clear()
        METAL.update_and_attend(queries, rows, rows, kv, metadata, AttentionParams(0.1))
        METAL.gather_blocks(kv, tables[0], context_lens[0])
        METAL.copy_blocks(kv, [(3, 4 + n) for n in range(len(context_lens))])
        libraries.append({(name, *call["template"]) for name, call in recorded})
    short, long = libraries[0], libraries[2]
    assert [len(short), len(long)] == [3, 4]
    assert libraries == [short, short, long, long, long, long]


# What the header says that the bodies use


def vocabulary() -> set[str]:
    text = re.search(r"// Vocabulary\..*?\n(.*?)\n//\n", read_source("paged_kv.h"), re.S).group(1)
    # Names come first in each line; two spaces or more, and what they are.
    lines = [re.split(r"\s{2,}", line.removeprefix("//").strip()) for line in text.splitlines()]
    return {word for names, *_ in lines for word in re.findall(r"\w+(?:::\w+)?", names)}


def code(name: str) -> str:
    return re.sub(r"//.*", "", read_source(name))


BUILT_IN = re.compile(
    r"\b(?:simd_\w+|quad_\w+|fast::\w+|precise::\w+|atomic_\w+|threadgroup_barrier|simdgroup_barrier|mem_flags::\w+"
    r"|\w+_(?:position|index)_in_\w+|\w+_per_(?:grid|threadgroup|simdgroup)|half\d*|bfloat\d*|float\d+|vec"
    r"|fma|dot|rint|round|max|min|clamp|select|exp2?|log|rsqrt|sqrt|as_type|any|all|mad|fabs|abs)\b"
)


@pytest.mark.parametrize("name", FILES)
def test_the_bodies_use_the_words_of_the_vocabulary_and_no_others(name):
    used = set(BUILT_IN.findall(code(name)))
    assert used <= vocabulary() | {"mem_flags::mem_threadgroup", "fast::exp"}, used - vocabulary()


def test_the_vocabulary_lists_nothing_that_no_kernel_uses():
    used = set(
        re.findall(
            r"\w+(?:::\w+)?", " ".join(code(path.name) for path in METAL_FOLDER.glob("*.[mh]*"))
        )
    )
    address_spaces = {"device", "constant", "threadgroup", "thread"}
    listed = vocabulary() & (set(BUILT_IN.findall(" ".join(vocabulary()))) | address_spaces)
    assert listed - used <= {"half", "bfloat", "vec"}, "element types come in as T"
