"""Estimates of what a step with few rows costs by MLX's matmul and by ``rows_matmul``, and of what
batches and drafts gain from it, on each chip. Nothing is timed.

    python -m benchmarks few_rows
    python -m benchmarks charts few-rows      # draws them

A product takes the 3-norm of two times: ``(memory ** 3 + issue ** 3) ** (1 / 3)``. Memory is the
bytes of the weights over 85% of the published bandwidth. Issue is the slots of the kernel's
instructions over ``4 * cores * GHz``, a slot being a quarter of a core's cycle. Slots are counted
with Mesa's compiler for M1 and M2. Factors of later chips, and the slots of MLX's tiled kernel, are
fitted to timings that others have published, which this formula meets within 15%. MLX's kernels and
the numbers of rows at which it changes them are those of its sources. Of 16 bits its tiled kernel
is assumed from two rows on, which others measured at 2.0 on an M3 Ultra (mlx #4265).

A step's cost is that of a model's linear layers (4096 x 4096 and 4096 x 12288) over MLX's with one
row. Batches: linear layers are 92% of a step with one row, and all else grows with the rows.
Drafts: the same, each draft takes 3% of a step, as an MTP head does, and the number of drafts is
the best of one to four.

No Mac has measured these figures. `python -m benchmarks on_a_mac --only "few rows"` does, and says
whether they are refuted.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.card import make_arg_parser, print_card, print_json, print_table
from mlx_paged.ops.rows_matmul import COLUMNS, WeightShape

MLX, ROWS = "mlx", "rows"
NUM_ROWS = (1, 2, 3, 4, 5, 6, 8, 16)
BITS = (4, 8, 16)
BATCHES = (2, 4, 8)
ACCEPTANCES = (0.6, 0.75, 0.85)
MAX_DRAFTS = 4
SHAPES = ((4096, 4096), (4096, 12288))  # K, N

REACHED = 0.85  # of the published bandwidth
LINEAR_SHARE = 0.92  # of a step with one row
DRAFT_SHARE = 0.03  # of a step with one row


class Chip(NamedTuple):
    cores: int
    gigahertz: float
    gb_per_s: float
    generation: int  # of the GPU: 13 for M1 to 17 for M5
    is_ultra: bool = False


# Clocks as measured by others (philipturner/metal-benchmarks); those of M3 and later as published.
CHIPS = {
    "M1": Chip(8, 1.278, 68, 13),
    "M1 Max": Chip(32, 1.296, 400, 13),
    "M2 Ultra": Chip(76, 1.398, 800, 14, is_ultra=True),
    "M3 Max": Chip(40, 1.38, 400, 15),
    "M4 Pro": Chip(20, 1.578, 273, 16),
    "M5 Max": Chip(40, 1.6, 614, 17),
}

# Slots per KiB of packed weights, by bits: of bfloat16 on M1 and M2, which have no instructions for
# it, and of float16, whose figures hold for bfloat16 on later chips.
Slots = Mapping[int, tuple[int, int]]
# MLX's kernel for one row. M1 and M2 run it once for each row of affine weights.
QMV: Slots = {4: (331, 307), 8: (157, 141), 16: (42, 24)}
# MLX's kernel for 2 to 5 rows on M3 and later, by rows. More rows take equal passes.
QMV_WIDE = {4: {2: 595, 3: 718, 4: 842, 5: 964}, 8: {2: 275, 3: 336, 4: 398, 5: 460}}
# What published timings take of it (mlx #3764, #3839, #3791).
WIDE_FACTORS = {15: 1.0, 16: 1.0, 17: 0.73}
# MLX's tiled kernel, for up to 32 rows (mlx #4265).
TILED = {4: 2700, 8: 1350, 16: 675}
# Those of rows_matmul, with what cost_model prints.
REGISTERS = Path(__file__).parents[1] / "results" / "registers-agx.json"


def tiled_from(chip: Chip, inputs: int, outputs: int) -> int:
    """The number of rows from which MLX takes its tiled kernel."""
    size = 0 if max(inputs, outputs) <= 2048 else 1 if max(inputs, outputs) <= 4096 else 2
    if chip.is_ultra:
        return (32, 18, 12)[size]
    by_generation = {13: (14, 10, 6), 14: (14, 10, 6), 17: (33, 25, 13)}
    return by_generation.get(chip.generation, (13, 15, 13))[size]


def slots_of_mlx(chip: Chip, bits: int, inputs: int, outputs: int, rows: int) -> float:
    """Of the whole weight."""
    is_late = chip.generation >= 15
    kib = inputs * outputs * bits / 8 / 1024
    if rows >= tiled_from(chip, inputs, outputs) or (bits == 16 and rows > 1):
        return TILED[bits] * kib
    if rows == 1 or not is_late:
        return rows * QMV[bits][is_late] * kib
    passes = -(-rows // 5)
    return passes * QMV_WIDE[bits][-(-rows // passes)] * WIDE_FACTORS[chip.generation] * kib


def slots_of_rows(chip: Chip, bits: int, inputs: int, outputs: int, rows: int) -> float:
    """The same of ``rows_matmul``."""
    kind = (bits, 64, "affine") if bits < 16 else (16, 0, "dense")
    shape = WeightShape(outputs, inputs, *kind)
    passes = math.ceil(rows / shape.max_pass_rows)
    inside, outside = counted_slots(
        bits, math.ceil(rows / passes), "bfloat" if chip.generation < 15 else "half"
    )
    num_simdgroups = math.ceil(outputs / COLUMNS) * shape.splits
    return passes * (inside * inputs * outputs * bits / 8 / 1024 + outside * num_simdgroups)


@cache
def counted_slots(bits: int, rows: int, dtype: str) -> tuple[float, float]:
    """Of a pass, per KiB of packed weights, and outside of the loop per simdgroup."""
    found = {
        (row["bits"], row["rows"], row["dtype"]): (row["slots_per_kib"], row["slots_outside"])
        for row in json.loads(REGISTERS.read_text(encoding="utf-8"))["rows_matmul"]
        if row["mode"] in ("affine", "dense")
    }
    return found[bits, rows, dtype]


def microseconds(matmul: str, chip: Chip, bits: int, inputs: int, outputs: int, rows: int) -> float:
    """Of one product."""
    # A scale and a bias of 16 bits for 64 weights.
    nbytes = inputs * outputs * (bits / 8 + (4 / 64 if bits < 16 else 0))
    memory = nbytes / (REACHED * chip.gb_per_s * 1e3)
    slots = (slots_of_mlx if matmul == MLX else slots_of_rows)(chip, bits, inputs, outputs, rows)
    issue = slots / (4e3 * chip.cores * chip.gigahertz)
    return float((memory**3 + issue**3) ** (1 / 3))


def cost(matmul: str, chip: Chip, bits: int, rows: int) -> float:
    """Of a model's linear layers over those of MLX with one row."""

    def total(matmul: str, rows: int) -> float:
        return sum(microseconds(matmul, chip, bits, *shape, rows) for shape in SHAPES)

    return total(matmul, rows) / total(MLX, 1)


