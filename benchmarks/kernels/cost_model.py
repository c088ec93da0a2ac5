"""A cost model instead of a stopwatch: the bytes that the attention kernels move, counted on the
Metal emulator.

    python -m benchmarks cost_model            # some minutes, more while kernels are compiled
    python -m benchmarks cost_model --quick

Two things bound a decode: the bytes that it moves and the instructions that it issues. What a
threadgroup loads is counted by buffer, each word once, as a core's cache serves what its simdgroups
load again, and set beside two other figures:

- the least possible: each K/V row that a query sees once, each query, each new row and each output
  once;
- gather + SDPA, which is what MLX does without such kernels: K/V are read from the slabs, written
  densely and read again, which is three times the least at best, plus queries and outputs.

The script fails (status 1) when a threadgroup's K/V loads are more than 1.02 times the least at a
context above 256. Barriers and threadgroup memory are counted, too.

Registers, spills and issue slots were measured apart, with Mesa's open compiler for M1 and M2, and
are kept in results/registers-agx.json together with the hash of the kernels that they belong to.
The roofline at the end is an estimate from published bandwidths, and says so. The emulator comes
with an editable install of a clone: pip install -e '.[test]'.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
from metal_emulator import Checks, has_compiler
from metal_emulator.compiler import find_compiler
from paged_testing.by_hand import step_of
from paged_testing.emulated_metal import emulated_metal

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged import ops
from mlx_paged.cli.fit.machine import BANDWIDTHS
from mlx_paged.ops import attention_plan, kernels
from mlx_paged.ops.attention_plan import SIMDGROUP_LANES
from mlx_paged.ops.metal import MetalBackend
from mlx_paged.ops.metal_sources import read_source

SLABS, ROWS = kernels.AFFINE_SLABS, kernels.ROWS  # dense slabs have names of theirs
KV_BOUND = 1.02
KV_BOUND_ABOVE = 256  # tokens of context
DTYPES = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}

REGISTERS = Path(__file__).parents[1] / "results" / "registers-agx.json"

CONTEXTS = (16, 256, 257, 512, 1024, 4096)
GROUPS = (1, 2, 4, 5, 8, 16)

# GPU cores and GHz, as measured by others (philipturner/metal-benchmarks).
CORES = {"M1": (8, 1.278), "M1 Max": (32, 1.296), "M2 Max": (38, 1.398)}
QWEN3_0_6B = {"num_layers": 28, "num_kv_heads": 8, "head_dim": 128, "itemsize": 2}
ROOFLINE_CONTEXTS = (4096, 32768)


@dataclass(frozen=True)
class Case:
    """One attention call of a ragged batch: sequence ``s`` has ``context_lens[s]`` tokens,
    ``query_lens[s]`` new.
    """

    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    group: int
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bf16"
    window: int | None = None
    # update_and_attend: K/V of the new tokens come from inputs and are written into their slots
    has_rows: bool = False
    bits: tuple[int, int] | None = None  # of K and V, where they are quantised

    @classmethod
    def of_one(cls, context: int, run: int, group: int, **changes: Any) -> Case:
        return cls((context,), (min(run, context),), group, **changes)

    @property
    def row_bytes(self) -> int:
        """Of a query."""
        return self.head_dim * DTYPES[self.dtype].size

    @cached_property
    def format(self) -> ops.KVFormat:
        dtype = ops.dtype_name(DTYPES[self.dtype])
        if self.bits is None:
            return ops.KVFormat.dense(dtype)
        return ops.KVFormat(
            *(ops.AffineFormat.for_width(self.head_dim, bits, dtype) for bits in self.bits)
        )

    @property
    def kv_bytes(self) -> int:
        """Of K and V of one token in one head."""
        rows = self.format.key, self.format.value
        return sum(row.row_nbytes(self.head_dim) for row in rows)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @cached_property
    def least(self) -> dict[str, int]:
        """The bytes that no algorithm gets around: everything once."""
        window = self.window or max(self.context_lens)
        seen = sum(
            min(context, window + run - 1)
            for context, run in zip(self.context_lens, self.query_lens, strict=True)
        )
        heads = self.group * self.num_kv_heads
        return {
            "kv_loaded": seen * self.num_kv_heads * self.kv_bytes,
            "rows_stored": self.num_tokens * self.num_kv_heads * self.kv_bytes
            if self.has_rows
            else 0,
            "queries_loaded": self.num_tokens * heads * self.row_bytes,
            "output_stored": self.num_tokens * heads * self.row_bytes,
        }

    @property
    def labels(self) -> list[str]:
        """Context, run and group as the tables show them."""
        kind = f"{self.dtype}, {self.head_dim}"
        kind += f", {self.num_kv_heads} KV heads" if self.num_kv_heads != 8 else ""
        kind += f", blocks of {self.block_size}" if self.block_size != 16 else ""
        kind += f", window {self.window}" if self.window else ""
        kind += ", update" if self.has_rows else ""
        kind += ", K{}V{}".format(*self.bits) if self.bits else ""
        contexts, runs = (
            f"{min(n):,}..{max(n):,} x{len(n)}" if len(n) > 1 else f"{max(n):,}"
            for n in (self.context_lens, self.query_lens)
        )
        return [contexts, runs, str(self.group), kind]


def all_cases(quick: bool) -> list[Case]:
    if quick:
        return [
            Case.of_one(257, 1, 2),
            Case.of_one(1024, 1, 2, has_rows=True),
            Case.of_one(300, 1, 16),
            Case.of_one(300, 4, 5, num_kv_heads=1),
            Case.of_one(300, 1, 4, bits=(8, 4), has_rows=True),
        ]
    # Query runs cost the emulator in proportion, so they get fewer contexts.
    cases = [Case.of_one(context, 1, group) for group in GROUPS for context in CONTEXTS]
    cases += [
        Case.of_one(context, run, group, num_kv_heads=2)
        for run in (4, 8)
        for group in GROUPS
        for context in (16, 257, 1024)
    ]
    cases += [Case.of_one(4096, run, group, num_kv_heads=1) for run in (4, 8) for group in (2, 16)]
    for shape in ({"head_dim": 64}, {"head_dim": 256}, {"dtype": "f32"}, {"dtype": "f16"}):
        cases += [Case.of_one(1024, 1, group, **shape) for group in (2, 8)]
    cases += [Case.of_one(1024, 1, 2, block_size=block_size) for block_size in (8, 64)]
    cases += [Case.of_one(1024, run, 2, has_rows=True) for run in (1, 4, 8)]
    cases += [Case.of_one(257, 4, 2, has_rows=True), Case.of_one(4096, 1, 8, has_rows=True)]
    cases += [Case.of_one(4096, 1, 2, window=1000)]
    ragged = Case(
        (1, 16, 31, 257, 700, 1024, 2048, 3000), (1, 1, 1, 1, 1, 1, 1, 1), 2, num_kv_heads=2
    )
    cases += [ragged, replace(ragged, has_rows=True)]
    cases += [replace(ragged, query_lens=(1, 8, 3, 1, 4, 1, 2, 6), has_rows=True)]
    cases += [
        Case.of_one(1024, 1, group, bits=bits)
        for group in (2, 8)
        for bits in ((8, 8), (8, 4), (4, 4))
    ]
    return cases


@contextmanager
def counting_metal() -> Iterator[list[Any]]:
    """Inside, ``backend="metal"`` runs on the emulator; yields the trace of counted calls.

    Raises:
        SystemExit: the emulator finds no compiler.
    """
    if not has_compiler():
        raise SystemExit("cost_model.py needs clang 18 or later, or: pip install ziglang")
    with emulated_metal(Checks.quick(count_accesses=True)) as trace:
        yield trace


def count_case(case: Case, trace: list[Any]) -> dict[str, Any]:
    """Run one attention call and say what each of its kernels moved."""
    kv, metadata = make_slabs(case)
    heads = case.group * case.num_kv_heads
    q = mx.random.normal((case.num_tokens, heads, case.head_dim)).astype(kv.dtype)
    k, v = (mx.random.normal((case.num_tokens, case.num_kv_heads, case.head_dim)) for _ in "kv")
    backend, params = MetalBackend(), ops.AttentionParams(case.head_dim**-0.5, case.window)
    trace.clear()
    if case.has_rows:
        out = backend.update_and_attend(q, k, v, kv, metadata, params)
    else:
        out = backend.attend(q, kv, metadata, params)
    mx.eval(out)
    dispatches = [count_dispatch(call) for call in trace]
    trace.clear()

    def total(what: str) -> int:
        return sum(dispatch[what] for dispatch in dispatches)

    # Threadgroups that load the same K/V for other query rows: one run capacity per case.
    row_parts = max(dispatch["row_parts"] for dispatch in dispatches)

    least = case.least
    kv_loaded = total("kv_distinct")
    # What is left when caches catch every repeat: partials once out and once in, queries and
    # outputs once.
    traffic = kv_loaded + total("rows_stored") + 2 * total("partials_stored")
    traffic += least["queries_loaded"] + least["output_stored"]
    # Read as they are stored, then written and read again as dense rows.
    dense = least["kv_loaded"] * 2 * case.row_bytes // case.kv_bytes
    gather_and_sdpa = least["kv_loaded"] + 2 * dense
    gather_and_sdpa += least["queries_loaded"] + least["output_stored"]
    # Rows have to come into the slabs there, too: by a dispatch of their own, which reads and
    # writes them.
    gather_and_sdpa += 2 * least["rows_stored"]
    return {
        "contexts": case.context_lens,
        "query_lens": case.query_lens,
        "group": case.group,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
        "block_size": case.block_size,
        "dtype": case.dtype,
        "window": case.window,
        "bits": case.bits,
        "operation": "update_and_attend" if case.has_rows else "paged_attention",
        "least": least,
        "kv_loaded": kv_loaded,
        "row_parts": row_parts,
        "kv_ratio": round(kv_loaded / row_parts / least["kv_loaded"], 6),
        "through_cache": total("kv_slab_loaded") + total("rows_loaded"),
        "rows_stored": total("rows_stored"),
        "output_stored": total("output_stored"),
        "partials_stored": total("partials_stored"),
        "partials_loaded": total("partials_loaded"),
        "traffic": traffic,
        "gather_and_sdpa": gather_and_sdpa,
        "over_gather_and_sdpa": round(traffic / gather_and_sdpa, 4),
        "dispatches": dispatches,
    }


def make_slabs(case: Case) -> tuple[ops.KVHandle, ops.AttentionMetadata]:
    """Slabs and block tables in which no two blocks of a sequence are adjacent in order."""
    counts = [-(-context // case.block_size) for context in case.context_lens]
    ids = iter(range(sum(counts), 0, -1))
    tables = [[next(ids) for _ in range(count)] for count in counts]
    kv = ops.KVHandle.allocate(
        sum(counts) + 1,
        case.num_kv_heads,
        case.block_size,
        case.head_dim,
        case.head_dim,
        case.format,
    )
    return kv, step_of(tables, case.context_lens, case.query_lens, case.block_size)


def count_dispatch(call: Any) -> dict[str, Any]:
    """Bytes of one kernel call, as its threads load and store them, and what its threadgroups
    share.

    Where no rows are given the slabs stand in for them, and no thread reads them there.
    """
    loaded, stored = call.loaded_bytes, call.stored_bytes

    def loads(*names: str) -> int:
        return sum(loaded.get(name, 0) for name in names)

    def stores(*names: str) -> int:
        return sum(stored.get(name, 0) for name in names)

    # Rows that are encoded are read again, as they are stored, by attention.
    encodes = "rotated" in call.outputs
    is_partial = bool(call.template.get("PARTIAL", False))
    num_threadgroups = math.prod(
        -(-size // width) for size, width in zip(call.grid, call.threadgroup, strict=True)
    )
    return {
        "kernel": call.kernel.removeprefix("mlx_paged_"),
        "threadgroups": num_threadgroups,
        "threads_per_threadgroup": math.prod(call.threadgroup),
        "threadgroup_bytes": call.counts["threadgroup_bytes"],
        "barriers_per_threadgroup": call.counts["barriers"] / num_threadgroups,
        "threadgroup_loaded": loads("threadgroup"),
        "threadgroup_stored": stores("threadgroup"),
        "row_parts": call.template.get("ROW_PARTS", 1),
        "kv_distinct": sum(
            call.distinct_bytes.get(name, 0) for name in SLABS + ROWS if not encodes
        ),
        "kv_slab_loaded": loads(*SLABS),
        "rows_loaded": loads(*ROWS),
        "rows_stored": stores(*SLABS),
        "queries_loaded": loads("queries"),
        "plan_loaded": loads("plan"),
        "scalars_loaded": loads("sinks", "softmax_scale", "num_tokens", "rotation_scale"),
        "partials_loaded": loads("partials"),
        "partials_stored": stores("out") if is_partial else 0,
        "output_stored": 0 if is_partial else stores("out", "keys", "values"),
        "fence": loads("fence_in") + stores("fence_out"),
    }


def count_gather(context: int, trace: list[Any]) -> dict[str, Any]:
    """The gather kernel of gather + SDPA: it reads K/V once and writes them once."""
    case = Case.of_one(context, 1, 1)
    kv, metadata = make_slabs(case)
    trace.clear()
    mx.eval(MetalBackend().gather_blocks(kv, metadata.block_tables[0], context))
    (dispatch,) = (count_dispatch(call) for call in trace)
    least = case.least["kv_loaded"]
    return {
        "context": context,
        "least": least,
        "kv_slab_loaded": dispatch["kv_slab_loaded"],
        "dense_stored": dispatch["output_stored"],
        "block_table_loaded": dispatch["plan_loaded"],
        "with_sdpa_at_best": dispatch["kv_slab_loaded"] + dispatch["output_stored"] + least,
    }


def over_bound(counts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases whose K/V loads are too many."""
    return [c for c in counts if max(c["contexts"]) > KV_BOUND_ABOVE and c["kv_ratio"] > KV_BOUND]


