"""What it costs to know the blocks in a folder by its directory entries: a start, and each block
that is looked up, used, written and evicted.

    python -m benchmarks catalogue                   # 500,000 files in a folder for temporary files
    python -m benchmarks catalogue --folder DIR      # on the disk that you mean
    python -m benchmarks catalogue --drop-caches     # as root on Linux: also a cold start

The files are small blocks in the store's own layout, 250 to a prompt. A start lists all of them; in
a folder of an earlier version, which has an SQLite index, it also reads their headers once. Blocks
are written into a full folder, so that each evicts another one, with the listings that are due
meanwhile, at each sixteenth of the limit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cache.block_store import (
    BLOCKS_OF_A_PROMPT,
    NO_LIMIT,
    hash_of,
    header_of,
    open_store,
)
from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged.block_store import CacheFolder
from mlx_paged.block_store.block_files import BlockFiles
from mlx_paged.block_store.catalogue import Catalogue
from mlx_paged.block_store.layout import encode_header, shard_name_of

PAYLOAD = b"small"
UNIT = 4096  # bytes that each takes


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


def make_files(files: BlockFiles, digest: str, num_files: int) -> None:
    """Blocks whose times are those of prompts one after another, the first block the latest."""
    began = time.time() - 2 * num_files
    folder = files.path_of(digest)
    for first_byte in range(256):
        (folder / shard_name_of(bytes([first_byte]))).mkdir(mode=0o700)
    for number in range(num_files):
        header = header_of(number)
        content = encode_header(header, digest, began, None, PAYLOAD) + PAYLOAD
        path = files.path_of_block((digest, header.block_hash))
        with open(path, "wb") as file:
            file.write(content)
        used = began + number - 2 * header.first_token // 16
        os.utime(path, (used, used))


def listed(files: BlockFiles) -> Catalogue:
    catalogue = Catalogue(files)
    catalogue.list_files()
    return catalogue


def nbytes_of(work: Callable[[], object]) -> int:
    """What the result of ``work`` holds in memory."""
    tracemalloc.start()
    result = work()
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return nbytes


def drop_caches() -> None:
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("2\n")


def measure(files: BlockFiles, digest: str, args: argparse.Namespace) -> tuple[Clock, int]:
    """Seconds of each, and what a catalogue holds in memory."""
    clock, num_files = Clock(), args.files
    clock("start, warm", lambda: listed(files))
    if args.drop_caches:
        drop_caches()
        clock("start, cold", lambda: listed(files))
    nbytes = nbytes_of(lambda: listed(files))
    clock("all headers, as the tool reads them", lambda: CacheFolder(files.path).entries())

    catalogue = listed(files)
    some = [(digest, hash_of(number)) for number in range(0, num_files, max(1, num_files // 5000))]
    clock("each: has", lambda: [files.status(name) for name in some], len(some))
    clock("each: header read", lambda: [files.read_header(name) for name in some], len(some))
    prompts = range(0, num_files, max(BLOCKS_OF_A_PROMPT, num_files // 20))
    chains = [[hash_of(first + place) for place in range(BLOCKS_OF_A_PROMPT)] for first in prompts]
    used = time.time_ns()
    num_used = len(chains) * BLOCKS_OF_A_PROMPT

    def use_all() -> None:
        for chain in chains:
            catalogue.use(digest, chain, used)

    clock("each: used", use_all, num_used)
    num = min(2000, num_files // 10)
    catalogue = listed(files)
    clock("each: evicted", lambda: catalogue.shrink(catalogue.nbytes - num * UNIT), num)
    measure_writes(clock, files, catalogue.nbytes, num_files)
    return clock, nbytes


def measure_writes(clock: Clock, files: BlockFiles, nbytes: int, num_files: int) -> None:
    """Of a store whose folder is full."""
    num_writes = num_files // 8
    with tempfile.TemporaryDirectory(dir=files.path.parent) as other:
        roomy = open_store(Path(other) / "cache", NO_LIMIT)
        store = open_store(files.path, nbytes)
        for name, each in (("each: written", roomy), ("each: written and one evicted", store)):
            headers = [
                header_of(number) for number in range(2 * num_files, 2 * num_files + num_writes)
            ]
            clock(name, lambda: [each.store(one, PAYLOAD) for one in headers], num_writes)  # noqa: B023
            each.close()


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where to make a folder of blocks")
    parser.add_argument("--files", type=int, default=500_000, help="blocks in the folder")
    parser.add_argument("--drop-caches", action="store_true", help="of the whole machine; for root")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    setting = machine_card() | {"files": args.files}
    print_card("The catalogue of a folder of K/V blocks", setting)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        store = open_store(Path(folder) / "cache", NO_LIMIT)
        store.close()
        make_files(store.files, store.fingerprint.digest, args.files)
        clock, nbytes = measure(store.files, store.fingerprint.digest, args)
        rows = [
            [name, *(f"{each[kind] * 1e3:.3f}" for kind in ("cpu", "wall"))]
            for name, each in clock.seconds.items()
        ]
        print_table(["", "cpu, ms", "wall, ms"], rows)
        print_table(["MiB", ""], [["a catalogue", f"{nbytes / 2**20:.1f}"]])
        # Before the files are removed, which takes minutes on a busy disk.
        results = {"seconds": clock.seconds, "nbytes": nbytes}
        print_json("catalogue", setting, results, args.out)


if __name__ == "__main__":
    main()
