"""The layers of a model with several LoRA adapters, and which of them each row of a step uses.

A linear layer that some adapter targets is wrapped in an :class:`AdaptedLinear`, which holds the
matrices of all loaded adapters stacked, ``A [num_slots, in, rank]`` and ``B [num_slots, rank,
out]``. Each row of a step has the index of its adapter's slot, so any mix of adapters takes one
pair of gathered products per layer. Slot 0 is for rows without an adapter.

The number of slots and the rank are fixed, and each row is multiplied by itself, so on a CPU its
bits do not depend on the other rows or on what else is loaded. Rows without an adapter, and layers
that an adapter does not target, keep the bits of the model: the sum is selected and not a product
with zeros added, which would turn -0.0 to 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module

# In a step with a run of at least this many tokens, as in mlx-lm's layers of experts, a GPU
# multiplies the rows of a slot together if they are in the order of their slots. Those of other
# steps, such as decodes, are always multiplied one by one, so that mixing changes no bits.
MIN_SORTED = 64

# The rows of a step


class AdapterRows:
    """Which adapter each row of a step uses.

    Args:
        ids: ``[num_rows] uint32``, the slot of each row of the first axis of a layer's input; 0 for
            none. Rows of further axes belong to the same sequence.
        logit_rows: ``[num_logit_rows] int32``, the rows that are left after a model's last norm.
        is_sorted: whether the ids are known to ascend.
    """

    def __init__(
        self, ids: mx.array, logit_rows: mx.array | None = None, is_sorted: bool = False
    ) -> None:
        self.ids, self.is_sorted = ids, is_sorted
        self._logit_rows = logit_rows
        self._made: dict[tuple[int, int], mx.array] = {}

    @classmethod
    def of(
        cls,
        slots_of_seqs: Sequence[int],
        counts: Sequence[int],
        logit_rows: mx.array | None,
    ) -> AdapterRows | None:
        """The packed rows of a step; ``None`` if no row has an adapter.

        Args:
            slots_of_seqs: the slot of each sequence.
            counts: the numbers of their new tokens.
        """
        if not any(slots_of_seqs):
            return None
        pairs = zip(slots_of_seqs, counts, strict=True)
        slots = [slot for slot, count in pairs for _ in range(count)]
        is_sorted = max(counts) >= MIN_SORTED and all(map(int.__le__, slots, slots[1:]))
        return cls(mx.array(slots, dtype=mx.uint32), logit_rows, is_sorted)

    def at(self, index: mx.array | slice) -> AdapterRows:
        """Those of some of the rows alone."""
        return AdapterRows(self.ids[index])

    def along(self, shape: Sequence[int]) -> mx.array:
        """The slots of the rows of an array.

        Args:
            shape: of its leading axes.

        Returns:
            ``[prod(shape)] uint32``

        Raises:
            NotImplementedError: the first axis has neither all rows nor those with logits.
        """
        num_rows, num_repeats = shape[0], math.prod(shape[1:])
        if self.ids.size == 1:  # A single sequence, whose tokens may be on any axis.
            num_rows, num_repeats = 1, math.prod(shape)
        made = self._made.get((num_rows, num_repeats))
        if made is None:
            made = self.ids
            if num_rows != made.size:
                if self._logit_rows is None or num_rows != self._logit_rows.size:
                    raise NotImplementedError(
                        f"[adapters] a layer gets {num_rows} rows of a step of {made.size}, so "
                        "their adapters are not known; adapters can't target it"
                    )
                made = made[self._logit_rows]
            made = mx.repeat(made, num_repeats) if num_repeats > 1 else made
            self._made[num_rows, num_repeats] = made
        return made


_running: ContextVar[AdapterRows | None] = ContextVar("adapter rows", default=None)


def adapter_rows() -> AdapterRows | None:
    """Those of the step that runs in this thread; ``None`` if no row of it has an adapter."""
    return _running.get()


@contextmanager
def running_adapters(rows: AdapterRows | None) -> Iterator[None]:
    """Have the models that run in this context use these adapters."""
    token = _running.set(rows)
    try:
        yield
    finally:
        _running.reset(token)


@contextmanager
def adapters_of(index: mx.array | slice | None) -> Iterator[None]:
    """Have the modules that run in this context, whose first axis has these rows of the step, use
    their adapters; ``None`` for all rows.
    """
    rows = _running.get()
    with running_adapters(rows if rows is None or index is None else rows.at(index)):
        yield


# The layers


class Matrices(NamedTuple):
    """Those of one layer, as they were trained; ``x @ a @ b * scale`` is added to its result."""

    a: mx.array  # [inputs, rank]
    b: mx.array  # [rank, outputs]
    scale: float


class AdaptedLayer(Module):
    """A layer and the stacked matrices of its adapters. All other attributes are the layer's.

    The names of the matrices begin with an underscore, so that the model's parameters are its own.

    Args:
        base: the layer.
        num_slots: with slot 0, which is never set.
        rank: of all adapters; smaller ones are padded with zeros.
        dtype: of the matrices and their products.
    """

    def __init__(self, base: Module, num_slots: int, rank: int, dtype: mx.Dtype):
        super().__init__()
        num_inputs, num_outputs = sizes_of(base)
        self["base"] = base
        self["_lora_a"] = mx.zeros((num_slots, num_inputs, rank), dtype)
        self["_lora_b"] = mx.zeros((num_slots, rank, num_outputs), dtype)
        self["_has_adapter"] = mx.zeros((num_slots,), mx.bool_)

    def __getattr__(self, key: str) -> Any:
        if key in self or key.startswith("_"):
            return super().__getattr__(key)
        if _running.get() is not None:
            raise NotImplementedError(
                f"[adapters] the model reads {key} of a layer that an adapter targets, instead of "
                "calling it; leave the layer out of the adapter"
            )
        return getattr(self["base"], key)

    def __setattr__(self, key: str, value: Any) -> None:
        # A few models write into their layers while they run.
        if "base" in self and not key.startswith("_"):
            setattr(self["base"], key, value)
        else:
            super().__setattr__(key, value)

    def put(self, slot: int, matrices: Matrices | None) -> None:
        """Set the matrices of a slot; ``None`` if its adapter does not target this layer. The
        previous arrays stay as they are, for steps in flight.
        """
        has_adapter = self["_has_adapter"].tolist()
        has_adapter[slot] = matrices is not None
        new = {"_has_adapter": mx.array(has_adapter)}
        if matrices is not None:
            num_missing = self["_lora_a"].shape[2] - matrices.a.shape[1]
            a = mx.pad(matrices.a.astype(self["_lora_a"].dtype), [(0, 0), (0, num_missing)])
            # In float32, so that the matrix is rounded once.
            b = matrices.b.astype(mx.float32) * matrices.scale
            b = mx.pad(b.astype(self["_lora_b"].dtype), [(0, num_missing), (0, 0)])
            start = mx.array([slot], dtype=mx.int32)
            new["_lora_a"] = mx.slice_update(self["_lora_a"], a[None], start, axes=(0,))
            new["_lora_b"] = mx.slice_update(self["_lora_b"], b[None], start, axes=(0,))
        mx.eval(new)
        dict.update(self, new)  # ``nn.Module.update`` is another method.

    def _added(self, y: mx.array, x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        """The layer's result ``y``, with ``x @ a @ b`` added in the rows whose adapter targets it.

        Args:
            a, b: ``[num_slots, width of x, any]`` and ``[num_slots, any, width of y]``.
        """
        rows = _running.get()
        assert rows is not None
        ids = rows.along(x.shape[:-1])
        z = x.reshape(-1, 1, x.shape[-1]).astype(a.dtype)
        for matrices in (a, b):
            z = mx.gather_mm(z, matrices, rhs_indices=ids, sorted_indices=rows.is_sorted)
        return self._selected(y, z, ids)

    def _selected(self, y: mx.array, z: mx.array, ids: mx.array) -> mx.array:
        has_adapter = self["_has_adapter"][ids].reshape(*y.shape[:-1], 1)
        return mx.where(has_adapter, y + z.reshape(y.shape).astype(y.dtype), y)


class AdaptedLinear(AdaptedLayer):
    """A linear layer, quantised or not, with its adapters."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self["base"](x)
        if _running.get() is None:
            return y
        return self._added(y, x, self["_lora_a"], self["_lora_b"])