def estimate_roofline() -> list[dict[str, Any]]:
    """``seconds = bytes / bandwidth`` for the K/V of one decode step, per chip: an upper bound of
    speed.
    """
    shape = QWEN3_0_6B
    rows = []
    for chip, bandwidth in BANDWIDTHS.items():
        row: dict[str, Any] = {"chip": chip, "gb_per_s": bandwidth}
        for context in ROOFLINE_CONTEXTS:
            layer_bytes = (
                2 * context * shape["num_kv_heads"] * shape["head_dim"] * shape["itemsize"]
            )
            layer_seconds = layer_bytes / (bandwidth * 1e9)
            row[str(context)] = {
                "layer_bytes": layer_bytes,
                "layer_microseconds": round(layer_seconds * 1e6, 3),
                "tokens_per_second": round(1 / (shape["num_layers"] * layer_seconds), 3),
                "gather_and_sdpa_tokens_per_second": round(
                    1 / (3 * shape["num_layers"] * layer_seconds), 3
                ),
            }
        rows.append(row)
    return rows


def print_counts(cases: list[Case], counts: list[dict[str, Any]]) -> None:
    labels = ["context", "run", "group", "dtype, head_dim"]
    print(
        "paged_attention, 8 KV heads where nothing else is said: K/V from slabs and new rows, each "
        "word once per\nthreadgroup, against each row once. Parts: threadgroups that load the same "
        "K/V for other query rows.\nLoads: what simdgroups load, from memory or a cache, over K/V. "
        "Queries, plan: as loaded, every simdgroup for\nitself; lanes of a simdgroup that load the "
        "same number of the plan count once. Traffic / gather + SDPA:\nK/V as counted, partials "
        "out and in, queries and outputs once, over three times K/V and the same queries\nand "
        "outputs.\n"
    )
    rows, merge_rows = [], []
    for case, count in zip(cases, counts, strict=True):
        merges = [d for d in count["dispatches"] if d["kernel"] == "merge_partitions"]
        attention = [d for d in count["dispatches"] if d not in merges]
        queries_loaded = sum(dispatch["queries_loaded"] for dispatch in attention)
        plan_loaded = sum(dispatch["plan_loaded"] for dispatch in attention)
        rows.append(
            [
                *case.labels,
                f"{count['kv_loaded']:,}",
                f"{count['kv_ratio']:.4f}",
                str(count["row_parts"]),
                f"{count['rows_stored']:,}",
                f"{queries_loaded / count['least']['queries_loaded']:.0f}x",
                f"{plan_loaded / SIMDGROUP_LANES / count['kv_loaded']:.2%}",
                f"{count['output_stored'] / count['least']['output_stored']:.2f}x",
                f"{2 * count['partials_stored'] / count['kv_loaded']:.1%}",
                f"{count['through_cache'] / count['kv_loaded']:.1f}x",
                f"{max(d['threadgroup_bytes'] for d in attention):,}",
                "/".join(f"{d['barriers_per_threadgroup']:.0f}" for d in attention),
                f"{count['over_gather_and_sdpa']:.2f}",
            ]
        )
        if merges:
            merge_rows.append(
                [
                    *case.labels,
                    f"{count['partials_stored']:,}",
                    f"{count['partials_loaded'] / count['partials_stored']:.2f}x",
                    f"{sum(d['plan_loaded'] for d in merges) / SIMDGROUP_LANES:,.0f}",
                    f"{sum(d['output_stored'] for d in merges):,}",
                    f"{max(d['threadgroup_bytes'] for d in merges):,}",
                    "/".join(f"{d['barriers_per_threadgroup']:.0f}" for d in merges),
                ]
            )
    print_table(
        [
            *labels,
            "K/V loaded",
            "/ least",
            "parts",
            "rows stored",
            "queries",
            "plan / K/V",
            "output",
            "partials / K/V",
            "loads / K/V",
            "threadgroup bytes",
            "barriers",
            "/ gather + SDPA",
        ],
        rows,
    )
    print(
        "merge_partitions: partials are loaded once for their values, and by each lane for their "
        "two scores.\n"
    )
    print_table(
        [
            *labels,
            "partials stored",
            "loaded by lanes",
            "plan",
            "output stored",
            "threadgroup bytes",
            "barriers",
        ],
        merge_rows,
    )


