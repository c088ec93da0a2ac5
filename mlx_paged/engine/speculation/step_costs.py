"""``cost_of``: what the steps of a model cost on this device, by their number of rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import get_total_parameters

from mlx_paged.engine.speculation.speculation import StepCost
from mlx_paged.models.activations import num_experts_per_token
from mlx_paged.models.kv_cache import weight_nbytes
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.draft_head import Head
from mlx_paged.ops import device

# Overhead of a layer's operations on a CPU, per step and per row, in weights that are multiplied in
# the same time. Measured on 2 x86 cores with the BLAS of MLX's wheel, which multiplies a weight
# once for each row: the benchmark `speculation` has the fit.
CPU_WEIGHTS_PER_LAYER = 3e6
CPU_WEIGHTS_PER_LAYER_AND_ROW = 0.9e6
# The least gain on a CPU, where the cores that compute also sample and verify drafts: without it, 8
# streams of the demo model took 2 to 14% more CPU time than without drafts, where 5% is noise.
CPU_MIN_GAIN = 1.3

# The cost of a step with several rows over that of one row, by kind of weights: linear between the
# numbers of rows and beyond the last one. No figure was measured with this package: they are those
# that others have published, "mlx #n" an issue or pull request of MLX, and estimates by the
# instructions of MLX's kernels and by published bandwidths. Where sources contradict each other,
# the dearer one counts. `python -m benchmarks on_a_mac` prints the row of a Mac in this form.

# Two rows are not shared by MLX's kernel for one, and 2 bits are bound by unpacking: an estimate.
_TWO_BITS = {2: 2.0}
# A Qwen3.5-27B on an M2 (mlx-lm #990); estimates for an M1 Max are lower: 1.30, 1.76, 2.27, 4.51
# for 2, 3, 4, 8 rows.
_FOUR_BITS = {2: 1.73}
# Estimate for an M1 Max.
_EIGHT_BITS = {2: 1.06, 3: 1.18, 4: 1.37, 5: 1.60, 6: 2.39, 8: 2.53}
# bfloat16 on an M3 Ultra (mlx #4265), twice one row from two rows on; MLX has had a cheaper kernel
# for M3 and later since. Beyond 16 rows an estimate.
_SIXTEEN_BITS = {2: 2.0, 16: 2.0, 32: 4.0}
# Estimate for an M4 Pro, which is dearer than M3 and M5.
_EIGHT_BITS_WIDE = {2: 1.03, 4: 1.09, 8: 1.51}
# M4 Pro (mlx #3852).
_TWO_BITS_WIDE = {2: 1.30, 3: 1.82, 4: 2.34, 5: 2.86, 8: 4.53}
# The distinct experts of 2, 4 and 8 rows over those of one, of 128 experts and 8 per token, chosen
# at random. Published: with a head of a 35B-A3B an M4 Max loses 8 to 12% (oMLX #2150), with one of
# GLM-5.2 an M3 Ultra gains 24 to 31%.
_EXPERTS_ALONE = {2: 1.94, 4: 3.64, 8: 6.45}

_M1 = {
    "2 bits": _TWO_BITS,
    "4 bits": _FOUR_BITS,
    "8 bits": _EIGHT_BITS,
    "16 bits": _SIXTEEN_BITS,
    # M1 Max, a whole model (qwisp).
    "mixture": {2: 1.27, 4: 1.9, 9: 3.4},
}
_M3 = {
    "2 bits": _TWO_BITS_WIDE,
    # M3 Max (mlx #3863): 1.00, 1.28, 2.04, 2.50, 3.94 for 2, 4, 6, 8, 10 rows; the estimate is
    # dearer for 2 to 4.
    "4 bits": {2: 1.12, 3: 1.21, 4: 1.31, 6: 2.04, 8: 2.50, 10: 3.94},
    "8 bits": _EIGHT_BITS_WIDE,
    "16 bits": _SIXTEEN_BITS,
    "mixture": _EXPERTS_ALONE,
}
ROW_COSTS: dict[str, dict[str, dict[int, float]]] = {
    "M1": _M1,
    # With a head in 4 bits, every published figure is a loss: 0.59 to 0.96 of plain (mlxcel).
    "M1 Ultra": _M1 | {"4 bits": {2: 2.0}},
    "M2": _M1,
    "M3": _M3,
    # With weights that stay in its cache (mlx #4265); in a chain of other weights the same source
    # has 1.0, 1.28, 1.57 for 4, 6, 8 rows.
    "M3 Ultra": _M3 | {"4 bits": {2: 1.83, 4: 3.26, 7: 5.28, 8: 6.12}},
    # M4 Pro (mlx #3839), the dearer of two shapes; of 6 rows an estimate.
    "M4": _M3 | {"4 bits": {2: 1.20, 3: 1.35, 4: 1.57, 6: 2.27, 8: 2.69}},
    # M5 Max, a whole model of 70B (mlx #3791): 1.11, 1.41, 2.20, 3.15 for 3, 5, 8, 12 rows; the
    # estimate is dearer for 3 and 6.
    "M5": _M3 | {"4 bits": {2: 1.08, 3: 1.16, 4: 1.26, 5: 1.41, 6: 1.85, 8: 2.20, 12: 3.15}},
}
CHIPS = {13: "M1", 14: "M2", 15: "M3", 16: "M4", 17: "M5"}  # by the GPU's generation
DEAREST_CHIP = "M1 Ultra"  # for a GPU that is not one of Apple's
# The same where rows_matmul runs, over one row by MLX: estimates by instructions and published
# bandwidths, for the dearest chip of a generation and a first form of the kernel. Those of `python
# -m benchmarks few_rows` for today's are lower. Experts stay with MLX, so mixtures have the costs
# above.
_TWO_BITS_BY_ROWS = {2: 1.30, 3: 1.60, 4: 1.90, 5: 2.19, 6: 3.19, 8: 3.79, 16: 7.58}
_EIGHT_BITS_BY_ROWS = {2: 1.00, 3: 1.01, 4: 1.03, 5: 1.06, 6: 1.15, 8: 1.24, 16: 2.03}  # M1 Max
_EIGHT_BITS_BY_ROWS_LATER = {2: 1.00, 3: 1.01, 4: 1.02, 5: 1.04, 6: 1.12, 8: 1.20, 16: 1.89}
_SIXTEEN_BITS_BY_ROWS = {2: 1.00, 5: 1.01, 8: 1.03, 16: 1.19}
_M1_BY_ROWS = {
    "2 bits": _TWO_BITS_BY_ROWS,
    "4 bits": {2: 1.02, 3: 1.08, 4: 1.16, 5: 1.26, 6: 1.63, 8: 1.89, 16: 3.65},  # M1 Max
    "8 bits": _EIGHT_BITS_BY_ROWS,
    "16 bits": _SIXTEEN_BITS_BY_ROWS,
}
_LATER_BY_ROWS = _M1_BY_ROWS | {"8 bits": _EIGHT_BITS_BY_ROWS_LATER}
COSTS_BY_ROWS: dict[str, dict[str, dict[int, float]]] = {
    "M1": _M1_BY_ROWS,
    "M2": _M1_BY_ROWS,
    "M3": _LATER_BY_ROWS
    | {"4 bits": {2: 1.01, 3: 1.03, 4: 1.07, 5: 1.12, 6: 1.32, 8: 1.48, 16: 2.70}},
    "M4": _LATER_BY_ROWS
    | {"4 bits": {2: 1.01, 3: 1.05, 4: 1.11, 5: 1.18, 6: 1.46, 8: 1.67, 16: 3.15}},
    "M5": _LATER_BY_ROWS
    | {"4 bits": {2: 1.02, 3: 1.07, 4: 1.14, 5: 1.23, 6: 1.56, 8: 1.80, 16: 3.44}},
}
_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


def cost_of(
    model: LanguageModel, chip: str | None = None, by_rows: Collection[int] = ()
) -> StepCost:
    """The cost of a step of a model on a chip, such as ``"M2 Max"``, in bytes that are read; by
    default on the default device, in any unit.

    Args:
        by_rows: of :func:`row_costs`; without effect on a CPU.
    """
    shared = model.shared_output if isinstance(model, Head) else None
    num_parameters = num_parameters_of(model)
    if shared is not None:
        num_parameters += num_parameters_of(shared)
    if chip is None and device.is_cpu():
        # Weights are multiplied once per row, in addition to the overhead of the operations.
        per_row = num_parameters + CPU_WEIGHTS_PER_LAYER_AND_ROW * model.num_layers
        return StepCost.linear(CPU_WEIGHTS_PER_LAYER * model.num_layers, per_row)
    bits = 8 * weight_nbytes(model, shared) / num_parameters
    read = nbytes_read(model, 1) + (0 if shared is None else weight_nbytes(shared))
    is_mixture = bool(num_experts_per_token(model))
    return StepCost.relative(row_costs(bits, is_mixture, chip, by_rows), read)


def row_costs(
    bits: float, is_mixture: bool, chip: str | None = None, by_rows: Collection[int] = ()
) -> Mapping[int, float]:
    """The row of ``ROW_COSTS`` for a chip, by default for this machine's GPU; and that of
    ``COSTS_BY_ROWS`` for the numbers of rows that ``rows_matmul`` multiplies.

    Args:
        bits: the average of a weight, with scales and biases.
        is_mixture: of experts.
        by_rows: ``Matmul.usual_rows``.
    """
    chip = chip or _chip_here()
    chip = chip if chip in ROW_COSTS else chip.partition(" ")[0]
    if is_mixture:
        return ROW_COSTS[chip]["mixture"]
    kinds = {4.0: "2 bits", 8.0: "4 bits", 12.0: "8 bits"}
    kind = next((kind for most, kind in kinds.items() if bits < most), "16 bits")
    costs = ROW_COSTS[chip][kind]
    if not by_rows:
        return costs
    others = COSTS_BY_ROWS[chip.partition(" ")[0]][kind]
    by_mlx, by_kernel = StepCost.relative(costs), StepCost.relative(others)
    return {
        count: (by_kernel if count in by_rows else by_mlx).of(count)
        for count in sorted({*costs, *others})
    }


def _chip_here() -> str:
    gpu = device.apple_gpu()
    if gpu is None:
        return DEAREST_CHIP
    chip = CHIPS[min(max(gpu.generation, min(CHIPS)), max(CHIPS))]
    return f"{chip} Ultra" if gpu.is_ultra else chip


def nbytes_read(model: LanguageModel, num_rows: int) -> int:
    """Bytes of weights that a step reads. Experts count with the share that the rows choose,
    independently of each other; embeddings only if they also compute the logits.
    """
    modules = [each for _, each in model.named_modules() if "weight" in each]
    experts = [each for each in modules if isinstance(each, _EXPERTS)]
    share, vocab_size = 1.0, model.args.vocab_size
    if experts and (chosen := num_experts_per_token(model)):
        num_experts = max(each.weight.shape[0] for each in experts)
        share = 1 - (1 - min(1.0, chosen / num_experts)) ** num_rows
    has_head = any(
        isinstance(each, nn.Linear | nn.QuantizedLinear) and each.weight.shape[0] == vocab_size
        for each in modules
    )
    has_head = has_head or (isinstance(model, Head) and not model.reads_embedding)
    total = 0
    for each in modules:
        # Its own arrays, without those of its submodules.
        nbytes = sum(value.nbytes for value in each.values() if isinstance(value, mx.array))
        if isinstance(each, _EXPERTS):
            nbytes = int(share * nbytes)
        elif has_head and isinstance(each, nn.Embedding | nn.QuantizedEmbedding):
            nbytes = 0
        total += nbytes
    return total


def num_parameters_of(model: Module) -> int:
    """The number of a model's parameters, counting packed ones individually."""
    return int(get_total_parameters(model))
