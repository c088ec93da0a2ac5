"""Several processes write, read, evict and pin in one folder at once."""

from __future__ import annotations

import json
import subprocess
import sys

from helpers.block_stores import block_files, fingerprint, named, open_store, payload_of

from mlx_paged.block_store import BlockStore, CacheFolder
from mlx_paged.block_store.directory import temporary_name
from mlx_paged.block_store.layout import TAG_NAME

WORKER = """
import json, random, sys, time
sys.path[:0] = {path!r}
from helpers.block_stores import UNIT, fingerprint, header, named, payload_of
from mlx_paged.block_store import BlockStore, BlockWorker, CacheFolder, Read

seed, folder = int(sys.argv[1]), sys.argv[2]
rng = random.Random(seed)
model = "a model" if seed % 2 else "another model"
store = BlockStore(folder, 24 * UNIT, fingerprint(model))
worker = BlockWorker(store, 1 << 20, 1 << 20)
tool = CacheFolder(folder)
num_read = num_wrong = num_pinned = 0
pinned = None
for number in range({num_rounds}):
    root = rng.randrange(6)
    chain = [f"{{model}} {{root}}.{{depth}}" for depth in range(rng.randrange(1, 9))]
    read = Read()
    worker.read(read, [named(name) for name in chain])
    while read.is_reading:
        worker.wait(10)
        for block_hash, payload in worker.take(read, 1 << 30):
            num_read += 1
            num_wrong += payload != payload_of(block_hash)
    for depth, name in enumerate(chain):
        parent = chain[depth - 1] if depth else None
        worker.offer(header(name, parent, 16 * depth), payload_of(named(name)))
    store.note_used([named(name) for name in chain])
    if number % 10 == 5:
        worker.flush(10)
        if pinned is None and tool.pin(store.fingerprint.digest, named(chain[-1])):
            pinned = named(chain[-1])
            num_pinned += 1
        elif pinned is not None:
            num_wrong += store.load(pinned) is None
            tool.unpin(store.fingerprint.digest, pinned)
            pinned = None
    if number % 25 == 20 and seed == 1:
        store.folder.joinpath("index-v1.sqlite3").touch()  # as an earlier version does
    if number % 30 == 17:
        num_wrong += any(file.problem for file in tool.verify())
if pinned is not None:
    tool.unpin(store.fingerprint.digest, pinned)
assert worker.close(20)
print(json.dumps([num_read, num_wrong, num_pinned, store.failure]))
"""


def test_processes_that_share_a_folder_never_see_a_wrong_byte(tmp_path):
    script = WORKER.format(path=sys.path, num_rounds=60)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(seed), str(tmp_path / "cache")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    for worker in workers:
        output, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0 and errors == "", errors
        num_read, num_wrong, num_pinned, failure = json.loads(output)
        assert (num_wrong, failure) == (0, None)
        assert num_read > 30 and num_pinned > 0
    # What the last ones to write did not know of each other is put right at the next start.
    store = open_store(tmp_path / "cache", num_blocks=24)
    store.maintain()
    files = block_files(tmp_path)
    assert len(files) == store.stats().num_blocks <= 24
    assert [path for path in (tmp_path / "cache").rglob("*.tmp")] == []
    assert [file for file in CacheFolder(tmp_path / "cache").verify() if file.problem] == []


def test_a_folder_is_taken_while_another_process_writes_its_tag(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / temporary_name(TAG_NAME)).write_bytes(b"Signature")
    store = open_store(folder)
    assert (folder / TAG_NAME).exists() and store.failure is None
    store.close()


def test_what_one_process_wrote_another_one_reads(tmp_path):
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
from helpers.block_stores import open_store, put_chain
store = open_store({str(tmp_path / "cache")!r})
put_chain(store, *map(str, range(20)))
import os
os._exit(0)  # no chance to note anything down
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    store = BlockStore(tmp_path / "cache", 1 << 30, fingerprint())
    for number in range(20):
        assert store.load(named(str(number))) == payload_of(named(str(number)))
    store.maintain()
    assert store.stats().num_blocks == 20