def print_roofline(rows: list[dict[str, Any]]) -> None:
    print(
        "ESTIMATE, not measured on a Mac: K/V of one decode step of Qwen3-0.6B (28 layers, 8 KV "
        "heads, head_dim 128,"
    )
    print(
        "bf16). us per layer = 2 * context * 8 * 128 * 2 bytes / published bandwidth; tok/s = 1 / "
        "(28 * that), an upper"
    )
    print(
        "bound from K/V alone: weights, launches and everything else come on top. In brackets "
        "gather + SDPA, 3x.\n"
    )
    header = ["chip", "GB/s"]
    for context in ROOFLINE_CONTEXTS:
        header += [f"us per layer at {context:,}", f"tok/s at {context:,}"]
    table = []
    for row in rows:
        cells = [row["chip"], f"{row['gb_per_s']:g}"]
        for context in ROOFLINE_CONTEXTS:
            at = row[str(context)]
            cells += [
                f"{at['layer_microseconds']:.0f}",
                f"{at['tokens_per_second']:.0f} ({at['gather_and_sdpa_tokens_per_second']:.0f})",
            ]
        table.append(cells)
    print_table(header, table)


DECODE_KERNELS = ("paged_attention", "paged_attention_affine", "merge_partitions")


def source_hash(names: Sequence[str] = DECODE_KERNELS) -> str:
    """Of the code of kernels with the same headers, comments and white space left out."""
    digest = hashlib.sha256()
    parts = {f"{part}.metal": None for name in names for part in kernels.parts_of(name)}
    for name in (*kernels.headers_of(names[0]), *parts):
        digest.update("".join(re.sub(r"//.*", "", read_source(name)).split()).encode())
    return digest.hexdigest()[:12]


