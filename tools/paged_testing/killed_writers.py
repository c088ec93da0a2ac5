"""Writers of a block store that are killed at random moments, while others read.

The bytes of each block follow from its hash, so any process can check any block. Writers say which
blocks have been written for good, and what they have pinned, and a process that is started after a
kill looks whether that is so.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import time
from pathlib import Path

from mlx_paged.block_store import (
    BlockStore,
    BlockWorker,
    CacheFolder,
    Fingerprint,
    Read,
)
from mlx_paged.core.block_hash import hash_token_blocks
from mlx_paged.core.tier import BlockHeader
from paged_testing.killed_processes import Log

BLOCK_SIZE = 8
NUM_SEQUENCES = 60
NUM_BLOCKS = 10  # of each sequence
MAX_PAYLOAD = 24_000
ROOMY, TIGHT = 1 << 40, 2 << 20  # bytes: nothing is evicted; a fifth of what is written stays
_UNIT = 4096  # bytes, of which files take a whole number


def fingerprint_of(number: int) -> Fingerprint:
    return Fingerprint(f"content {number}", f"model-{number}", ("layer",), "raw", BLOCK_SIZE, "1")


def sequence_of(number: int) -> list[BlockHeader]:
    """The blocks of a sequence; the first half is shared by every sixth one."""
    tokens = [
        number % 6 if index < NUM_BLOCKS // 2 * BLOCK_SIZE else number
        for index in range(NUM_BLOCKS * BLOCK_SIZE)
    ]
    hashes = hash_token_blocks(tokens, BLOCK_SIZE)
    return [
        BlockHeader(
            block_hash,
            hashes[index - 1] if index else None,
            tuple(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]),
            index * BLOCK_SIZE,
        )
        for index, block_hash in enumerate(hashes)
    ]


def payload_of(digest: str, block_hash: bytes) -> bytes:
    """The bytes of a block: another model's are others."""
    num_bytes = 1 + int.from_bytes(block_hash[:4], "little") % MAX_PAYLOAD
    return hashlib.shake_256(digest.encode() + block_hash).digest(num_bytes)


def write(log: Log, stop: Path, folder: Path, max_nbytes: int, seed: int) -> None:
    """Write random sequences, as engines do, until killed."""
    source = random.Random(seed)
    log.say("opens")
    fingerprint = fingerprint_of(source.randrange(2))
    store = BlockStore(folder, max_nbytes, fingerprint)
    writer = BlockWorker(store, 1 << 20, 1 << 20)
    while not stop.exists():
        headers = sequence_of(source.randrange(NUM_SEQUENCES))
        headers = headers[: source.randint(1, NUM_BLOCKS)]
        log.say("writes")
        taken = [
            header
            for header in headers
            if writer.offer(header, payload_of(fingerprint.digest, header.block_hash))
        ]
        if source.random() < 0.5:
            store.note_used([header.block_hash for header in headers])
        if source.random() < 0.5 and writer.flush(timeout=30.0) and store.failure is None:
            hashes = [header.block_hash.hex() for header in taken]
            log.say("written", fingerprint.digest, hashes)
        if source.random() < 0.2:
            log.say("tends")
            store.maintain()
        if store.failure is not None:
            log.say("failure", store.failure)
            return
    writer.close(10.0)


def tend(log: Log, stop: Path, folder: Path, max_nbytes: int, seed: int) -> None:
    """Pin, unpin, shrink and look, as people do with the tool, until killed."""
    source = random.Random(seed)
    while not stop.exists():
        try:
            tool = CacheFolder(folder)
            entries = [entry for entry in tool.entries() if entry.num_tokens]
        except ValueError:  # the folder does not exist yet
            time.sleep(0.01)
            continue
        if not entries:
            continue
        entry = source.choice(entries)
        names = entry.digest, entry.block_hash
        choice = source.random()
        if choice < 0.4 and len(tool.pins()) < 4:
            log.say("pins", entry.digest, entry.block_hash.hex())
            if tool.pin(*names):
                log.say("pinned", entry.digest, entry.block_hash.hex())
        elif choice < 0.8 and tool.pins():
            names = source.choice(tool.pins())
            log.say("unpins", names[0], names[1].hex())
            tool.unpin(*names)
        elif choice < 0.9:
            log.say("looks")
            tool.size()
        else:
            log.say("shrinks")
            tool.shrink(max_nbytes // 2)


def read(log: Log, stop: Path, folder: Path, seed: int) -> None:
    """Read and check blocks until told to stop; says how many there were."""
    source = random.Random(seed)
    stores = [BlockStore(folder, ROOMY, fingerprint_of(number)) for number in range(2)]
    readers = [BlockWorker(store, 1 << 20, 1 << 20) for store in stores]
    num_read = num_missed = 0
    while not stop.exists():
        number = source.randrange(2)
        digest = stores[number].fingerprint.digest
        hashes = [h.block_hash for h in sequence_of(source.randrange(NUM_SEQUENCES))]
        if source.random() < 0.5:
            found = {h: stores[number].load(h) for h in hashes}
        else:
            wanted, found = Read(), dict.fromkeys(hashes)
            readers[number].read(wanted, hashes)
            while wanted.is_reading:
                readers[number].wait(1.0)
                found |= dict(readers[number].take(wanted, 1 << 20))
        for block_hash, payload in found.items():
            if payload is None:
                num_missed += 1
                continue
            num_read += 1
            if payload != payload_of(digest, block_hash):
                log.say("wrong", digest, block_hash.hex())
        if stores[number].failure is not None:
            log.say("failure", stores[number].failure)
            return
    num_corrupt = sum(store.stats().num_corrupt for store in stores)
    log.say("counts", {"reads": num_read, "misses": num_missed, "corrupt": num_corrupt})


def look(log: Log, stop: Path, folder: Path, max_nbytes: int, seed: int) -> None:
    """Start on a folder as an engine does, and say what is there then."""
    stores = [BlockStore(folder, max_nbytes, fingerprint_of(number)) for number in range(2)]
    for store in stores:
        store.maintain()
    for store in stores:
        digest = store.fingerprint.digest
        there = []
        for block_hash in _all_hashes():
            payload = store.load(block_hash)
            if payload is not None and payload != payload_of(digest, block_hash):
                log.say("wrong", digest, block_hash.hex())
            elif payload is not None:
                there.append(block_hash.hex())
        log.say("there", digest, there)
        if store.failure is not None:
            log.say("failure", store.failure)
    tool = CacheFolder(folder)
    for file in tool.verify():
        if file.problem is not None:
            log.say("bad", file.path, file.problem)
    pins = [(digest, block_hash.hex()) for digest, block_hash in tool.pins()]
    log.say("left", pins, tool.size().nbytes, nbytes_of_files(folder), num_unfinished(folder))


def _all_hashes() -> set[bytes]:
    return {header.block_hash for number in range(NUM_SEQUENCES) for header in sequence_of(number)}


def nbytes_of_files(folder: Path) -> int:
    """What the files of blocks take, counted in another way than by the store."""
    nbytes = 0
    for path in folder.glob("blocks/*/*/*.kv"):
        with contextlib.suppress(FileNotFoundError):
            nbytes += -(-os.lstat(path).st_size // _UNIT) * _UNIT
    return nbytes


def num_unfinished(folder: Path) -> int:
    """Files that a writer began to write."""
    return sum(1 for _ in folder.rglob(".*.tmp"))
