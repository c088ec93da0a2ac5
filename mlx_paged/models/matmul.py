"""Which matmul the linear layers of an engine's models run: MLX's own, or ``rows_matmul``, which
reads each weight once for up to ``MAX_ROWS`` rows.

While an engine uses ``rows_matmul``, the linear layers of its models are of subclasses that call it
in the engine's steps alone (:meth:`Matmul.running`). So engines that choose differently, mlx-lm's
own functions and training can use the same model at the same time. Weights stay in place, and the
names of classes, which a model's identity covers, stay as well.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx.nn.layers.quantized import QQLinear, QuantizedEmbedding
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_paged.models.language_model import LanguageModel
from mlx_paged.ops import dtype_name
from mlx_paged.ops.rows_matmul import MAX_ROWS, refusal, rows_matmul

# Exactly these classes, not their subclasses, which may multiply in another way.
_LINEARS: tuple[type[Module], ...] = (nn.Linear, nn.QuantizedLinear)
EMBEDDINGS: tuple[type[Module], ...] = (nn.Embedding, QuantizedEmbedding)
# What else multiplies and stays with MLX, and how a report calls it.
_KEPT: tuple[tuple[tuple[type[Module], ...], str], ...] = (
    ((SwitchLinear, QuantizedSwitchLinear), "experts"),
    ((MultiLinear, QuantizedMultiLinear), "a matrix for each head"),
    (
        (
            *(AllToShardedLinear, ShardedToAllLinear),
            *(QuantizedAllToShardedLinear, QuantizedShardedToAllLinear),
        ),
        "split over ranks",
    ),
    ((nn.Linear, nn.QuantizedLinear, QQLinear), "other classes"),
)


class LinearShape(NamedTuple):
    """The shape and format of a linear layer's weight, and the dtype of its rows.

    Attributes:
        bits: of a weight; 16 for ``"dense"``.
        group_size: weights that share a scale; 0 for ``"dense"``.
        mode: of ``mx.quantize``, or ``"dense"``.
        dtype: of the rows that the layer multiplies, by name.
    """

    num_inputs: int
    num_outputs: int
    bits: int
    group_size: int
    mode: str
    dtype: str

    @classmethod
    def of(cls, module: Any, dtype: mx.Dtype) -> LinearShape:
        """
        Args:
            module: one of ``_LINEARS`` or ``EMBEDDINGS``.
            dtype: of the model's activations, for formats whose scales have another.
        """
        weight = module["weight"]
        if "scales" not in module:
            return cls(weight.shape[1], weight.shape[0], 16, 0, "dense", dtype_name(weight.dtype))
        bits, group_size, mode = module.bits, module.group_size, module.mode
        if mode == "affine":
            dtype = module["scales"].dtype
        num_inputs = weight.shape[1] * 32 // bits
        return cls(num_inputs, weight.shape[0], bits, group_size, mode, dtype_name(dtype))

    def __str__(self) -> str:
        bits = self.dtype if self.mode == "dense" else f"{self.mode} {self.bits} bits"
        return f"{self.num_inputs} x {self.num_outputs}, {bits}"


# The numbers of rows for which rows_matmul runs, by the shape of the weight.
RowCounts: TypeAlias = Mapping[LinearShape, Collection[int]]
# One row stays with MLX, so that a decode alone has the bits of mlx-lm.
SEVERAL_ROWS = range(2, MAX_ROWS + 1)


@dataclass(frozen=True, eq=False)
class Linears:
    """The linear layers of some models.

    Attributes:
        modules: those that ``rows_matmul`` can multiply, each once.
        kept: how many others there are, by the reason why they stay with MLX.
    """

    modules: Sequence[tuple[Module, LinearShape]] = ()
    kept: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, models: Sequence[LanguageModel]) -> Linears:
        """Those of these models, adapters included. An embedding is one if it gives the logits."""
        found: dict[int, tuple[Module, LinearShape]] = {}
        kept: dict[int, str] = {}
        for model in models:
            # By identity: a module may be in several places, and of several models.
            modules = {id(module): module for module in model.modules()}
            linear = {key for key, each in modules.items() if own_class(each) in _LINEARS}
            vocab_size = model.args.vocab_size
            if vocab_size not in {modules[key]["weight"].shape[0] for key in linear}:
                linear |= {
                    key
                    for key, each in modules.items()
                    if own_class(each) in EMBEDDINGS and each["weight"].shape[0] == vocab_size
                }
            for key, module in modules.items():
                if key in linear:
                    found[key] = module, LinearShape.of(module, model.dtype)
                    reason = _why_kept(*found[key])
                else:
                    reasons = (reason for kinds, reason in _KEPT if isinstance(module, kinds))
                    reason = next(reasons, None)
                if reason is not None:
                    found.pop(key, None)
                    kept[key] = reason
        return cls(list(found.values()), Counter(kept.values()))

    @cached_property
    def shapes(self) -> Mapping[LinearShape, int]:
        """The number of layers of each shape."""
        return Counter(shape for _, shape in self.modules)


def formats_of(model: Module, dtype: mx.Dtype) -> set[tuple[str, int, int, str]]:
    """The formats of a model's linear layers that ``rows_matmul`` can multiply, as
    ``try_rows_matmul`` takes them. Weights may be lazy.

    Args:
        dtype: of the model's activations.
    """
    linears = (each for each in model.modules() if own_class(each) in _LINEARS)
    shapes = ((each, LinearShape.of(each, dtype)) for each in linears)
    return {
        (shape.dtype, shape.bits, shape.group_size, shape.mode)
        for each, shape in shapes
        if _why_kept(each, shape) is None
    }


def _why_kept(module: Module, shape: LinearShape) -> str | None:
    """Why a layer stays with MLX, or ``None``."""
    return refusal(
        module["weight"],
        getattr(mx, shape.dtype),
        bits=shape.bits,
        group_size=shape.group_size,
        mode=shape.mode,
    )


@dataclass(frozen=True)
class MatmulStats:
    """Which matmul runs.

    Attributes:
        name: ``"mlx"``, or that of the engine's choice.
        num_modules: the number of linear layers by the numbers of rows, in words, for which
            ``rows_matmul`` runs in them; ``"none"`` for MLX alone.
        kept: the number of other layers, by the reason why they stay with MLX.
    """

    name: str
    num_modules: Mapping[str, int]
    kept: Mapping[str, int]

    def __str__(self) -> str:
        """In one line."""
        others = {rows: count for rows, count in self.num_modules.items() if rows != "none"}
        if not others:
            return "matmul: MLX's"
        parts = [f"for {rows} rows, in {count} layers" for rows, count in others.items()]
        stay = {"not chosen": self.num_modules.get("none", 0), **self.kept}
        said = ", ".join(f"{count} ({reason})" for reason, count in stay.items() if count)
        return f"matmul: rows {', '.join(parts)}{f'; MLX in {said}' * bool(said)}"


class Matmul:
    """What an engine multiplies with.

    Args:
        num_rows: the numbers of rows for which ``rows_matmul`` runs, by shape; MLX computes all
            others.
        name: of the choice; K/V that were computed with one of another name are not used.

    Attributes:
        computed_by: what stored K/V depend on; empty if MLX alone multiplies.
    """

    def __init__(
        self, linears: Linears | None = None, num_rows: RowCounts | None = None, name: str = "rows"
    ):
        self.linears, given = linears or Linears(), num_rows or {}
        shapes = self.linears.shapes
        self.num_rows = {shape: frozenset(given.get(shape, ())) for shape in shapes}
        self.is_used = any(self.num_rows.values())
        self.name = name if self.is_used else "mlx"
        self.computed_by = name if self.is_used else ""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, in this thread, the layers multiply as this says; others than those of the models
        that were given are not affected.
        """
        token = _num_rows.set(self.num_rows if self.is_used else None)
        try:
            yield
        finally:
            _num_rows.reset(token)

    def acquire(self) -> Callable[[], None]:
        """Give the layers their subclasses; returns a function that releases them. Once every
        engine has released a layer, it has its own class again.
        """
        held = [(module, shape) for module, shape in self.linears.modules if self.num_rows[shape]]
        with _lock:
            for module, shape in held:
                if not _num_holders[id(module)]:
                    module.__class__ = _by_rows(own_class(module), shape)
                _num_holders[id(module)] += 1

        def release() -> None:
            with _lock:
                while held:
                    module, _ = held.pop()
                    _num_holders[id(module)] -= 1
                    if not _num_holders[id(module)]:
                        del _num_holders[id(module)]
                        module.__class__ = own_class(module)

        return release

    @property
    def usual_rows(self) -> Collection[int]:
        """The numbers of rows for which ``rows_matmul`` runs in most of the weights, by bytes."""
        nbytes: Counter[int] = Counter()
        for module, shape in self.linears.modules:
            for count in (0, *self.num_rows[shape]):
                nbytes[count] += module["weight"].nbytes
        return {count for count in nbytes if count and 2 * nbytes[count] > nbytes[0]}

    def stats(self) -> MatmulStats:
        counts: Counter[str] = Counter()
        for shape, count in self.linears.shapes.items():
            counts[in_words(self.num_rows[shape])] += count
        return MatmulStats(self.name, dict(counts), dict(self.linears.kept))