def print_registers(measured: dict[str, Any]) -> None:
    """What Mesa's compiler made of the kernels; ``measured`` is the JSON of ``REGISTERS``."""
    print(
        f"By {measured['setting']['compiler']}, which is not Apple's: half registers (of 256), "
        "threads that a core holds,\nspilled values, and issue slots per KiB of K/V in the main "
        "loop; in brackets with prologue and merge of 256\npositions. Not measured on a Mac.\n"
    )
    if measured["setting"]["kernels"] != source_hash():
        print("These are figures of OTHER KERNELS than the ones here.\n")
    rows = []
    for row in measured["results"]:
        before, after, mlx = row["before"], row["after"], row["mlx"]
        rows.append(
            [
                *(str(row[name]) for name in ("dtype", "head_dim", "group", "run")),
                str(after["registers"]),
                str(after["threads_per_core"]),
                str(after["spills"]),
                f"{after['slots_per_kib']:.0f} ({after['slots_per_kib_whole']:.0f})",
                f"{before['slots_per_kib']:.0f}" if before else "-",
                f"{before['spills']}" if before else "-",
                f"{mlx:.0f}" if mlx else "-",
            ]
        )
    print_table(
        [
            *("dtype", "head_dim", "group", "run", "registers", "threads", "spills", "slots/KiB"),
            *("first kernel: slots/KiB", "spills", "MLX's SDPA: slots/KiB"),
        ],
        rows,
    )


