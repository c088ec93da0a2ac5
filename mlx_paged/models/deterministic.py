"""What a deterministic engine multiplies with, and which models can't have one: those in which the
bits of a token's row may depend on the number of rows of a step.

They are found in the graph of a step of two rows, in which every linear layer multiplies by
``rows_matmul``: what is left there of MLX's matmuls takes other kernels for other numbers of rows.
"""

from __future__ import annotations

import io
import re
from array import array

import mlx.core as mx

from mlx_paged.cache import LayerKV
from mlx_paged.core import BlockTable
from mlx_paged.errors import ArgumentError
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.models.matmul import EMBEDDINGS, Linears, Matmul, own_class
from mlx_paged.models.matmul_choice import kernel_works
from mlx_paged.ops import AttentionMetadata, Parts, device

# Operations of MLX in which the bits of a row may depend on the number of rows, by their names.
_VARYING = {
    "Matmul": "a matmul of its own",
    "AddMM": "a matmul of its own",
    "QuantizedMatmul": "a matmul of its own",
    "GatherMM": "a matmul of experts",
    "GatherQMM": "a matmul of experts",
    "Convolution": "a convolution",
}
# On a CPU, fast norms are made of these.
_VARYING_ON_A_GPU = {"Sum": "a sum over a row", "ScaledDotProductAttention": "attention of its own"}


def deterministic_matmul(model: LanguageModel, num_rows: int, name: str) -> Matmul:
    """``rows_matmul`` for all linear layers of a model in steps of up to ``num_rows`` rows, so that
    the bits of a row do not depend on the others.

    Raises:
        ArgumentError: the model has operations in which they do; the message names them.
    """
    linears = Linears.of([model])
    made = Matmul(linears, dict.fromkeys(linears.shapes, range(1, num_rows + 1)), name)
    if (why := _why_rows_vary(model, made)) is not None:
        raise ArgumentError(
            f"[engine] deterministic can't be promised for this {model_type_of(model)}: {why}",
            "deterministic",
        )
    return made


def _why_rows_vary(model: LanguageModel, matmul: Matmul) -> str | None:
    """Why the bits of a model's row may depend on the other rows of a step, or ``None``."""
    if model.state_nbytes:
        return "its recurrent layers compute several tokens in another order than one"
    if not model.runs_packed:
        return "it runs one sequence at a time, with attention of its own"
    for reason, count in matmul.linears.kept.items():
        return f"MLX multiplies {count} of its linear layers ({reason})"
    broken = [shape for shape in matmul.num_rows if not kernel_works(shape)]
    if broken:
        return f"the kernel for its layers ({broken[0]}) has other bits on this device"
    known = {id(module) for module, _ in matmul.linears.modules}
    for path, module in model.named_modules():
        is_known = id(module) in known or own_class(module) in EMBEDDINGS
        arrays = [value for value in module.values() if isinstance(value, mx.array)]
        if not is_known and any(each.ndim > 1 for each in arrays):
            return f"{path}, a {type(module).__name__}, has a matrix that it may multiply by itself"
    varying = _VARYING | ({} if device.is_cpu() else _VARYING_ON_A_GPU)
    operations = _operations(model, matmul)
    found = next((name for name in varying if name in operations), None)
    return None if found is None else f"it has {varying[found]} ({found})"


def _operations(model: LanguageModel, matmul: Matmul) -> set[str]:
    """The names of MLX's operations in a step of two rows, without those of attention."""
    step = AttentionMetadata([array("i", [1]), array("i", [2])], [1, 1], [1, 1], block_size=8)
    layers = [_NoAttention(spec) for spec in model.layer_specs]
    for layer in layers:
        layer.open(step)
    release = matmul.acquire()
    try:
        with matmul.running():
            logits = model(mx.zeros(step.num_tokens, dtype=mx.int32), layers)
    finally:
        release()
    graph = io.StringIO()
    mx.export_to_dot(graph, logits)
    return set(re.findall(r'label ?= ?"(\w+)', graph.getvalue()))


class _NoAttention(LayerKV):
    """A layer whose attention returns zeros that depend on Q, K and V."""

    _written: tuple[mx.array, ...] = ()

    def update(self, k: mx.array, v: mx.array) -> None:
        self._written = k, v

    def stored_rows(self, table: BlockTable) -> tuple[Parts, Parts]:
        raise NotImplementedError("[deterministic] this layer stores no rows")

    def attend(self, q: mx.array, *, scale: float, sinks: mx.array | None = None) -> mx.array:
        zeros = mx.zeros((*q.shape[:2], self.spec.value_dim), q.dtype)
        made: mx.array = mx.depends(zeros, [q, *self._written])
        return made

    def update_and_attend_latents(
        self, q: mx.array, latents: mx.array, rope_keys: mx.array
    ) -> mx.array:
        zeros = mx.zeros((*q.shape[:2], latents.shape[2]), q.dtype)
        made: mx.array = mx.depends(zeros, [q, latents, rope_keys])
        return made