def in_words(num_rows: Collection[int]) -> str:
    """Numbers of rows as ranges: ``"2 to 5, 8"``."""
    ranges: list[list[int]] = []
    for count in sorted(num_rows):
        if ranges and ranges[-1][-1] == count - 1:
            ranges[-1].append(count)
        else:
            ranges.append([count])
    words = [f"{each[0]} to {each[-1]}" if len(each) > 1 else f"{each[0]}" for each in ranges]
    return ", ".join(words) or "none"


# The numbers of rows for the thread that runs a step; None for MLX alone.
_num_rows: ContextVar[RowCounts | None] = ContextVar("rows of rows_matmul", default=None)
# How many engines hold a module, by its id. Reentrant, since the garbage collector may run a
# finalizer while the lock is held.
_lock = threading.RLock()
_num_holders: Counter[int] = Counter()


def own_class(module: Module) -> type[Module]:
    """The class of a module without the subclass of :func:`_by_rows`."""
    kind = type(module)
    return kind.__mro__["multiplies_by_rows" in vars(kind)]


@cache
def _by_rows(kind: type[Module], shape: LinearShape) -> type[Module]:
    """The subclass of a linear layer, or of an embedding that gives logits."""
    method = "as_linear" if kind in EMBEDDINGS else "__call__"
    product, dtype = getattr(kind, method), getattr(mx, shape.dtype)

    def call(self: Module, x: mx.array) -> mx.array:
        num_rows = _num_rows.get()
        if (
            num_rows is None
            or x.size // shape.num_inputs not in num_rows.get(shape, ())
            or x.dtype != dtype
        ):
            made: mx.array = product(self, x)
            return made
        y = multiplied_by_rows(self, x, shape)
        return y + self["bias"] if "bias" in self else y

    names = {method: call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**names, "multiplies_by_rows": True})


def multiplied_by_rows(module: Module, x: mx.array, shape: LinearShape) -> mx.array:
    """The product of rows ``[..., num_inputs]`` with a layer's weight, without its bias."""
    return rows_matmul(
        x,
        module["weight"],
        module.get("scales"),
        module.get("biases"),
        bits=shape.bits,
        group_size=shape.group_size,
        mode=shape.mode,
    )


def multiplied_by_mlx(module: Module, x: mx.array, shape: LinearShape) -> mx.array:
    """The same by MLX."""
    weight = module["weight"]
    if shape.mode == "dense":
        product: mx.array = x @ weight.T
        return product
    return mx.quantized_matmul(
        x,
        weight,
        module["scales"],
        module.get("biases"),
        transpose=True,
        group_size=shape.group_size,
        bits=shape.bits,
        mode=shape.mode,
    )
