"""What it costs to know the blocks in a folder: by its directory entries, by the SQLite index of
the store, and by other journals of SQLite.

    python -m benchmarks catalogue                   # 500,000 files in a folder for temporary files
    python -m benchmarks catalogue --folder DIR      # on the disk that you mean
    python -m benchmarks catalogue --drop-caches     # as root on Linux: also a cold start

The files are small blocks in the store's own layout, 250 to a prompt. "Entries" is what a store
could do without a database: list the folders, take the hash from the name of each file, and its
size and last use from its status; either all of them are kept, or the sums and the 4,096 oldest.
"Index" is what a store does today: it opens the database and lists the folders, too. An index with
differences lacks one file in a hundred, has as many that are not there, and as many of another
time.

Journals: transactions of 64 new rows in a database with as many rows, alone and while another
process asks for the sums again and again.
"""

from __future__ import annotations

import argparse
import heapq
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.cache.block_store import NO_LIMIT, hash_of, header_of, open_store
from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged.block_store.block_file import encode_header
from mlx_paged.block_store.fingerprint import Fingerprint
from mlx_paged.block_store.index import Index, IndexRow, nbytes_on_disk
from mlx_paged.block_store.inventory import Inventory
from mlx_paged.block_store.layout import BlockLayout, block_hash_of, shard_name_of

PAYLOAD = b"small"
NUM_OLDEST = 4096
ROWS_PER_TRANSACTION = 64
JOURNALS = (("WAL", "NORMAL"), ("TRUNCATE", "NORMAL"), ("PERSIST", "NORMAL"), ("TRUNCATE", "OFF"))

_READER = """
import select, sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], timeout=60)
num_reads, longest = 0, 0.0
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    began = time.perf_counter()
    database.execute("SELECT num_blocks, nbytes FROM totals").fetchone()
    longest = max(longest, time.perf_counter() - began)
    num_reads += 1
    time.sleep(0.0005)
print(num_reads, longest * 1e3)
"""


