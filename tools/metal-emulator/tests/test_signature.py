"""The source we generate around a body is the one MLX generates, letter by letter."""

import mlx.core as mx
import pytest
from golden_cases import CASES, GoldenCase
from make_golden import GOLDEN, mlx_sources
from metal_emulator.signature import InputType, KernelSource


def generate(case: GoldenCase) -> str:
    kernel = KernelSource(
        case.name,
        tuple(case.inputs),
        tuple(case.outputs),
        case.body,
        case.header,
        case.atomic_outputs,
    )
    inputs = [InputType.of(mx.zeros(shape, dtype)) for shape, dtype in case.inputs.values()]
    return kernel.instantiate(inputs, list(case.outputs.values()), case.template).source


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_generated_source_is_the_golden_one(case):
    assert generate(case) == (GOLDEN / f"{case.name}.metal").read_text()


def test_the_installed_mlx_prints_the_golden_sources():
    printed = mlx_sources()
    # Before 0.32.4 MLX keeps the minus of a number in the name of the function, which no compiler
    # takes. Nothing else of what it prints has changed.
    printed["negative_template"] = printed["negative_template"].replace("__-3_", "___3_")
    assert printed == {case.name: (GOLDEN / f"{case.name}.metal").read_text() for case in CASES}