class AdaptedEmbedding(AdaptedLayer):
    """An embedding, quantised or not, with its adapters. ``A`` has a row for each token."""

    def __call__(self, tokens: mx.array) -> mx.array:
        y: mx.array = self["base"](tokens)
        rows = _running.get()
        if rows is None:
            return y
        ids = rows.along(tokens.shape)
        a = self["_lora_a"][ids, tokens.reshape(-1)]
        z = mx.gather_mm(
            a[:, None], self["_lora_b"], rhs_indices=ids, sorted_indices=rows.is_sorted
        )
        return self._selected(y, z, ids)

    def as_linear(self, x: mx.array) -> mx.array:
        """The product with the vocabulary, of a model whose head is tied to its embedding."""
        y: mx.array = self["base"].as_linear(x)
        if _running.get() is None:
            return y
        b, a = self["_lora_b"].swapaxes(1, 2), self["_lora_a"].swapaxes(1, 2)
        return self._added(y, x, b, a)


_WRAPPERS: dict[type[Module], type[AdaptedLayer]] = {
    nn.Linear: AdaptedLinear,
    nn.QuantizedLinear: AdaptedLinear,
    nn.Embedding: AdaptedEmbedding,
    nn.QuantizedEmbedding: AdaptedEmbedding,
}


def wrapper_of(module: Module) -> type[AdaptedLayer] | None:
    """The wrapper of a layer; ``None`` if adapters can't target it."""
    return next((each for kind, each in _WRAPPERS.items() if isinstance(module, kind)), None)


def sizes_of(layer: Module) -> tuple[int, int]:
    """The rows of ``A`` and the columns of ``B`` for a layer: inputs and outputs of a linear one,
    tokens and dimensions of an embedding.
    """
    rows, columns = layer["weight"].shape
    columns = columns * 32 // layer.bits if "scales" in layer else columns
    is_embedding = wrapper_of(layer) is AdaptedEmbedding
    return (rows, columns) if is_embedding else (columns, rows)
