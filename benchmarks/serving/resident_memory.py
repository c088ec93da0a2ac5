"""What 100,000 small requests of every kind leave in memory, through an `AsyncEngine`.

    python -m benchmarks resident_memory                          # 10,000 requests
    python -m benchmarks resident_memory --requests 100000
    python -m benchmarks resident_memory --kinds grammar "stop texts"

After every tenth of them, memory is looked at: what is resident, what the C library has in use and
what it keeps, MLX's arrays, Python's objects. At first prefixes fill the pool, and grammars and
words their caches. What goes on growing with each request afterwards is a leak: the last column has
what the C library has in use, but for MLX's arrays, in bytes per request since the row before.
Resident memory also moves with what the C library keeps; `MALLOC_ARENA_MAX=1` in the environment
takes the arenas of threads out of that.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import asdict
from typing import Any

from paged_testing.async_soak import KINDS, memory_in_use, run_requests

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged import demo_model_path, load
from mlx_paged.engine.async_engine import AsyncEngine

NUM_LOOKS = 10


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each tenth of the requests."""
    rows: list[dict[str, Any]] = []
    count, before = args.requests // NUM_LOOKS, 0
    async with AsyncEngine(*load(args.model), kv_cache_bytes="400blocks") as engine:
        for look in range(NUM_LOOKS):
            begin = time.process_time()
            await run_requests(engine, look * count, count, tuple(args.kinds))
            seconds = time.process_time() - begin
            found = asdict(memory_in_use())
            native = found["malloc"] - found["mlx"]
            grown = (native - before) / count if look else 0.0
            before = native
            rows.append(
                {"requests": (look + 1) * count, "cpu_seconds": seconds}
                | found
                | {"grown_per_request": grown}
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--model", default=demo_model_path(), help="a folder or a hub id")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    args = parser.parse_args()
    setting = machine_card() | {
        "requests": args.requests,
        "kinds": args.kinds,
        "engine": "the demo model, 400 blocks, 32 requests in flight, prompts of 2 to 30 words",
    }
    print_card("Resident memory", setting)
    rows = asyncio.run(measure(args))
    parts = ("resident", "malloc", "malloc_free", "mlx")
    print_table(
        ["requests", *(f"{part}, MB" for part in parts), "objects", "bytes per request"],
        [
            [
                row["requests"],
                *(f"{row[part] / 1e6:.2f}" for part in parts),
                row["num_objects"],
                f"{row['grown_per_request']:.1f}",
            ]
            for row in rows
        ],
    )
    print_json("resident_memory", setting, {"over_time": rows}, args.out)


if __name__ == "__main__":
    main()
