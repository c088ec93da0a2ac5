"""``save_snapshot`` and ``load_snapshot``: K/V in a file, bit for bit as they are stored.

A file is refused unless the model (by content), the block size, the dtype, the K/V format, the
shapes of the layers and what they keep are those of the cache, and each of its bytes is as it was
written. Layers are read and written one at a time, so that a copy of one layer is all the memory
that it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from mlx.nn.layers.base import Module

from mlx_paged.cache import KVCache, Sequences
from mlx_paged.core import KVCacheManager
from mlx_paged.core.block_hash import ExtraKey
from mlx_paged.models.identity import identities_of
from mlx_paged.request import SeqId
from mlx_paged.snapshots.errors import SnapshotError, check_path, system_errors
from mlx_paged.snapshots.facts import (
    FORMAT,
    KVFacts,
    check_token_ids,
    has_evicted,
    token_ids_of,
)
from mlx_paged.snapshots.rows import (
    LayerParts,
    check_num_tokens,
    check_sequence,
    find_prefix,
    read_sequence,
    write_sequence,
)
from mlx_paged.snapshots.tensor_file import TensorFile, write_tensor_file


def save_snapshot(
    path: str | Path, model: Module, sequences: Sequences, seq: SeqId, token_ids: Sequence[int]
) -> int:
    """Write the K/V of a sequence to a safetensors file; returns its bytes.

    The file is written aside, then renamed. Only another snapshot is overwritten.

    Args:
        path: of the file.
        model: whose K/V they are, as :func:`mlx_paged.load` returned it.
        token_ids: of the sequence, as many as it has in the cache.

    Raises:
        KeyError: there is no such sequence.
        ArgumentError: another number of token ids, tokens that have left the window, or a model
            with a recurrent state.
        SnapshotError: there is another file, the system refuses, or the disk is full; an older
            snapshot stays as it was.
    """
    file, token_ids = check_path(path), check_token_ids(token_ids)
    num_tokens = check_sequence(sequences, seq)
    check_num_tokens(seq, num_tokens, token_ids)
    facts = KVFacts.of(identities_of(model), sequences.cache)
    return write_snapshot(file, facts, token_ids, read_sequence(sequences, seq))


def load_snapshot(path: str | Path, model: Module, sequences: Sequences, seq: SeqId) -> list[int]:
    """Make a sequence hold the K/V of a file, in place of what it held; returns their token ids.

    The cache may be of either kind.

    Raises:
        SnapshotError: the file can't be read, was truncated or altered, or holds K/V of another
            model, block size, dtype, format, shape or window; nothing was changed.
        CacheFullError: the budget can't hold them.
    """
    file = SnapshotFile(path, KVFacts.of(identities_of(model), sequences.cache))
    if has_evicted(sequences.cache.config, len(file.token_ids)):
        raise SnapshotError(
            file.file, "holds only what lies in the windows, which an engine's prefix cache takes"
        )
    write_sequence(sequences, seq, len(file.token_ids), file.layers())
    return file.token_ids


def save_prefix(
    path: str | Path,
    facts: KVFacts,
    cache: KVCache,
    manager: KVCacheManager,
    token_ids: Sequence[int],
    extra_keys: tuple[ExtraKey, ...] = (),
) -> int:
    """Write what the prefix cache holds of these tokens' beginning; returns how many tokens.

    Args:
        extra_keys: of the blocks' hashes.

    Raises:
        ArgumentError: it holds not even one block of them.
        SnapshotError: as :func:`save_snapshot`.
    """
    file = check_path(path)
    prefix = find_prefix(cache, manager, token_ids, extra_keys)
    write_snapshot(file, facts, prefix.token_ids, prefix.layers)
    return len(prefix.token_ids)


def is_snapshot(file: Path) -> bool:
    """Whether a file begins as one that was saved here, whole or not."""
    try:
        with file.open("rb") as stream:
            return f'"format": "{FORMAT}"'.encode() in stream.read(4096)
    except OSError:
        return False


def write_snapshot(
    file: Path, facts: KVFacts, token_ids: Sequence[int], layers: Iterable[LayerParts]
) -> int:
    """Write K/V to a file; returns its bytes. Errors as :func:`save_snapshot`.

    Args:
        layers: of each layer the rows that it keeps.
    """
    with system_errors(file, "written"):
        if file.exists() and not is_snapshot(file):
            raise SnapshotError(file, "exists and is no snapshot; choose another name")
    return write_tensor_file(
        file,
        facts.as_metadata(token_ids),
        facts.tensors(len(token_ids)),
        _arrays(facts, layers),
    )


def _arrays(facts: KVFacts, layers: Iterable[LayerParts]) -> Iterator[np.ndarray]:
    for spec, layer in zip(facts.config.layers, layers, strict=True):
        for parts in spec.format.to_host(*layer):
            yield from parts


class SnapshotFile:
    """A file that was found to be whole, and of this model and cache.

    Attributes:
        token_ids: whose K/V it holds.

    Raises:
        SnapshotError: as :func:`load_snapshot`.
    """

    def __init__(self, path: str | Path, facts: KVFacts):
        self.file = check_path(path)
        self._facts = facts
        self._tensors = TensorFile(self.file)
        metadata = self._tensors.metadata
        facts.check(self.file, metadata)
        self._tensors.verify()
        self.token_ids = token_ids_of(self.file, metadata)
        if self._tensors.tensors != facts.tensors(len(self.token_ids)):
            raise SnapshotError(self.file, "is no snapshot: its arrays are not those of its tokens")

    def layers(self) -> Iterator[LayerParts]:
        """Of each layer the rows that it keeps, read as they are asked for."""
        names = iter(self._tensors.tensors)
        for spec in self._facts.config.layers:
            form = spec.format
            k, v = (
                tuple(self._tensors.read(next(names)) for _ in range(rows.num_parts))
                for rows in (form.key, form.value)
            )
            yield form.from_host(k, v)
