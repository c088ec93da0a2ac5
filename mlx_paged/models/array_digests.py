"""Digests of a model's arrays. Those of arrays that equal a tensor of its files are stored per
file; others are computed each time.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_paged.models.weight_files import WeightFiles, untouched

# The piece of an array that one task hashes; large enough that the cost of a task is negligible.
PIECE_NBYTES = 64 * 2**20
# The most bytes of arrays that are hashed at once: strided ones are copied for it.
WINDOW_NBYTES = 2**30


class KnownDigests(Protocol):
    """A store of the digests of tensors, by the version of their files."""

    def load(self, key: str) -> Mapping[str, bytes]:
        """The digests stored under the key, by the names of tensors; empty if there are none."""
        ...

    def store(self, key: str, digests: Mapping[str, bytes]) -> None:
        """Store digests. Errors are ignored."""
        ...


class _NothingKnown:
    def load(self, key: str) -> Mapping[str, bytes]:
        return {}

    def store(self, key: str, digests: Mapping[str, bytes]) -> None:
        pass


NOTHING_KNOWN = _NothingKnown()


def array_digests(arrays: Sequence[mx.array], known: KnownDigests) -> list[bytes]:
    """For each array the concatenated SHA-256 digests of its 64 MiB pieces. The arrays are
    evaluated.

    Hashing reads all bytes with one thread per core: some 2 GB per second and core.

    Args:
        known: a store of the digests of arrays that equal a tensor of their files; new ones are
            added.
    """
    # By id: tied weights are one array in several places.
    sizes = {id(array): array.nbytes for array in arrays}
    names_in: dict[WeightFiles, dict[int, str]] = {}
    for ident, (files, name) in untouched(arrays).items():
        names_in.setdefault(files, {})[ident] = name
    # They were just evaluated, so the check covers arrays that were read only then, too.
    names_in = {files: names for files, names in names_in.items() if files.are_unchanged()}
    found: dict[int, bytes] = {}
    for files, names in names_in.items():
        stored = known.load(_key(files))
        digests = {ident: stored.get(name, b"") for ident, name in names.items()}
        found |= {
            ident: digest
            for ident, digest in digests.items()
            if len(digest) == _digest_nbytes(sizes[ident])
        }
    lacking = {id(array): array for array in arrays if id(array) not in found}
    found |= zip(lacking, _hashed(list(lacking.values())), strict=True)
    for files, names in names_in.items():
        if not lacking.keys().isdisjoint(names):
            known.store(_key(files), {name: found[ident] for ident, name in names.items()})
    return [found[id(array)] for array in arrays]


def _key(files: WeightFiles) -> str:
    return hashlib.sha256(f"{files.key} in pieces of {PIECE_NBYTES}".encode()).hexdigest()


def _digest_nbytes(nbytes: int) -> int:
    return hashlib.sha256().digest_size * -(-nbytes // PIECE_NBYTES)


def _hashed(arrays: Sequence[mx.array]) -> Iterator[bytes]:
    waiting: deque[tuple[int, list[Future[bytes]]]] = deque()
    nbytes_waiting = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for array in arrays:
            while waiting and nbytes_waiting + array.nbytes > WINDOW_NBYTES:
                nbytes, digests = waiting.popleft()
                nbytes_waiting -= nbytes
                yield b"".join(each.result() for each in digests)
            # No copy, except of a strided view.
            flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
            mx.eval(flat)
            data = np.array(flat, copy=False).data
            starts = range(0, len(data), PIECE_NBYTES)
            pieces = [data[start : start + PIECE_NBYTES] for start in starts]
            waiting.append((array.nbytes, [pool.submit(_digest, piece) for piece in pieces]))
            nbytes_waiting += array.nbytes
        for _, digests in waiting:
            yield b"".join(each.result() for each in digests)


def _digest(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()
