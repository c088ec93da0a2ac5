"""One compiled instance of a kernel: the generated source behind the shim, and an entry that passes
the arguments.
"""

from __future__ import annotations

import ctypes
from functools import cache, cached_property

from metal_emulator.bare_pointers import find_bare_pointers
from metal_emulator.code_lines import CodeLines
from metal_emulator.compiler import (
    LINE_FLAGS,
    WATCHING_FLAGS,
    build_kernel,
    is_built,
    syntax_tree,
)
from metal_emulator.errors import CompileError
from metal_emulator.launch import load_address
from metal_emulator.metal_rules import find_doubles, find_violations
from metal_emulator.signature import THREAD_ATTRIBUTES, Instance
from metal_emulator.threadgroup_variables import share_threadgroup_variables

# What a thread attribute is, given `c`, the thread's context. A grid starts at zero, and a
# quadgroup is four lanes.
ATTRIBUTE_VALUES = {
    "dispatch_quadgroups_per_threadgroup": "8 * c.dispatch_simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup": "c.dispatch_simdgroups_per_threadgroup",
    "dispatch_threads_per_threadgroup": "emulator::to_uint3(c.dispatch_threads_per_threadgroup)",
    "grid_origin": "metal::uint3(0)",
    "grid_size": "emulator::to_uint3(c.threads_per_grid)",
    "quadgroup_index_in_threadgroup": "c.thread_index_in_threadgroup / 4",
    "quadgroups_per_threadgroup": "8 * c.simdgroups_per_threadgroup",
    "simdgroup_index_in_threadgroup": "c.simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup": "c.simdgroups_per_threadgroup",
    "thread_execution_width": "uint(emulator::kSimdWidth)",
    "thread_index_in_quadgroup": "c.thread_index_in_threadgroup % 4",
    "thread_index_in_simdgroup": "c.thread_index_in_simdgroup",
    "thread_index_in_threadgroup": "c.thread_index_in_threadgroup",
    "thread_position_in_grid": "emulator::to_uint3(c.thread_position_in_grid)",
    "thread_position_in_threadgroup": "emulator::to_uint3(c.thread_position_in_threadgroup)",
    "threadgroup_position_in_grid": "emulator::to_uint3(c.threadgroup_position_in_grid)",
    "threadgroups_per_grid": "emulator::to_uint3(c.threadgroups_per_grid)",
    "threads_per_grid": "emulator::to_uint3(c.threads_per_grid)",
    "threads_per_simdgroup": "uint(emulator::kSimdWidth)",
    "threads_per_threadgroup": "emulator::to_uint3(c.threads_per_threadgroup)",
}
assert ATTRIBUTE_VALUES.keys() == THREAD_ATTRIBUTES.keys()


def translation_unit(instance: Instance) -> str:
    """What the C++ compiler gets. Line numbers in its messages are those of the source that MLX
    generates.
    """
    kernel = instance.kernel
    body = share_threadgroup_variables(kernel.body)
    arguments = []
    for index, parameter in enumerate(instance.parameters):
        # "const device float* row" -> "*row" and "const device float*"
        declared_type, _, _ = parameter.declaration.rpartition(" ")
        pointer = declared_type.replace("&", "*")
        dereference = "*" if declared_type.endswith("&") else ""
        arguments.append(f"{dereference}({pointer})c.buffers[{index}]")
    arguments += [ATTRIBUTE_VALUES[name] for name in kernel.attributes]
    return (
        '#include "emulator/metal.h"\n'
        f'#line 1 "{kernel.name}.metal"\n'
        f"{kernel.header}{instance.opening}{body}\n}}\n"
        '#line 1 "call_of_the_kernel"\n'
        'extern "C" __attribute__((visibility("default")))\n'
        "void emulator_kernel(const emulator::Context& c) {\n"
        f"  {instance.function_name}{instance.template_arguments}({', '.join(arguments)});\n"
        "}\n"
    )


class CompiledKernel:
    """The loaded library of one instance."""

    def __init__(self, instance: Instance, watches_accesses: bool):
        self.instance = instance
        self.lines = instance.source.splitlines()
        self._flags = WATCHING_FLAGS if watches_accesses else ()
        self._unit = translation_unit(instance)
        if not is_built(self._unit, self._flags):
            self._hold_against_metal_rules(self._unit)
        try:
            path = build_kernel(self._unit, self._flags)
        except CompileError as error:
            raise CompileError(f"[{instance.kernel.name}] does not compile:\n{error}") from None
        self.library = ctypes.CDLL(str(path))
        self.entry = ctypes.cast(self.library.emulator_kernel, ctypes.c_void_p).value or 0

    @cached_property
    def _code_lines(self) -> CodeLines:
        """Of the same code, built again with a line table: few kernels have a fault."""
        return CodeLines(build_kernel(self._unit, (*self._flags, *LINE_FLAGS)))

    def line_of(self, code: int) -> int | None:
        """The line of the source that the instruction just before ``code`` comes from; ``code`` is
        relative to the entry.
        """
        address = self.entry + code - 1 - load_address(self.entry)
        return self._code_lines.line_of(address, f"{self.instance.kernel.name}.metal")

    def _hold_against_metal_rules(self, unit: str) -> None:
        name = self.instance.kernel.name
        for line in find_bare_pointers(self.instance.definition):
            raise CompileError(
                f"[{name}] does not compile on a Mac: line {line} has a pointer or reference "
                f"without an address space: {self.lines[line - 1].strip()}"
            )
        tree, errors = syntax_tree(unit)
        for violation in (
            *find_doubles(self.instance.definition),
            *find_violations(tree, f"{name}.metal"),
        ):
            text = self.lines[violation.line - 1].strip()
            raise CompileError(
                f"[{name}] does not compile on a Mac: line {violation.line}: {violation.rule}: "
                f"{text}"
            )
        if errors:
            raise CompileError(f"[{name}] does not compile:\n{errors}")


@cache
def compile_instance(instance: Instance, watches_accesses: bool = False) -> CompiledKernel:
    return CompiledKernel(instance, watches_accesses)
