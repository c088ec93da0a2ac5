"""Time of paged attention beside SDPA on contiguous K/V and beside gather + SDPA, and in % of the
copy bandwidth.

    python -m benchmarks attention                       # Metal on a Mac, plain MLX elsewhere
    python -m benchmarks attention --backend reference
    python -m benchmarks attention --quick

First the bandwidth of the device: MLX copies a large array, bytes read and written. Then for each
shape one step (a decode, or a short run of queries) of several layers, every layer with slabs of
its own, evaluated together, three ways: paged attention over block tables; MLX's SDPA on a
contiguous cache of the same contents; gather_blocks of each sequence, then SDPA. Their results must
agree before anything is timed. The three take turns, so that a machine that speeds up or slows down
does so for all; ratios are medians over these turns. What a way moves is counted as K/V once, so "%
of copy" is of the best possible, and caches of the device can bring short contexts above 100. The
plan of a step is made before the clock starts; what it costs is part of a step in decode.py.

Last, what an append costs: one row of K and V per layer into small and into large slabs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from paged_testing.by_hand import dense_handle, slots_of, step_of

from benchmarks.kernels.decode import take_turns
from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged import ops
from mlx_paged.ops.reference import ReferenceBackend

DTYPES = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}
# How far results may lie apart, as a part of the largest number in them: some roundings of each
# dtype.
TOLERANCES = {"bf16": 3e-2, "f16": 4e-3, "f32": 2e-5}
WAYS = ("paged", "contiguous", "gather")
# Ratios below are within what two runs differ by.
SLOWER = 1.05
# Tokens of K/V up to which a step is short enough to be timed four times as often.
SHORT_STEP = 2048
NUM_APPEND_ROUNDS = 8


@dataclass(frozen=True)
class Shape:
    """A step: ``batch`` sequences of ``context`` tokens each, the last ``run`` of them new."""

    order: str  # of a sequence's blocks: adjacent or shuffled
    dtype: str
    head_dim: int
    group: int
    run: int
    batch: int
    context: int

    def kv_bytes(self, num_kv_heads: int) -> int:
        """Of one layer."""
        return (
            2 * self.batch * self.context * num_kv_heads * self.head_dim * DTYPES[self.dtype].size
        )


def measure_copy(num_bytes: int, num_turns: int) -> float:
    """Bytes read and written per second by a copy of ``num_bytes`` into memory that is there
    already.
    """
    num_rows, width = num_bytes // 4096, 1024
    source, held = mx.random.uniform(shape=(num_rows, width)), [mx.zeros((num_rows + 1, width))]
    mx.eval(source, held)

    def copy() -> None:
        # In place, as nobody else holds the array: a new one would be fresh pages each time on a
        # CPU, at a third of the speed. One row is left out, for it to be a slice.
        held[0][1:] = source
        mx.eval(held)

    take_turns({"copy": copy}, 2)
    # The best turn, as is the custom: others can only have been disturbed.
    return 2 * source.nbytes / float(take_turns({"copy": copy}, num_turns)["copy"].min())


def make_ways(
    shape: Shape, backend: ops.Backend, args: argparse.Namespace
) -> dict[str, Callable[[], list[mx.array]]]:
    """One step of all layers, three ways; each returns one result per layer, ``[batch * run,
    num_heads, head_dim]``.
    """
    dtype, scale = DTYPES[shape.dtype], shape.head_dim**-0.5
    num_heads = shape.group * args.kv_heads
    num_blocks = -(-shape.context // args.block_size)
    # Block 0 is the null block.
    ids = np.arange(1, shape.batch * num_blocks + 1)
    if shape.order == "shuffled":
        ids = np.random.default_rng(0).permutation(ids)
    tables = ids.reshape(shape.batch, num_blocks).tolist()
    # One list for all layers, as in a model: what a backend derives from it is made once.
    metadata = step_of(
        tables, [shape.context] * shape.batch, [shape.run] * shape.batch, args.block_size
    )
    ids_in_order = mx.array(np.concatenate(tables))

    queries, handles, contiguous = [], [], []
    for _ in range(args.layers):
        queries.append(
            mx.random.normal((shape.batch * shape.run, num_heads, shape.head_dim)).astype(dtype)
        )
        slabs, dense = [], []
        for _ in "kv":
            rows = mx.random.normal(
                (shape.batch * num_blocks, args.kv_heads, args.block_size, shape.head_dim)
            )
            slab = mx.zeros((shape.batch * num_blocks + 1, *rows.shape[1:]), dtype)
            slab[ids_in_order] = rows.astype(dtype)
            # [batch, num_kv_heads, context, head_dim]
            blocks = (
                rows.astype(dtype).reshape(shape.batch, num_blocks, *rows.shape[1:]).swapaxes(1, 2)
            )
            heads_first = blocks.reshape(shape.batch, args.kv_heads, -1, shape.head_dim)
            dense.append(mx.contiguous(heads_first[:, :, : shape.context]))
            slabs.append(slab)
            mx.eval(slab, dense[-1])
        handles.append(dense_handle(*slabs))
        contiguous.append(dense)
    mx.eval(queries)

    def sdpa(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        heads_first = q.reshape(-1, shape.run, *q.shape[1:]).swapaxes(1, 2)
        mask = "causal" if shape.run > 1 else None
        out = mx.fast.scaled_dot_product_attention(heads_first, k, v, scale=scale, mask=mask)
        return out.swapaxes(1, 2).reshape(q.shape)

    def gather_layer(q: mx.array, kv: ops.KVHandle) -> mx.array:
        dense = [backend.gather_blocks(kv, table, shape.context) for table in tables]
        rows = q.reshape(shape.batch, shape.run, *q.shape[1:])
        return mx.concatenate([sdpa(rows[i], k[None], v[None]) for i, (k, v) in enumerate(dense)])

    # Plain MLX decodes runs of all lengths here.
    paged = ReferenceBackend((shape.run,)) if backend.name == "reference" else backend
    return {
        "paged": lambda: [
            paged.attend(q, kv, metadata, ops.AttentionParams(scale))
            for q, kv in zip(queries, handles, strict=True)
        ],
        "contiguous": lambda: [
            sdpa(q, *dense) for q, dense in zip(queries, contiguous, strict=True)
        ],
        "gather": lambda: [gather_layer(q, kv) for q, kv in zip(queries, handles, strict=True)],
    }


def check_agreement(shape: Shape, ways: dict[str, Callable[[], list[mx.array]]]) -> float:
    """The largest distance between two ways, as a part of the largest number; exits when that is
    too much.
    """
    results = {name: mx.stack(way()).astype(mx.float32) for name, way in ways.items()}
    largest = mx.abs(results["contiguous"]).max()
    error = max(
        float(mx.abs(result - results["contiguous"]).max() / largest)
        for name, result in results.items()
        if name != "contiguous"
    )
    if not error <= TOLERANCES[shape.dtype]:
        raise SystemExit(
            f"{shape}: results differ by {error:.3g}, more than {TOLERANCES[shape.dtype]:.3g} of "
            "the largest"
        )
    return error


def evaluate(way: Callable[[], list[mx.array]]) -> None:
    mx.eval(way())


def measure_shape(shape: Shape, copy_bandwidth: float, args: argparse.Namespace) -> dict[str, Any]:
    ways = make_ways(shape, backend_for(shape.head_dim, args), args)
    error = check_agreement(shape, ways)
    steps: dict[str, Callable[[], Any]] = {
        name: partial(evaluate, way) for name, way in ways.items()
    }
    take_turns(steps, 2)
    num_turns = args.turns * (4 if shape.batch * shape.context <= SHORT_STEP else 1)
    times = {name: seconds / args.layers for name, seconds in take_turns(steps, num_turns).items()}
    kv_bytes = shape.kv_bytes(args.kv_heads)
    medians = {name: float(np.median(times[name])) for name in WAYS}
    return asdict(shape) | {
        "kv_bytes": kv_bytes,
        "microseconds_per_layer": {
            name: round(seconds * 1e6, 1) for name, seconds in medians.items()
        },
        "gb_per_s": {name: round(kv_bytes / seconds / 1e9, 2) for name, seconds in medians.items()},
        "of_copy_bandwidth": {
            name: round(kv_bytes / seconds / copy_bandwidth, 4) for name, seconds in medians.items()
        },
        "paged_over_contiguous": round(float(np.median(times["paged"] / times["contiguous"])), 3),
        "paged_over_gather": round(float(np.median(times["paged"] / times["gather"])), 3),
        "largest_difference": error,
    }


def shapes_of(args: argparse.Namespace) -> Iterator[Shape]:
    dimensions = (
        args.orders,
        args.dtypes,
        args.head_dims,
        args.groups,
        args.runs,
        args.batches,
        args.contexts,
    )
    shapes = itertools.starmap(Shape, itertools.product(*dimensions))
    return (shape for shape in shapes if shape.run <= shape.context)


def is_too_large(shape: Shape, args: argparse.Namespace) -> bool:
    """Whether slabs and contiguous K/V, of all layers, take more than ``--max-bytes``."""
    return bool(2 * args.layers * shape.kv_bytes(args.kv_heads) > args.max_bytes)


def backend_for(head_dim: int, args: argparse.Namespace) -> ops.Backend:
    shapes = [
        ops.AttentionShape(args.kv_heads, group, head_dim, head_dim, args.block_size, form)
        for group in args.groups
        for form in (ops.KVFormat.dense(DTYPES[dtype]) for dtype in args.dtypes)
    ]
    return ops.choose_backend(args.backend, shapes)


def measure_appends(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Microseconds per layer to write one row into slabs of different sizes, which take turns."""
    dtype = DTYPES[args.dtypes[0]]
    head_dim = args.head_dims[0]
    backend = backend_for(head_dim, args)
    k, v = (mx.random.normal((1, args.kv_heads, head_dim)).astype(dtype) for _ in "kv")
    mx.eval(k, v)
    steps: dict[str, Callable[[], Any]] = {}
    for num_slots in args.pools:
        num_blocks = num_slots // args.block_size
        shape = num_blocks, args.kv_heads, args.block_size, head_dim, head_dim
        handles = [
            ops.KVHandle.allocate(*shape, ops.KVFormat.dense(dtype))
            for _ in range(args.append_layers)
        ]
        # The same slots in each, or the caches of the device would favour the small ones.
        slots = itertools.cycle(
            range(args.block_size, min(args.pools) // args.block_size * args.block_size)
        )

        def append(
            handles: list[ops.KVHandle] = handles, slots: itertools.cycle[int] = slots
        ) -> None:
            mapping = slots_of([next(slots)], args.block_size)
            for kv in handles:
                backend.reshape_and_cache((k,), (v,), kv, mapping)
            mx.eval([kv.arrays for kv in handles])

        steps[str(num_slots)] = append
    take_turns(steps, 8)
    # On a CPU an append takes one of two times, 17 or 35 us, whatever its slab and for many turns
    # in a row. So there are several rounds, each slab has each place in a turn equally often, and
    # the best round stands for it.
    medians: dict[str, list[float]] = {name: [] for name in steps}
    for order in (steps, dict(reversed(steps.items()))) * NUM_APPEND_ROUNDS:
        for name, seconds in take_turns(order, 8 * args.turns).items():
            medians[name].append(float(np.median(seconds)) / args.append_layers)
    best = {name: min(seconds) for name, seconds in medians.items()}
    first = best[str(args.pools[0])]
    return [
        {
            "slots": int(name),
            "microseconds_per_layer": round(seconds * 1e6, 1),
            "over_first": round(seconds / first, 3),
        }
        for name, seconds in best.items()
    ]


def where_slower(rows: list[dict[str, Any]]) -> list[str]:
    """Ranges of contexts in which paged attention is slower than gather + SDPA, one line for each
    kind of shape.
    """
    lines = []
    keys = ("order", "dtype", "head_dim", "group", "run", "batch")
    for kind, same_kind in itertools.groupby(rows, key=lambda row: tuple(row[key] for key in keys)):
        slower = [row for row in same_kind if row["paged_over_gather"] > SLOWER]
        if slower:
            contexts = [row["context"] for row in slower]
            order, dtype, head_dim, group, run, batch = kind
            where = (
                f"{min(contexts):,}..{max(contexts):,}" if len(contexts) > 1 else f"{contexts[0]:,}"
            )
            worst = max(row["paged_over_gather"] for row in slower)
            lines.append(
                f"{order} blocks, {dtype}, head_dim {head_dim}, group {group}, run {run}, batch "
                f"{batch}: "
                f"contexts {where}, at most {worst:.2f} x"
            )
    return lines


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--backend", choices=ops.BACKENDS, default="auto")
    parser.add_argument("--quick", action="store_true", help="a few small shapes only")
    parser.add_argument(
        "--layers", type=int, help="layers evaluated together, each with its own slabs"
    )
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--contexts", type=int, nargs="+")
    parser.add_argument("--groups", type=int, nargs="+", help="query heads per KV head")
    parser.add_argument("--runs", type=int, nargs="+", help="new tokens per sequence")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128])
    parser.add_argument(
        "--orders", nargs="+", choices=("adjacent", "shuffled"), help="of a sequence's blocks"
    )
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--turns", type=int, help="timed steps of each way")
    parser.add_argument(
        "--pools",
        type=int,
        nargs="+",
        default=[1_000, 100_000],
        help="slab sizes for appends, in slots",
    )
    parser.add_argument("--append-layers", type=int)
    parser.add_argument(
        "--copy-bytes", type=int, help="size of the array that is copied for the bandwidth"
    )
    parser.add_argument(
        "--max-bytes", type=float, help="shapes that take more are left out, and named"
    )
    return parser