class Clock:
    """Seconds of the processor and of the wall, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}

    def __call__(self, name: str, work: Callable[[], Any], num_parts: int = 1) -> Any:
        """What ``work`` returns; its time is divided by ``num_parts``."""
        cpu, wall = time.process_time(), time.perf_counter()
        result = work()
        self.seconds[name] = {
            "cpu": (time.process_time() - cpu) / num_parts,
            "wall": (time.perf_counter() - wall) / num_parts,
        }
        return result


def make_files(layout: BlockLayout, digest: str, num_files: int) -> None:
    """Blocks whose times are those of prompts one after another, the first block the latest."""
    began = time.time() - 2 * num_files
    folder = layout.of(digest)
    for first_byte in range(256):
        (folder / shard_name_of(bytes([first_byte]))).mkdir(mode=0o700)
    for number in range(num_files):
        header = header_of(number)
        content = encode_header(header, digest, began, None, PAYLOAD) + PAYLOAD
        path = layout.block(digest, header.block_hash)
        with open(path, "wb") as file:
            file.write(content)
        used = began + number - 2 * header.first_token // 16
        os.utime(path, (used, used))


def scan(layout: BlockLayout) -> Iterator[tuple[float, int, bytes]]:
    """Last use, bytes on disk and hash of each block, by directory entries."""
    owner = layout.folder.stat().st_uid
    for digest in os.scandir(layout.blocks):
        for shard in os.scandir(digest.path):
            if not shard.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(shard.path):
                block_hash = block_hash_of(entry.name)
                status = entry.stat(follow_symlinks=False)
                if block_hash and stat.S_ISREG(status.st_mode) and status.st_uid == owner:
                    yield status.st_mtime, nbytes_on_disk(status.st_size), block_hash


def keep_all(layout: BlockLayout) -> dict[bytes, tuple[float, int]]:
    return {block_hash: (used, nbytes) for used, nbytes, block_hash in scan(layout)}


def keep_oldest(layout: BlockLayout) -> tuple[int, list[tuple[float, int, bytes]]]:
    """The bytes of all, and the oldest."""
    total = 0

    def counted() -> Iterator[tuple[float, int, bytes]]:
        nonlocal total
        for block in scan(layout):
            total += block[1]
            yield block

    oldest = heapq.nsmallest(NUM_OLDEST, counted())
    return total, oldest


def nbytes_of(work: Callable[[], object]) -> int:
    """What the result of ``work`` holds in memory."""
    tracemalloc.start()
    result = work()
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return nbytes


def open_index(layout: BlockLayout) -> Inventory:
    inventory = Inventory(layout)
    inventory.act(Index.totals)
    return inventory


def make_differences(layout: BlockLayout, digest: str, num_files: int) -> None:
    index = Index(layout.index, 5)
    with index.transaction():
        index.remove((digest, hash_of(number)) for number in range(0, num_files, 100))
        index.set_last_used(((digest, hash_of(each)), 1.0) for each in range(1, num_files, 100))
        index.add(row_of(digest, num_files + number) for number in range(num_files // 100))
    index.close()


def row_of(digest: str, number: int) -> IndexRow:
    return IndexRow.of_block(
        digest, header_of(number), nbytes=4096, created=1.0, ttl=None, last_used=float(number)
    )


def drop_caches() -> None:
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("2\n")


def measure(
    layout: BlockLayout, fingerprint: Fingerprint, args: argparse.Namespace
) -> tuple[Clock, dict[str, int]]:
    """Of a folder that has files and no index."""
    digest, num_files = fingerprint.digest, args.files
    clock = Clock()
    clock("index, none yet", lambda: open_index(layout)).close()
    for name in ("warm", "cold") if args.drop_caches else ("warm",):
        sides: dict[str, Callable[[], Any]] = {
            "entries, all": lambda: keep_all(layout),
            "entries, sums and oldest": lambda: keep_oldest(layout),
            "index, current": lambda: open_index(layout).close(),
        }
        for side, work in sides.items():
            if name == "cold":
                drop_caches()
            clock(f"{side}, {name}", work)
    clock("index, sums at once", lambda: Inventory(layout).glance())
    make_differences(layout, digest, num_files)
    inventory = clock("index, with differences", lambda: open_index(layout))
    sizes = {
        "entries, all": nbytes_of(lambda: keep_all(layout)),
        "entries, sums and oldest": nbytes_of(lambda: keep_oldest(layout)),
        "database file": layout.index.stat().st_size,
    }
    clock("index, checked", lambda: inventory.act(Index.check))
    clock("index, all rows", lambda: inventory.act(Index.rows))
    measure_each(clock, inventory, layout, digest, num_files)
    inventory.close()
    return clock, sizes


def measure_each(
    clock: Clock, inventory: Inventory, layout: BlockLayout, digest: str, num_files: int
) -> None:
    """Per block: what both sides need, and evicting."""
    shards = inventory.shards
    some = [(digest, hash_of(number)) for number in range(0, num_files, max(1, num_files // 5000))]
    clock("each: has", lambda: [shards.status(name) for name in some], len(some))
    clock("each: header read", lambda: [shards.read_header(name) for name in some], len(some))
    num = min(2000, num_files // 10)
    clock("each: evicted by the index", lambda: inventory.evict(num * 4096), num)

    def evict_oldest(oldest: list[tuple[float, int, bytes]]) -> None:
        for used, _, block_hash in oldest:
            name = digest, block_hash
            if shards.last_use(name) == used:
                shards.remove(name)

    _, oldest = keep_oldest(layout)
    clock("each: evicted by entries", lambda: evict_oldest(oldest[:num]), num)


def measure_journals(layout: BlockLayout, num_rows: int, num_transactions: int) -> dict[str, Any]:
    """Milliseconds per transaction, and what a reader beside them saw."""
    results: dict[str, Any] = {}
    for journal, synchronous in JOURNALS:
        copy = layout.folder / f"{journal}-{synchronous}.sqlite3"
        shutil.copyfile(layout.index, copy)
        index = Index(copy, 60)
        index._database.execute(f"PRAGMA journal_mode = {journal}").fetchall()
        index._database.execute(f"PRAGMA synchronous = {synchronous}")
        found = measure_writes(index, 2 * num_rows, num_transactions, "")
        reader = subprocess.Popen(
            [sys.executable, "-c", _READER, str(copy)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
        found |= measure_writes(index, 3 * num_rows, num_transactions, ", read beside")
        num_reads, longest = reader.communicate("end\n", timeout=60)[0].split()
        found |= {"reads": int(num_reads), "longest read, ms": float(longest)}
        index.close()
        results[f"{journal}, synchronous {synchronous}"] = found
    return results


def measure_writes(
    index: Index, first: int, num_transactions: int, suffix: str
) -> dict[str, float]:
    """Milliseconds per transaction of new rows, the first of which has the number ``first``."""
    clock = Clock()
    for number in range(num_transactions):
        start = first + number * ROWS_PER_TRANSACTION
        rows = [row_of("0" * 32, start + place) for place in range(ROWS_PER_TRANSACTION)]
        clock(str(number), lambda: index.add(rows))  # noqa: B023
    cpu = sum(each["cpu"] for each in clock.seconds.values()) / num_transactions * 1e3
    walls = sorted(each["wall"] * 1e3 for each in clock.seconds.values())
    return {
        f"cpu, ms{suffix}": cpu,
        f"median, ms{suffix}": walls[len(walls) // 2],
        f"longest, ms{suffix}": walls[-1],
    }


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where to make a folder of blocks")
    parser.add_argument("--files", type=int, default=500_000, help="blocks in the folder")
    parser.add_argument("--transactions", type=int, default=200, help="of each journal")
    parser.add_argument("--drop-caches", action="store_true", help="of the whole machine; for root")
    return parser


def print_results(setting: dict[str, Any], results: dict[str, Any], out: Path | None) -> None:
    print_table(
        ["", "cpu, ms", "wall, ms"],
        [
            [name, *(f"{each[kind] * 1e3:.3f}" for kind in ("cpu", "wall"))]
            for name, each in results["seconds"].items()
        ],
    )
    nbytes = results["nbytes"].items()
    print_table(["MiB", ""], [[name, f"{each / 2**20:.1f}"] for name, each in nbytes])
    journals = results["journals"]
    rows = [
        [what, *(f"{found[what]:.2f}" for found in journals.values())]
        for what in next(iter(journals.values()))
    ]
    print_table(["64 rows", *journals], rows)
    print_json("catalogue", setting, results, out)


def main() -> None:
    args = setup_arg_parser().parse_args()
    setting = machine_card() | {"files": args.files, "sqlite": sqlite3.sqlite_version}
    print_card("The catalogue of a folder of K/V blocks", setting)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        store = open_store(Path(folder) / "cache", NO_LIMIT)
        store.close()
        store.layout.index.unlink()
        make_files(store.layout, store.fingerprint.digest, args.files)
        clock, nbytes = measure(store.layout, store.fingerprint, args)
        journals = measure_journals(store.layout, args.files, args.transactions)
        results = {"seconds": clock.seconds, "nbytes": nbytes, "journals": journals}
        # Before the files are removed, which takes minutes on a busy disk.
        print_results(setting, results, args.out)


if __name__ == "__main__":
    main()
