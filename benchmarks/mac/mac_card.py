"""What `on_a_mac.py` says of its rows: verdicts, and a card of plain Markdown without links, to be
pasted into an issue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from benchmarks.mac.mac_sections import (
    AHEAD,
    BASIC,
    BASIC_AHEAD,
    BUILT,
    BY_MLX,
    LONG_PROMPT,
    MLX_LM,
    OURS,
    WAITING,
    Row,
)

# Of a section: its rows, its seconds, and how it ended ("complete", or what cut it off).
Result: TypeAlias = dict[str, Any]


def verdict_on_writes(rows: list[Row]) -> list[str]:
    failure = rows[0]["failure"]
    if failure is None:
        return ["Writes: in place, in order, without a copy."]
    return [f"Writes: by donated scatter, as {failure}."]


def verdict_on_bandwidth(rows: list[Row]) -> list[str]:
    return [f"Copy bandwidth, read and written: {rows[0]['copy_gb_per_s']:.1f} GB/s."]


def verdict_on_kernels(rows: list[Row]) -> list[str]:
    wrong = [row for row in rows if not row["right"]]
    seconds = [row["seconds"] for row in rows]
    lines = [
        f"Kernels: {len(rows) - len(wrong)} of {len(rows)} shapes right; a shape takes "
        f"{np.median(seconds):.2f} s to compile and try (median; expected: 1 to 5), "
        f"{max(seconds):.2f} s at most."
    ]
    return lines + [f"WRONG: {'; '.join(row['said'])}" for row in wrong]


def verdict_on_launches(rows: list[Row]) -> list[str]:
    dense, *encoded = (row["us_per_launch"] for row in rows)
    lines = [f"A launch behind another one takes {dense:.1f} us (expected: 2 to 5)."]
    if encoded:
        more = max(encoded) - dense
        lines.append(f"To encode a token's rows takes {more:+.1f} us at most (expected: below 2).")
    return lines


def verdict_on_questions(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        low, high = row["expected"]
        as_expected = low <= row["found"] <= high
        lines.append(
            f"{row['question'].capitalize()}: {row['found']:g} (expected: {low:g} to {high:g})"
            + ("." if as_expected else ": OTHERWISE.")
        )
    return lines


# On M1 and M2, 4 bits: what refutes the estimates of `few_rows.py`.
MOST_FOR_4_ROWS, MOST_OF_MLX, MOST_FOR_1_ROW = 1.25, 0.8, 1.03


def verdict_on_few_rows(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        by_mlx, by_kernel = (dict(map(tuple, row[name])) for name in ("mlx", "rows"))
        one = by_mlx[1]
        texts = [
            f"{name} {' '.join(f'{us / one:.2f}' for us in side.values())}"
            for name, side in (("MLX", by_mlx), ("rows_matmul", by_kernel))
        ]
        counts = " ".join(map(str, by_mlx))
        lines.append(f"{row['shape']}, {counts} rows over one by MLX: {'; '.join(texts)}.")
        if not row["same_bits"]:
            lines.append(f"WRONG: {row['shape']}: the bits of a row depend on the others.")
        if row["bits"] == 4 and row["generation"] in (13, 14):
            four, of_mlx, alone = by_kernel[4] / one, by_kernel[4] / by_mlx[4], by_kernel[1] / one
            holds = four <= MOST_FOR_4_ROWS and of_mlx <= MOST_OF_MLX and alone <= MOST_FOR_1_ROW
            lines.append(
                f"rows_matmul with 4 rows takes {four:.2f} of one row by MLX (expected: at most "
                f"{MOST_FOR_4_ROWS}) and {of_mlx:.2f} of 4 by MLX (at most {MOST_OF_MLX}), one row "
                f"{alone:.2f} (at most {MOST_FOR_1_ROW}): {'as estimated' if holds else 'REFUTED'}."
            )
    return lines


def verdict_on_row_costs(rows: list[Row]) -> list[str]:
    """The row of ``ROW_COSTS`` for this chip, as it is written there."""
    kinds = (
        f'"{row["kind"]}": {{{", ".join(f"{count}: {cost}" for count, cost in row["costs"])}}}'
        for row in rows
    )
    return [f'"{rows[0]["chip"]}": {{{", ".join(kinds)}}}']


def verdict_on_attention(rows: list[Row]) -> list[str]:
    measured = [row for row in rows if "wrong" not in row]
    lines = [f"WRONG: {row['wrong']}" for row in rows if "wrong" in row]
    if not measured:
        return lines
    for name, other in (("contiguous", "SDPA on contiguous K/V"), ("gather", "gather + SDPA")):
        ratios = [row[f"paged_over_{name}"] for row in measured]
        slower = [_shape_of(row) for row in measured if row[f"paged_over_{name}"] > 1.05]
        lines.append(
            f"Attention takes {min(ratios):.2f} to {max(ratios):.2f} of the time of {other} "
            f"(median {np.median(ratios):.2f}, {len(ratios)} shapes); "
            + (f"slower at {'; '.join(slower)}." if slower else "nowhere slower.")
        )
    longest = max(row["context"] for row in measured)
    shares = [row["of_copy_bandwidth"]["paged"] for row in measured if row["context"] == longest]
    lines.append(
        f"Attention over {longest:,} tokens reaches {min(shares):.0%} to {max(shares):.0%} of the "
        "copy bandwidth."
    )
    return lines


def verdict_on_streams(rows: list[Row]) -> list[str]:
    return [line for row in rows for line in _lines_of_streams(row)]


def _lines_of_streams(row: Row) -> list[str]:
    sides, name = row["sides"], row["name"]
    lines = [
        f"{name}: {side} FAILED: {figures['error']}"
        for side, figures in sides.items()
        if "error" in figures
    ]
    comparisons = [
        ("tokens_per_second", "tokens/s", OURS, MLX_LM),
        ("tpot_median", "time per token", OURS, MLX_LM),
        ("tokens_per_second", "tokens/s", AHEAD, WAITING),
        ("tokens_per_second", "tokens/s", OURS, BUILT),
        ("tokens_per_second", "tokens/s", OURS, BY_MLX),
        ("tokens_per_second", "tokens/s", BASIC_AHEAD, BASIC),
    ]
    if name == LONG_PROMPT:
        comparisons = [("ttft_median", "time to first token", OURS, MLX_LM)]
    for key, what, one, other in comparisons:
        figures = [sides.get(side, {}).get(key) for side in (one, other)]
        if all(figures):
            ratio = figures[0] / figures[1]
            lines.append(f"{name}: {what}, {one} over {other}: {ratio:.2f}.")
    seconds, estimate = sides.get(OURS, {}).get("tpot_median"), row["estimated_tokens_per_second"]
    if seconds and estimate and name != LONG_PROMPT:
        speed = row["num_streams"] / seconds
        lines.append(
            f"{name}: {speed:.0f} tokens/s decoded, {speed / estimate:.2f} of what mlx-paged fit "
            "estimates (expected: 0.5 to 1)."
        )
    return lines + [
        f"{name}: {side} gives other tokens, {share:.1%} are the same."
        for side, share in row["same_tokens"].items()
        if side != MLX_LM and share < 1
    ]


def verdict_on_memory(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        where = "without a window" if row["window"] is None else f"in a window of {row['window']}"
        # Those of longer contexts come in a few sizes; in a window there are none.
        partials = "below 50 MB, once per size of partials"
        expected = partials if row["window"] is None else "below 1 MB"
        lines.append(
            f"{row['num_decodes']:,} decodes of {row['num_seqs']} sequences {where}: MLX obtains "
            f"{row['grown_bytes'] / 1e6:.2f} MB (expected: {expected})."
        )
    peak, estimate = rows[0]["peak_bytes"], rows[0]["estimated_bytes"]
    lines.append(
        f"Activations of a prompt of {rows[0]['prompt_tokens']:,} tokens: {peak / 1e6:.0f} MB, "
        f"{peak / estimate:.2f} of the estimate (expected: 0.5 to 2)."
    )
    return lines


VERDICTS: dict[str, Callable[[list[Row]], list[str]]] = {
    "writes": verdict_on_writes,
    "bandwidth": verdict_on_bandwidth,
    "kernels": verdict_on_kernels,
    "launches": verdict_on_launches,
    "questions": verdict_on_questions,
    "few rows": verdict_on_few_rows,
    "row costs": verdict_on_row_costs,
    "attention": verdict_on_attention,
    "streams": verdict_on_streams,
    "memory": verdict_on_memory,
    "large command buffers": verdict_on_streams,
}


def verdicts_of(name: str, result: Result) -> list[str]:
    """One line each, also for what was not measured or not to the end."""
    rows = [row for row in result["rows"] if "skipped" not in row]
    lines = [f"Not measured: {row['skipped']}." for row in result["rows"] if "skipped" in row]
    if rows and name in VERDICTS:
        lines += VERDICTS[name](rows)
    if result["ended"] != "complete":
        lines.append(f"Not complete: {result['ended']}.")
    return lines


TABLES: dict[str, Callable[[list[Row]], list[Sequence[object]]]] = {
    "attention": lambda rows: [
        ["shape", "us", "/ SDPA", "/ gather + SDPA", "of copy bandwidth"],
        *(
            [
                _shape_of(row),
                f"{row['microseconds_per_layer']['paged']:.0f}",
                f"{row['paged_over_contiguous']:.2f}",
                f"{row['paged_over_gather']:.2f}",
                f"{row['of_copy_bandwidth']['paged']:.0%}",
            ]
            for row in rows
            if "wrong" not in row
        ),
    ],
    "streams": lambda rows: [
        ["requests", "side", "tokens/s", "first token, ms", "per token, ms"],
        *(
            [
                row["what"],
                side,
                f"{figures['tokens_per_second']:.1f}",
                f"{figures['ttft_median'] * 1e3:.1f}",
                f"{figures['tpot_median'] * 1e3:.2f}",
            ]
            for row in rows
            for side, figures in row["sides"].items()
            if "error" not in figures
        ),
    ],
}
TABLES["large command buffers"] = TABLES["streams"]


def _shape_of(row: Row) -> str:
    return (
        f"{row['dtype']} {row['head_dim']} x {row['group']}, run {row['run']}, "
        f"batch {row['batch']}, {row['context']:,}"
    )


def make_card(results: dict[str, Result]) -> str:
    """Markdown: the machine, the verdicts of each section, then the tables."""
    lines = ["# mlx_paged on this machine", ""]
    for row in results.get("device", {"rows": []})["rows"]:
        lines += [f"- {name}: {value}" for name, value in row.items()]
    lines += ["", "## Verdicts", ""]
    for name, result in results.items():
        said = verdicts_of(name, result)
        if said:
            lines.append(f"- {name} ({result['seconds']:.0f} s)")
            lines += [f"  - {line}" for line in said]
    for name, table in TABLES.items():
        rows = [row for row in results.get(name, {"rows": []})["rows"] if "skipped" not in row]
        if rows:
            header, *body = table(rows)
            lines += ["", f"## {name.capitalize()}", ""]
            rule = ["---"] * len(header)
            lines += ["| " + " | ".join(map(str, cells)) + " |" for cells in (header, rule, *body)]
    return "\n".join(lines) + "\n"
