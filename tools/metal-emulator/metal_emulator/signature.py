"""The Metal source that MLX generates around a kernel body: MLX's rules, rewritten
here and pinned by golden files.

The rules are those of ``mx.fast.metal_kernel`` in MLX 0.32. Oddities are kept on purpose, because a
body that stumbles over one here stumbles over it on a Mac.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from metal_emulator.large_array import LargeArray

# Inputs with fewer elements are passed in the constant address space.
MIN_DEVICE_ELEMENTS = 8

TYPE_NAMES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}

# In the order in which MLX adds them.
THREAD_ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

TemplateValue = bool | int | mx.Dtype


@dataclass(frozen=True)
class InputType:
    """What the generated source depends on, of one input array."""

    dtype: mx.Dtype
    ndim: int
    size: int

    @classmethod
    def of(cls, array: mx.array | LargeArray) -> InputType:
        return cls(array.dtype, array.ndim, array.size)

    @property
    def address_space(self) -> str:
        return "constant" if self.size < MIN_DEVICE_ELEMENTS else "device"


@dataclass(frozen=True)
class Parameter:
    """One buffer parameter: which array it belongs to and what of it is passed."""

    declaration: str  # without the attribute, as ``const device float* x``
    array: str
    part: str  # "data", "shape", "strides" or "ndim"
    is_output: bool = False


@dataclass(frozen=True)
class KernelSource:
    """What stays the same over all calls of one ``metal_kernel``."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    body: str
    header: str = ""
    atomic_outputs: bool = False

    @cached_property
    def attributes(self) -> list[str]:
        # A substring of the body is enough, in a comment or within a longer name, too. The header
        # is not searched.
        return [name for name in THREAD_ATTRIBUTES if name in self.body]

    def instantiate(
        self,
        inputs: Sequence[InputType],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, TemplateValue]] = (),
    ) -> Instance:
        return Instance(self, tuple(inputs), tuple(output_dtypes), tuple(template))


@dataclass(frozen=True)
class Instance:
    """A kernel whose array types and template arguments are known."""

    kernel: KernelSource
    inputs: tuple[InputType, ...]
    output_dtypes: tuple[mx.Dtype, ...]
    template: tuple[tuple[str, TemplateValue], ...]

    @cached_property
    def template_arguments(self) -> str:
        return (
            f"<{', '.join(_template_value(value) for _, value in self.template)}>"
            if self.template
            else ""
        )

    @cached_property
    def function_name(self) -> str:
        name = f"custom_kernel_{self.kernel.name}"
        if self.template:
            name += (
                "_"
                + self.template_arguments.replace(", ", "_").translate(str.maketrans("<>-", "___"))[
                    :-1
                ]
            )
        for given in self.inputs:
            passed = "s" if given.ndim == 0 else "c" if given.size < MIN_DEVICE_ELEMENTS else ""
            name += f"_{TYPE_NAMES[given.dtype]}{passed}"
        return name + "".join(f"_{TYPE_NAMES[dtype]}" for dtype in self.output_dtypes)

    @cached_property
    def parameters(self) -> list[Parameter]:
        found = []
        body = self.kernel.body
        for name, given in zip(self.kernel.input_names, self.inputs, strict=True):
            mark = "&" if given.ndim == 0 else "*"
            found.append(
                Parameter(
                    f"const {given.address_space} {TYPE_NAMES[given.dtype]}{mark} {name}",
                    name,
                    "data",
                )
            )
            if given.ndim == 0:
                continue
            for part, declaration in (
                ("shape", f"const constant int* {name}_shape"),
                ("strides", f"const constant int64_t* {name}_strides"),
                ("ndim", f"const constant int& {name}_ndim"),
            ):
                if f"{name}_{part}" in body:
                    found.append(Parameter(declaration, name, part))
        for name, dtype in zip(self.kernel.output_names, self.output_dtypes, strict=True):
            element = (
                f"atomic<{TYPE_NAMES[dtype]}>" if self.kernel.atomic_outputs else TYPE_NAMES[dtype]
            )
            found.append(Parameter(f"device {element}* {name}", name, "data", is_output=True))
        return found

    @cached_property
    def source(self) -> str:
        """The text that MLX hands to the Metal compiler, after its own utilities."""
        if not self.template:
            return self.definition
        instance = self.function_name + self.template_arguments
        host_name = f'[[host_name("{self.function_name}")]]'
        return (
            f"{self.definition}\ntemplate {host_name} [[kernel]] decltype({instance}) {instance};\n"
        )

    @cached_property
    def definition(self) -> str:
        """The source up to the end of the kernel function."""
        return f"{self.kernel.header}{self.opening}{self.kernel.body}\n}}\n"

    @cached_property
    def opening(self) -> str:
        """The lines from the template parameters to the brace that opens the function."""
        text = ""
        if self.template:
            parameters = [f"{_template_kind(value)} {name}" for name, value in self.template]
            text += f"template <{', '.join(parameters)}>\n"
        text += f"[[kernel]] void {self.function_name}(\n"
        # MLX counts inputs and outputs but not the shapes, strides and ndims between them. So
        # without a thread attribute the list is closed one or more outputs too early as soon as
        # there are several.
        last_index = len(self.inputs) + len(self.output_dtypes) - 1
        for index, parameter in enumerate(self.parameters):
            goes_on = not parameter.is_output or index < last_index or self.kernel.attributes
            text += f"  {parameter.declaration} [[buffer({index})]]" + (
                ",\n" if goes_on else ") {\n"
            )
        attributes = [
            f"  {THREAD_ATTRIBUTES[name]} {name} [[{name}]]" for name in self.kernel.attributes
        ]
        if attributes:
            text += ",\n".join(attributes) + ") {\n"
        return text


def _template_kind(value: TemplateValue) -> str:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "typename"


def _template_value(value: TemplateValue) -> str:
    return str(int(value)) if isinstance(value, int) else TYPE_NAMES[value]
