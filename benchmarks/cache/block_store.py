"""What a folder of K/V blocks costs: writing and reading a block, looking blocks up, and the start
on a folder that holds many.

    python -m benchmarks block_store                 # in a folder for temporary files
    python -m benchmarks block_store --folder DIR    # on the disk that you mean
    python -m benchmarks block_store --quick         # does it run at all

Blocks of two sizes: 1.75 MiB is 16 tokens of Qwen3-0.6B in bfloat16, 64 KiB about as many of the
demo model. Sides take turns, block by block: the store's `put` into a folder with room and into one
that is full (each evicts one), its `get`, and plain writes and reads of as many bytes. What was
written a moment ago is read from the system's page cache. "Two threads" is a `get` by two threads
at once, in time per block.

The start is that of a writer on a folder with many small blocks. It rests half of the time, and the
thread that steps goes on meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged.block_store import BlockStore, BlockWorker, Fingerprint
from mlx_paged.core.tier import BlockHeader

SIZES = {"1.75 MiB": 1_835_008, "64 KiB": 65_536}
NO_LIMIT = 1 << 50
BLOCK_SIZE, BLOCKS_OF_A_PROMPT = 16, 250
_UNIT = 4096


def open_store(folder: Path, max_nbytes: int = NO_LIMIT) -> BlockStore:
    fingerprint = Fingerprint("benchmark", "benchmark", ("layer",), "auto", BLOCK_SIZE, "1")
    store = BlockStore(folder, max_nbytes, fingerprint)
    store.maintain()
    return store


def header_of(number: int) -> BlockHeader:
    """Of block ``number`` of a row of prompts."""
    place = number % BLOCKS_OF_A_PROMPT
    parent = hash_of(number - 1) if place else None
    first_token = place * BLOCK_SIZE
    tokens = tuple(range(first_token, first_token + BLOCK_SIZE))
    return BlockHeader(hash_of(number), parent, tokens, first_token)


def hash_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def measure_blocks(folder: Path, nbytes: int, num_blocks: int) -> dict[str, dict[str, float]]:
    """Milliseconds per block of each side: median and fastest."""
    payloads = [os.urandom(nbytes) for _ in range(4)]
    roomy = open_store(folder / f"roomy {nbytes}")
    num_units = -(-(nbytes + 512) // _UNIT)
    full = open_store(folder / f"full {nbytes}", max(2, num_blocks // 4) * num_units * _UNIT)
    plain = folder / f"plain {nbytes}"
    plain.mkdir()
    times: dict[str, list[float]] = {}

    def clock(side: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        times.setdefault(side, []).append((time.perf_counter() - start) * 1e3)

    for number in range(num_blocks):
        header, payload = header_of(number), payloads[number % len(payloads)]
        file = plain / str(number)
        clock("put", lambda: roomy.store(header, payload))  # noqa: B023
        clock("plain write", lambda: file.write_bytes(payload))  # noqa: B023
        clock("put, full folder", lambda: full.store(header, payload))  # noqa: B023
        clock("get", lambda: roomy.load(header.block_hash))  # noqa: B023
        clock("plain read", file.read_bytes)
    hashes = [hash_of(number) for number in range(num_blocks)]
    for _ in range(5):
        times.setdefault("get, two threads", []).append(read_with_two_threads(roomy, hashes))
    assert roomy.stats().num_written == full.stats().num_written == num_blocks
    roomy.close()
    full.close()
    return {
        side: {"median": statistics.median(each), "fastest": min(each)}
        for side, each in times.items()
    }


def read_with_two_threads(store: BlockStore, hashes: list[bytes]) -> float:
    """Milliseconds per block."""

    def work(part: list[bytes]) -> None:
        for block_hash in part:
            store.load(block_hash)

    threads = [threading.Thread(target=work, args=(hashes[start::2],)) for start in range(2)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - start) / len(hashes) * 1e3


def measure_many(folder: Path, num_blocks: int) -> dict[str, float]:
    """Microseconds per look-up and per block of a start, in a folder of small blocks."""
    store = open_store(folder / "many")
    for number in range(num_blocks):
        store.store(header_of(number), b"small")
    hashes = [hash_of(number) for number in range(min(num_blocks, 4000))]
    results = {
        "look-up": per_block(lambda: [store.has(each) for each in hashes], len(hashes)),
        "look-up of what isn't there": per_block(
            lambda: [store.has(each[::-1]) for each in hashes], len(hashes)
        ),
    }
    store.note_used(hashes)
    results["note of a use"] = per_block(store.maintain, len(hashes))
    store.close()
    results["start"] = per_block(lambda: start_writer(folder), num_blocks)
    return results


def start_writer(folder: Path) -> None:
    store = BlockStore(folder / "many", NO_LIMIT, open_store(folder / "none").fingerprint)
    writer = BlockWorker(store, 1 << 20, 1 << 20)
    assert writer.flush(600) and writer.close(10)
    store.close()


def per_block(work: Callable[[], object], num_blocks: int) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / num_blocks * 1e6


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where to make a folder of blocks")
    parser.add_argument("--nbytes", type=int, default=256 << 20, help="to write of each size")
    parser.add_argument("--many", type=int, default=100_000, help="blocks that a start finds")
    parser.add_argument("--quick", action="store_true", help="a few blocks of each")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    nbytes, num_many = (4 << 20, 200) if args.quick else (args.nbytes, args.many)
    setting = machine_card() | {"nbytes": nbytes, "many": num_many}
    print_card("A folder of K/V blocks", setting)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        blocks: dict[str, Any] = {
            name: measure_blocks(Path(folder), size, min(2000, nbytes // size))
            for name, size in SIZES.items()
        }
        many = measure_many(Path(folder), num_many)
    sides = list(next(iter(blocks.values())))
    print_table(
        ["ms per block", *(f"{name}{kind}" for name in SIZES for kind in ("", ", fastest"))],
        [
            [side, *(f"{of[side][kind]:.3f}" for of in blocks.values() for kind in of[side])]
            for side in sides
        ],
    )
    rows = [[what, f"{microseconds:.1f}"] for what, microseconds in many.items()]
    print_table([f"µs per block, {num_many} blocks", ""], rows)
    print_json("block_store", setting, {"blocks_ms": blocks, "many_us": many}, args.out)


if __name__ == "__main__":
    main()