# Whatever is not given: for a GPU, for a CPU, and for --quick on either.
DEFAULTS = {
    "gpu": {
        "layers": 8,
        "batches": [1, 8],
        "contexts": [16, 256, 257, 1024, 4096, 16384, 32768],
        "groups": [1, 2, 4, 5, 8, 16],
        "runs": [1, 8],
        "dtypes": ["bf16"],
        "orders": ["shuffled"],
        "turns": 20,
        "append_layers": 4,
        "copy_bytes": 1 << 30,
    },
    "cpu": {
        "layers": 2,
        "batches": [1, 4],
        "contexts": [16, 256, 1024, 4096],
        "groups": [1, 2, 8],
        "runs": [1],
        "dtypes": ["f32"],
        "orders": ["adjacent", "shuffled"],
        "turns": 12,
        "append_layers": 2,
        "copy_bytes": 1 << 28,
    },
    "quick": {
        "layers": 2,
        "batches": [1, 2],
        "contexts": [64, 300],
        "groups": [2],
        "runs": [1, 4],
        "dtypes": ["f32"],
        "orders": ["adjacent", "shuffled"],
        "turns": 3,
        "append_layers": 1,
        "copy_bytes": 1 << 24,
    },
}


def fill_in_defaults(args: argparse.Namespace) -> str:
    """Returns what is chosen for: gpu, cpu or quick."""
    kind = "quick" if args.quick else "gpu" if mx.default_device() == mx.gpu else "cpu"
    for name, value in DEFAULTS[kind].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.max_bytes is None:
        args.max_bytes = min(8e9, float(mx.device_info().get("memory_size", 16e9)) / 4)
    return kind


