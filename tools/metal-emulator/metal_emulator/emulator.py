"""``metal_kernel``: the call signature of ``mx.fast.metal_kernel``, run on the CPU and checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from metal_emulator import verdicts
from metal_emulator.checks import OUTPUT_POISONS, SHARED_POISONS, Call, Checks
from metal_emulator.compiled import compile_instance
from metal_emulator.errors import LaunchError, MemoryFault
from metal_emulator.host_memory import HostView, array_from_bytes, contiguous_bytes
from metal_emulator.large_array import LargeArray
from metal_emulator.launch import MAX_BUFFERS, GuardedBuffer, Run, launch, usable_cores
from metal_emulator.signature import InputType, Instance, KernelSource, Parameter

MAX_THREADS_PER_THREADGROUP = 1024


class MetalKernel:
    """What ``mx.fast.metal_kernel`` returns, here."""

    def __init__(
        self,
        source: KernelSource,
        ensure_row_contiguous: bool,
        checks: Checks,
        trace: list[Call] | None,
    ):
        self.source = source
        self.ensure_row_contiguous = ensure_row_contiguous
        self.checks = checks
        self.trace = trace

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | LargeArray | bool | int | float],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        source = self.source
        for given, expected, what in (
            (inputs, source.input_names, "inputs"),
            (output_shapes, source.output_names, "output_shapes"),
            (output_dtypes, source.output_names, "output_dtypes"),
        ):
            if len(given) != len(expected):
                raise ValueError(
                    f"[metal_kernel] Expected `{what}` to have size {len(expected)} but got size "
                    f"{len(given)}."
                )
        arrays = [
            given if isinstance(given, mx.array | LargeArray) else mx.array(given)
            for given in inputs
        ]
        mx.eval(arrays)
        instance = source.instantiate(
            [InputType.of(array) for array in arrays], output_dtypes, template or ()
        )
        if verbose:
            print(f"Generated source code for `{source.name}`:\n```\n{instance.source}\n```")
        call = Call(
            kernel=source.name,
            inputs=dict(zip(source.input_names, arrays, strict=True)),
            template=dict(template or ()),
            grid=_size3(grid),
            threadgroup=self._threadgroup(grid, threadgroup),
        )
        call, outputs = _Launches(self, instance, call, output_shapes, init_value).run()
        if self.trace is not None:
            self.trace.append(call)
        return outputs

    def _threadgroup(
        self, grid: tuple[int, int, int], threadgroup: tuple[int, int, int]
    ) -> tuple[int, int, int]:
        if math.prod(threadgroup) > MAX_THREADS_PER_THREADGROUP:
            raise LaunchError(
                f"[{self.source.name}] Thread group size ({math.prod(threadgroup)}) is greater "
                "than the maximum "
                f"allowed threads per threadgroup ({MAX_THREADS_PER_THREADGROUP})."
            )
        if min(*grid, *threadgroup) < 1:
            raise LaunchError(
                f"[{self.source.name}] grid {grid} or threadgroup {threadgroup} has a size below 1"
            )
        return _size3(min(t, g) for t, g in zip(threadgroup, grid, strict=True))


class _Launches:
    """All runs of one call."""

    def __init__(
        self,
        kernel: MetalKernel,
        instance: Instance,
        call: Call,
        output_shapes: Sequence[Sequence[int]],
        init_value: float | None,
    ):
        self.checks = kernel.checks
        self.instance = instance
        self.call = call
        self.compiled = compile_instance(
            instance, kernel.checks.count_accesses or kernel.checks.watch_accesses
        )
        self.init_value = init_value
        self.output_shapes = [tuple(shape) for shape in output_shapes]
        self.large = {
            name: array for name, array in call.inputs.items() if isinstance(array, LargeArray)
        }
        self.views = {
            name: HostView.of(array)
            for name, array in call.inputs.items()
            if name not in self.large
        }
        # What MLX would hand to the kernel as a copy.
        self.copied = tuple(
            name
            for name, view in self.views.items()
            if kernel.ensure_row_contiguous and not view.is_row_contiguous
        )
        self.originals = {
            name: contiguous_bytes(view.view) if name in self.copied else view.bytes
            for name, view in self.views.items()
        }
        self.allowed = None if kernel.checks.writable is None else kernel.checks.writable(call)

    def run(self) -> tuple[Call, list[mx.array]]:
        checks, results, margin_faults = self.checks, [], []
        runs = [
            Run(
                order,
                checks.seed + number,
                OUTPUT_POISONS[number % len(OUTPUT_POISONS)],
                SHARED_POISONS[number % len(SHARED_POISONS)],
                start_aligned=number % 2 == 1,
                counts_accesses=checks.count_accesses,
                watches_accesses=checks.watch_accesses,
            )
            for number, order in enumerate(checks.orders)
        ]
        for run in runs:
            result, faults = self._run_once(run)
            results.append(result)
            margin_faults += faults
        # Only now: a fault at a guard page, which another run may have met instead, names the
        # thread.
        if margin_faults:
            raise MemoryFault(margin_faults[0])
        if checks.unwritten and self.init_value is None:
            verdicts.check_written(self.call, self.instance, results, runs, self.output_shapes)
        for run, result in zip(runs[1:], results[1:], strict=True):
            verdicts.check_same(self.call, results[0], result, runs[0].order, run.order)
        outputs, inputs = results[0]
        written = {
            name: verdicts.changed_ranges(self.originals[name], data)
            for name, data in inputs.items()
        }
        verdicts.check_writes(self.call, written, self.allowed, self.copied)
        for name, ranges in written.items():
            for start, stop in ranges:
                self.originals[name][start:stop] = inputs[name][start:stop]
        made = [
            array_from_bytes(data, shape, dtype)
            for data, shape, dtype in zip(
                outputs.values(), self.output_shapes, self.instance.output_dtypes, strict=True
            )
        ]
        call = replace(
            self.call,
            addresses={name: view.address for name, view in self.views.items()},
            outputs=dict(zip(outputs, made, strict=True)),
            written_inputs=written,
            copied_inputs=self.copied,
        )
        return call, made

    def _run_once(self, run: Run) -> tuple[verdicts.Result, list[str]]:
        """The bytes after one run, and the faults at the margins of its buffers. The counts go into
        the call.
        """
        buffers: dict[str, GuardedBuffer] = {}
        try:
            addresses = [
                self._prepare(buffers, parameter, run) for parameter in self.instance.parameters
            ]
            report = launch(
                self.compiled.entry,
                addresses,
                buffers,
                [self._element_bytes(parameter) for parameter in self.instance.parameters],
                self.call.grid,
                self.call.threadgroup,
                run,
                self.checks.num_workers or usable_cores(),
                self.checks.time_limit_s,
            )
            verdicts.check_report(self.call, report, buffers, self.compiled, run.order)
            margin_faults = verdicts.margin_faults(self.call, buffers, run.shared_poison)
            result = (
                {name: buffers[name].data.copy() for name in self.instance.kernel.output_names},
                # Only those that a kernel changed are kept.
                {
                    name: buffers[name].data.copy()
                    for name in self.instance.kernel.input_names
                    if name not in self.large and not buffers[name].holds(self.originals[name])
                },
            )
        finally:
            for name, buffer in buffers.items():
                if name not in self.large:
                    buffer.give_back()
        self.call = replace(
            self.call,
            counts={
                name: getattr(report, name)
                for name in ("barriers", "exchanges", "threadgroup_bytes")
            },
            loaded_bytes=self._bytes_by_buffer(buffers, report.loaded),
            stored_bytes=self._bytes_by_buffer(buffers, report.stored),
            distinct_bytes=self._bytes_by_buffer(buffers, report.distinct),
        )
        return result, margin_faults

    def _bytes_by_buffer(self, names: Iterable[str], counted: Sequence[int]) -> dict[str, int]:
        if not self.checks.count_accesses:
            return {}
        return dict(zip(names, counted, strict=False)) | {"threadgroup": counted[MAX_BUFFERS]}

    def _prepare(self, buffers: dict[str, GuardedBuffer], parameter: Parameter, run: Run) -> int:
        """Fills the buffer of one parameter and says which address the kernel gets."""
        name = parameter.array
        if name in self.large and parameter.part == "data":
            buffers[name] = self.large[name].buffer
            return buffers[name].address
        offset = 0
        if parameter.is_output:
            index = self.instance.kernel.output_names.index(name)
            content = self._initial_output(index, run.poison)
        elif parameter.part == "data":
            content = self.originals[name]
            if name not in self.copied:
                offset = self.views[name].address - self.views[name].span[0]
        else:
            name = f"{name}_{parameter.part}"
            content = self._shape_part(parameter)
        buffer = GuardedBuffer.take(len(content), run.start_aligned)
        buffers[name] = buffer
        buffer.fill_around(run.shared_poison & 0xFF)
        buffer.data[:] = content
        if not parameter.is_output and (parameter.part != "data" or self._is_read_only(name)):
            buffer.protect()
        return buffer.address + offset

    def _element_bytes(self, parameter: Parameter) -> int:
        kernel = self.instance.kernel
        if parameter.is_output:
            index = kernel.output_names.index(parameter.array)
            return self.instance.output_dtypes[index].size
        if parameter.part == "data":
            return self.instance.inputs[kernel.input_names.index(parameter.array)].dtype.size
        return 8 if parameter.part == "strides" else 4

    def _is_read_only(self, name: str) -> bool:
        return self.allowed is not None and name not in self.allowed

    def _initial_output(self, index: int, poison: int) -> np.ndarray:
        shape, dtype = self.output_shapes[index], self.instance.output_dtypes[index]
        if self.init_value is not None:
            return contiguous_bytes(HostView.of(mx.full(shape, self.init_value, dtype)).view)
        nbytes = math.prod(shape) * dtype.size
        return verdicts.poison_bytes(poison, nbytes)

    def _shape_part(self, parameter: Parameter) -> np.ndarray:
        array = self.call.inputs[parameter.array]
        if parameter.part == "shape":
            values = np.array(array.shape, np.int32)
        elif parameter.part == "ndim":
            values = np.array([array.ndim], np.int32)
        elif parameter.array in self.copied or parameter.array in self.large:
            values = np.array(
                [math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim)], np.int64
            )
        else:
            values = np.array(self.views[parameter.array].element_strides, np.int64)
        return values.view(np.uint8)


def _size3(sizes: Iterable[int]) -> tuple[int, int, int]:
    x, y, z = sizes
    return x, y, z


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Any = None,
    *,
    checks: Checks | None = None,
    trace: list[Call] | None = None,
) -> MetalKernel:
    """As ``mx.fast.metal_kernel``; ``checks`` and ``trace`` are the emulator's own."""
    if not output_names:
        raise ValueError("[metal_kernel] Must specify at least one output.")
    kernel = KernelSource(
        name, tuple(input_names), tuple(output_names), source, header, atomic_outputs
    )
    return MetalKernel(kernel, ensure_row_contiguous, checks or Checks(), trace)


@contextmanager
def patched(checks: Checks | None = None) -> Iterator[list[Call]]:
    """``mx.fast.metal_kernel`` is the emulator's inside; yields the trace of all calls, which grows
    as they come.

    Kernels that were made inside stay emulated ones afterwards, so clear whatever caches them.
    """
    trace: list[Call] = []
    original = mx.fast.metal_kernel

    def emulated(*args: Any, **kwargs: Any) -> MetalKernel:
        return metal_kernel(*args, **kwargs, checks=checks, trace=trace)

    mx.fast.metal_kernel = emulated
    try:
        yield trace
    finally:
        mx.fast.metal_kernel = original