def estimate_formats(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What bounds a decode on K/V of each format, by chip: the bytes of a key in memory or its
    issue slots, prologue and merge of a partition of 256 included. A chip issues ``4 * cores *
    GHz`` slots in a nanosecond.

    Args:
        measured: ``formats`` of the JSON of ``REGISTERS``.
    """
    rows = []
    for row in measured:
        dense_bytes = 2 * row["head_dim"] * (4 if row["dtype"] == "float" else 2)
        slots = row["slots_per_kib_whole"] * dense_bytes / 1024
        chips = {
            chip: max(row["bytes_per_key"] / BANDWIDTHS[chip], slots / (4 * cores * gigahertz))
            for chip, (cores, gigahertz) in CORES.items()
        }
        rows.append(row | {"nanoseconds": chips})
    shape = ("dtype", "head_dim", "group", "run")
    dense = {tuple(r[s] for s in shape): r["nanoseconds"] for r in rows if r["format"] == "dense"}
    return [
        {name: row[name] for name in (*shape, "format")}
        | {
            "chips": {
                chip: {
                    "nanoseconds_per_key": nanoseconds,
                    "faster_than_dense": dense[tuple(row[s] for s in shape)][chip] / nanoseconds,
                }
                for chip, nanoseconds in row["nanoseconds"].items()
            }
        }
        for row in rows
    ]


def print_formats(measured: list[dict[str, Any]], estimates: list[dict[str, Any]]) -> None:
    print(
        "Decodes on quantised K/V: registers and issue slots by the same compiler; per key of one "
        "KV head with all of its\nquery heads. ESTIMATE, not measured on a Mac: a key takes the "
        "longer of bytes / published bandwidth and slots /\n(4 * cores * GHz), with all of a "
        "partition of 256; beside it how many times as fast as dense K/V that is.\n"
    )
    table = []
    for row, estimate in zip(measured, estimates, strict=True):
        table.append(
            [
                *(str(row[name]) for name in ("dtype", "head_dim", "group", "run", "format")),
                *(str(row[name]) for name in ("registers", "spills", "bytes_per_key")),
                f"{row['slots_per_key']:.0f}",
                f"{row['slots_per_kib']:.0f} ({row['slots_per_kib_whole']:.0f})",
                *(
                    f"{at['nanoseconds_per_key']:.2f} ({at['faster_than_dense']:.2f}x)"
                    for at in estimate["chips"].values()
                ),
            ]
        )
    print_table(
        [
            *("dtype", "head_dim", "group", "run", "format", "registers", "spills"),
            *("bytes per key", "slots per key", "slots/KiB of dense"),
            *(f"{chip}: ns per key" for chip in CORES),
        ],
        table,
    )


# Bytes of a token of latents that is gathered, beside those that are stored: it is written as 512
# and 64 numbers, both are read and written as one row, and keys and values are read from there.
GATHERED_LATENT_BYTES = 2 * (576 + 576 + 576 + 576 + 512)


def estimate_latents(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How long a token of latents takes where it lies, by the slower of bytes and slots, over how
    long the bytes take that gathering it moves.

    Args:
        measured: ``latents`` of the JSON of ``REGISTERS``.
    """
    rows = []
    for row in measured:
        over_gathering = {}
        for chip, (cores, gigahertz) in CORES.items():
            slots = row["slots_per_key_whole"] / (4 * cores * gigahertz)
            lying = max(row["bytes_per_key"] / BANDWIDTHS[chip], slots)
            gathered = (row["bytes_per_key"] + GATHERED_LATENT_BYTES) / BANDWIDTHS[chip]
            over_gathering[chip] = lying / gathered
        rows.append({name: row[name] for name in ("dtype", "format", "heads")} | over_gathering)
    return rows


def print_latents(measured: list[dict[str, Any]]) -> None:
    print(
        "Decodes on latents of 512 and rotated keys of 64: slots per key over all heads, with "
        "all of a partition of 256\nin brackets. ESTIMATE, not measured on a Mac: the time of a "
        "token over that of gathering it.\n"
    )
    table = []
    for row, estimate in zip(measured, estimate_latents(measured), strict=True):
        table.append(
            [
                *(str(row[name]) for name in ("dtype", "format", "heads", "registers", "spills")),
                f"{row['slots_per_key']:.0f} ({row['slots_per_key_whole']:.0f})",
                *(f"{estimate[chip]:.2f}" for chip in CORES),
            ]
        )
    header = ["dtype", "format", "heads", "registers", "spills", "slots per key", *CORES]
    print_table(header, table)


def print_matmuls(measured: list[dict[str, Any]]) -> None:
    """``measured`` is ``rows_matmul`` of the JSON of ``REGISTERS``."""
    print(
        "Matmuls of a few rows, by the same compiler: issue slots per KiB of packed weights in "
        "the main loop, for 1 to 5\nrows at once, and in brackets registers. Not measured on a Mac."
        "\n"
    )
    table: dict[tuple[str, str, str], list[str]] = {}
    for row in measured:
        shown = f"{row['slots_per_kib']:.0f} ({row['registers']})"
        table.setdefault((row["mode"], str(row["bits"]), row["dtype"]), []).append(shown)
    rows = [[*kind, *(*shown, "-")[:5]] for kind, shown in table.items()]
    print_table(["mode", "bits", "dtype", "1", "2", "3", "4", "5"], rows)


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few cases only")
    return parser


def fingerprint() -> str:
    """Of the kernels and of how they are launched, so that figures of other ones are recognised."""
    digest = hashlib.sha256()
    digest.update(kernels.header("paged_attention").encode())
    for name in kernels.KERNELS:
        digest.update(kernels.body(name).encode())
    for module in (kernels, attention_plan):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:12]