def batch_gain(matmul: str, chip: Chip, bits: int, num_seqs: int) -> float:
    """Tokens per second of several conversations over those of one with MLX's matmul."""
    step = LINEAR_SHARE * cost(matmul, chip, bits, num_seqs) + (1 - LINEAR_SHARE) * num_seqs
    return num_seqs / step


def draft_gain(matmul: str, chip: Chip, bits: int, acceptance: float) -> tuple[float, int]:
    """Tokens per second of one conversation with drafts over those without, and the number of
    drafts that gains most.
    """
    gains = []
    for drafts in range(1, MAX_DRAFTS + 1):
        tokens = sum(acceptance**depth for depth in range(drafts + 1))
        linear = LINEAR_SHARE * cost(matmul, chip, bits, 1 + drafts)
        gains.append((tokens / (linear + 1 - LINEAR_SHARE + DRAFT_SHARE * drafts), drafts))
    return max(gains)


def estimate() -> list[dict[str, Any]]:
    return [
        {
            "chip": name,
            "bits": bits,
            "costs": {
                matmul: {str(rows): cost(matmul, chip, bits, rows) for rows in NUM_ROWS}
                for matmul in (MLX, ROWS)
            },
            "batches": {
                matmul: {str(count): batch_gain(matmul, chip, bits, count) for count in BATCHES}
                for matmul in (MLX, ROWS)
            },
            "drafts": {
                matmul: {str(share): draft_gain(matmul, chip, bits, share) for share in ACCEPTANCES}
                for matmul in (MLX, ROWS)
            },
        }
        for bits in BITS
        for name, chip in CHIPS.items()
    ]


def print_estimates(results: list[dict[str, Any]]) -> None:
    def cells(row: dict[str, Any], name: str) -> list[str]:
        return [
            " ".join(f"{float(f'{value:.3g}'):g}" for value in row[name][matmul].values())
            for matmul in (MLX, ROWS)
        ]

    print("The cost of a step's linear layers over that of one row by MLX\n")
    rows = " ".join(map(str, NUM_ROWS))
    print_table(
        ["chip", "bits", f"MLX, {rows} rows", f"rows_matmul, {rows} rows"],
        [[row["chip"], row["bits"], *cells(row, "costs")] for row in results],
    )
    print("Tokens per second over one conversation without drafts by MLX\n")
    table = []
    for row in results:
        drafts = [
            " ".join(f"{gain:.2f} ({count})" for gain, count in row["drafts"][matmul].values())
            for matmul in (MLX, ROWS)
        ]
        table.append([row["chip"], row["bits"], *cells(row, "batches"), *drafts])
    counts, shares = (" ".join(map(str, each)) for each in (BATCHES, ACCEPTANCES))
    print_table(
        [
            *("chip", "bits"),
            *(f"{name}, {counts} conversations" for name in ("MLX", "rows")),
            *(f"{name}, drafts accepted {shares} (drafts)" for name in ("MLX", "rows")),
        ],
        table,
    )


def setup_arg_parser() -> argparse.ArgumentParser:
    return make_arg_parser(__doc__)


def main() -> None:
    args = setup_arg_parser().parse_args()
    setting = {
        "figures": "ESTIMATES; no Mac has measured them",
        "time": f"(memory ** 3 + issue ** 3) ** (1 / 3), of {REACHED:.0%} of the bandwidth and of "
        "slots / (4 * cores * GHz)",
        "layers": ", ".join(f"{inputs} x {outputs}" for inputs, outputs in SHAPES),
        "weights": "affine, groups of 64, with bfloat16 scales; 16 bits are dense",
        "step": f"{LINEAR_SHARE:.0%} linear layers with one row; a draft {DRAFT_SHARE:.0%}",
    }
    print_card("Matmuls of few rows: estimates", setting)
    results = estimate()
    print_estimates(results)
    print_json("few_rows", setting, results, args.out)


if __name__ == "__main__":
    main()