def main(argv: list[str] | None = None) -> None:
    parser = setup_arg_parser()
    args = parser.parse_args(argv)
    kind = fill_in_defaults(args)
    try:
        backend = ops.choose_backend(args.backend, [])
    except ops.BackendError as error:
        parser.error(str(error))
    mx.random.seed(0)
    copy_bandwidth = measure_copy(args.copy_bytes, args.turns)
    setting = machine_card() | {
        "backend": backend.name
        + ("" if mx.metal.is_available() else ", plain MLX on a CPU; Metal: not measured on a Mac"),
        "shapes": f"{kind} defaults, {args.kv_heads} KV heads, block_size {args.block_size}",
        "layers": args.layers,
        "turns": args.turns,
        "copy": f"{copy_bandwidth / 1e9:.1f} GB/s read and written, "
        f"an array of {args.copy_bytes / 1e6:.0f} MB",
        "tolerance": ", ".join(f"{name} {value:g}" for name, value in TOLERANCES.items())
        + " of the largest result",
    }
    print_card("Paged attention, one step per layer", setting)

    results, left_out = [], []
    for shape in shapes_of(args):
        if is_too_large(shape, args):
            left_out.append(asdict(shape))
            continue
        results.append(measure_shape(shape, copy_bandwidth, args))
        mx.clear_cache()
    print_table(
        [
            *("blocks", "dtype", "head_dim", "group", "run", "batch", "context"),
            *(f"{way} us" for way in WAYS),
            "paged / contiguous",
            "paged / gather",
            *(f"{way} GB/s" for way in WAYS),
            "paged % of copy",
        ],
        [
            [
                *(
                    row[name]
                    for name in ("order", "dtype", "head_dim", "group", "run", "batch", "context")
                ),
                *(f"{row['microseconds_per_layer'][way]:.0f}" for way in WAYS),
                f"{row['paged_over_contiguous']:.2f}",
                f"{row['paged_over_gather']:.2f}",
                *(f"{row['gb_per_s'][way]:.1f}" for way in WAYS),
                f"{row['of_copy_bandwidth']['paged']:.0%}",
            ]
            for row in results
        ],
    )
    for dimensions_left_out in left_out:
        print(
            f"Left out, slabs and contiguous K/V take more than --max-bytes: {dimensions_left_out}"
        )
    slower = where_slower(results)
    print(
        "Paged attention is slower than gather + SDPA at:"
        if slower
        else "Paged attention is nowhere slower than gather + SDPA."
    )
    for line in slower:
        print(f"- {line}")
    print()
    appends = measure_appends(args)
    print_table(
        ["slab slots", "reshape_and_cache of one row, us per layer", "/ first"],
        [
            [
                f"{row['slots']:,}",
                f"{row['microseconds_per_layer']:.0f}",
                f"{row['over_first']:.2f}",
            ]
            for row in appends
        ],
    )
    print_json(
        "attention",
        setting,
        {
            "copy_gb_per_s": round(copy_bandwidth / 1e9, 2),
            "attention": results,
            "left_out": left_out,
            "paged_slower_than_gather": slower,
            "append": appends,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
