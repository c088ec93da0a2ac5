"""Runs the Metal kernels of ``mx.fast.metal_kernel`` on a CPU and checks what they do; see
README.md.
"""

from metal_emulator.checks import Call, Checks
from metal_emulator.compiler import NoCompiler, has_compiler
from metal_emulator.emulator import MetalKernel, metal_kernel, patched
from metal_emulator.errors import (
    BarrierError,
    CompileError,
    DataRace,
    EmulatorError,
    ForbiddenWrite,
    LaunchError,
    MemoryFault,
    OrderDependence,
    TimeLimit,
    UndefinedResult,
    UnwrittenOutput,
    UnwrittenRead,
)
from metal_emulator.large_array import LargeArray

__all__ = [
    "BarrierError",
    "Call",
    "Checks",
    "CompileError",
    "DataRace",
    "EmulatorError",
    "ForbiddenWrite",
    "LargeArray",
    "LaunchError",
    "MemoryFault",
    "MetalKernel",
    "NoCompiler",
    "OrderDependence",
    "TimeLimit",
    "UndefinedResult",
    "UnwrittenOutput",
    "UnwrittenRead",
    "has_compiler",
    "metal_kernel",
    "patched",
]
