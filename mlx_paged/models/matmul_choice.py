"""The choice of a matmul by the option ``matmul``: MLX's, ``rows_matmul``, or the faster of the
two, which is measured for the weights of a model and kept in a file of the user's cache folder.

The name of the chip is only in the name of the file. A choice that was kept is not measured again,
so the steps of an engine are the same after each start.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged import __version__
from mlx_paged.block_store.directory import Directory, user_cache_folder
from mlx_paged.block_store.layout import BadBlockFileError
from mlx_paged.models.matmul import (
    SEVERAL_ROWS,
    Linears,
    LinearShape,
    RowCounts,
    formats_of,
    multiplied_by_mlx,
    multiplied_by_rows,
)
from mlx_paged.ops import choose
from mlx_paged.ops.rows_matmul import try_rows_matmul
from mlx_paged.ops.tried_once import GoOn
from mlx_paged.options.argument_values import is_plain_integer

# The numbers of rows that are measured. Others go by the next larger one.
MEASURED_ROWS = (1, 2, 4, 8, 16)
# Only the shapes with the most bytes are measured. Others go by the nearest one of their format, or
# stay with MLX.
MAX_SHAPES = 3
# Of weights that are multiplied one after another: more than the last-level cache of any chip,
# which has up to 96 MB. A model may have less of a shape.
CHAIN_NBYTES = 128 * 2**20
NUM_TURNS = 3
# What was not measured by then stays with MLX.
MAX_SECONDS = 0.5
# rows_matmul runs if it takes at most this share of the time. A smaller gain may be noise.
MAX_SHARE = 0.95


def chosen_rows(
    option: str, linears: Linears, clock: Callable[[], float] = time.perf_counter
) -> RowCounts:
    """The numbers of rows for which ``rows_matmul`` runs, by shape.

    Args:
        option: ``matmul`` of an engine. ``"auto"`` is MLX where there is no Metal.
        clock: seconds; measures the durations.
    """
    if option == "mlx" or (option == "auto" and not choose.is_metal_available()):
        return {}
    modules: dict[LinearShape, list[Module]] = defaultdict(list)
    for module, shape in linears.modules:
        modules[shape].append(module)
    if option == "rows":
        return {shape: SEVERAL_ROWS for shape in modules if kernel_works(shape)}
    largest = sorted(modules, key=lambda shape: -_nbytes(modules[shape]))[:MAX_SHAPES]
    faster = known_choices({each: modules[each] for each in largest if kernel_works(each)}, clock)
    chosen = {shape: _as_nearest(shape, faster) for shape in modules}
    return {shape: rows for shape, rows in chosen.items() if rows}


def try_formats_of(option: str, model: Module, dtype: mx.Dtype) -> Callable[[GoOn], None] | None:
    """A function that tries the kernels for :func:`chosen_rows` in advance, in any thread;
    ``None`` if no kernel has to be tried.

    Args:
        model: its weights may be lazy.
        dtype: of its activations.
    """
    if option not in ("auto", "rows") or not choose.is_metal_available():
        return None
    formats = sorted(formats_of(model, dtype))

    def try_formats(go_on: GoOn) -> None:
        for format in formats:
            try_rows_matmul.quietly(*format, go_on=go_on)

    return try_formats


def kernel_works(shape: LinearShape) -> bool:
    """Whether the kernel for this format works here; a warning says if it does not."""
    if not choose.is_metal_available():
        return True  # Plain MLX runs.
    return try_rows_matmul(shape.dtype, shape.bits, shape.group_size, shape.mode)


def some_rows(num_rows: int, shape: LinearShape) -> mx.array:
    """Rows for a layer, ``[num_rows, num_inputs]``."""
    values = mx.sin(mx.arange(num_rows * shape.num_inputs)).reshape(num_rows, -1)
    return values.astype(getattr(mx, shape.dtype))


def _nbytes(modules: Sequence[Module]) -> int:
    return sum(module["weight"].nbytes for module in modules)


def _as_nearest(shape: LinearShape, faster: Mapping[LinearShape, Sequence[int]]) -> Sequence[int]:
    """The numbers of rows for a shape, by the nearest one whose format is the same."""
    alike = [each for each in faster if each[2:] == shape[2:]]
    if not alike:
        return ()

    def distance(other: LinearShape) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(shape[:2], other[:2], strict=True))

    chosen = faster[min(alike, key=distance)]
    begins = [0, *MEASURED_ROWS]
    ranges = zip(begins, MEASURED_ROWS, strict=False)
    return [rows for begin, end in ranges if end in chosen for rows in range(begin + 1, end + 1)]


# Durations

Product: TypeAlias = Callable[[Module, mx.array, LinearShape], mx.array]


def measured_choices(
    modules: Mapping[LinearShape, Sequence[Module]], clock: Callable[[], float]
) -> dict[LinearShape, tuple[int, ...]]:
    """For each shape those of ``MEASURED_ROWS`` for which ``rows_matmul`` is faster than MLX."""
    begin = clock()
    least: dict[tuple[LinearShape, int, Product], float] = defaultdict(lambda: math.inf)
    products: tuple[Product, ...] = (multiplied_by_mlx, multiplied_by_rows)
    chains = {
        shape: each[: max(1, CHAIN_NBYTES // _nbytes(each[:1]))] for shape, each in modules.items()
    }
    # A chain comes after those of the other shapes, so that its weights are in no cache.
    turns = itertools.product(range(NUM_TURNS), MEASURED_ROWS, products, modules)
    for _, num_rows, product, shape in turns:
        if clock() - begin > MAX_SECONDS:
            break
        seconds = seconds_of_chain(chains[shape], num_rows, shape, product, clock)
        key = shape, num_rows, product
        least[key] = min(least[key], seconds)
    return {
        shape: tuple(
            rows
            for rows in MEASURED_ROWS
            if least[shape, rows, multiplied_by_rows]
            <= MAX_SHARE * least[shape, rows, multiplied_by_mlx]
            < math.inf
        )
        for shape in modules
    }


def seconds_of_chain(
    modules: Sequence[Module],
    num_rows: int,
    shape: LinearShape,
    product: Product,
    clock: Callable[[], float],
) -> float:
    """How long products with different weights take, each of which waits for the one before."""
    rows = some_rows(num_rows, shape)
    mx.eval(rows)
    for module in modules:
        rows = mx.minimum(rows, product(module, rows, shape)[:, :1])
    begin = clock()
    mx.eval(rows)
    return clock() - begin


# The file


def known_choices(
    modules: Mapping[LinearShape, Sequence[Module]], clock: Callable[[], float]
) -> dict[LinearShape, tuple[int, ...]]:
    """:func:`measured_choices`, or those that the file has. A file that is damaged, or can't be
    read or written, is ignored.
    """
    kept: dict[LinearShape, tuple[int, ...]] = {}
    with contextlib.suppress(OSError, BadBlockFileError, ValueError, TypeError, RuntimeError):
        kept = from_entries(json.loads(Directory.at(cache_folder()).read(_file_name())))
    missing = {shape: each for shape, each in modules.items() if shape not in kept}
    if missing:
        kept |= measured_choices(missing, clock)
        with contextlib.suppress(OSError, RuntimeError):
            cache_folder().mkdir(parents=True, exist_ok=True)
            content = json.dumps(as_entries(kept)).encode()
            Directory.at(cache_folder()).write_atomically(_file_name(), [content])
    return {shape: kept[shape] for shape in modules}


def cache_folder() -> Path:
    """The folder of choices. Raises RuntimeError without a home."""
    return user_cache_folder() / "mlx_paged"


def _file_name() -> str:
    """Of this chip, this version of MLX, and this one of the package."""
    info = mx.device_info()
    chip = str(info.get("device_name", info.get("architecture", "gpu")))
    return re.sub(r"[^\w.]+", "-", f"matmul-{chip}-{version('mlx')}-{__version__}.json")


def as_entries(chosen: RowCounts) -> list[list[object]]:
    """A choice in the types of JSON."""
    return [[*shape, *sorted(rows)] for shape, rows in chosen.items()]


def from_entries(entries: object) -> dict[LinearShape, tuple[int, ...]]:
    """The inverse of :func:`as_entries`. Raises ValueError or TypeError for anything else."""
    if not isinstance(entries, list):
        raise ValueError("[matmul] a choice is a list")
    width = len(LinearShape._fields)
    kinds = (int, int, int, int, str, str)
    found = {}
    for entry in entries:
        shape, rows = entry[:width], entry[width:]
        if [type(each) for each in shape] != [*kinds] or not all(map(is_plain_integer, rows)):
            raise ValueError("[matmul] a choice is a shape and numbers of rows")
        found[LinearShape(*shape)] = tuple(rows)
    return found