def compiler_name() -> str:
    """What counted loads depend on: those that its optimiser left."""
    return find_compiler().name


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 when a case loads too much K/V."""
    args = setup_arg_parser().parse_args(argv)
    cases = all_cases(args.quick)
    gather_contexts = (300,) if args.quick else (256, 1024, 4096)
    with counting_metal() as trace:
        setting = machine_card() | {
            "kernels run on": f"the Metal emulator, compiled by {compiler_name()}; no Mac, "
            "no time measured",
            "kernels": f"sha256 {fingerprint()} of their sources and of the code around them",
            "kv_bound": f"{KV_BOUND} x the least for contexts above {KV_BOUND_ABOVE}",
        }
        print_card("Cost model of paged attention: bytes, counted", setting)
        counts = [count_case(case, trace) for case in cases]
        gathers = [count_gather(context, trace) for context in gather_contexts]
    print_counts(cases, counts)
    print(
        "gather_blocks (2 KV heads, head_dim 128, bf16); SDPA then reads what it wrote, once at "
        "best.\n"
    )
    print_table(
        [
            "context",
            "least K/V",
            "slabs loaded",
            "dense stored",
            "block table loaded",
            "with SDPA / least",
        ],
        [
            [
                f"{g['context']:,}",
                *(
                    f"{g[name]:,}"
                    for name in ("least", "kv_slab_loaded", "dense_stored", "block_table_loaded")
                ),
                f"{g['with_sdpa_at_best'] / g['least']:.2f}",
            ]
            for g in gathers
        ],
    )
    measured = json.loads(REGISTERS.read_text())
    print_registers(measured)
    formats = estimate_formats(measured["formats"])
    print_formats(measured["formats"], formats)
    print_latents(measured["latents"])
    print_matmuls(measured["rows_matmul"])
    roofline = estimate_roofline()
    print_roofline(roofline)
    worst = max(c["kv_ratio"] for c in counts)
    failed = over_bound(counts)
    print(
        f"K/V loads: at most {worst:.4f} x the least; {len(failed)} of {len(counts)} cases above "
        f"{KV_BOUND}.\n"
    )
    print_json(
        "cost_model",
        setting,
        {
            "attention": counts,
            "gather": gathers,
            "roofline_estimate": roofline,
            "formats_estimate": formats,
            "over_bound": len(failed),
        },
        args.out,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
