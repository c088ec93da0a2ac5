"""``save_snapshot`` and ``load_snapshot``: K/V in a file, bit for bit as they are stored.

A file is refused unless the model (by content), the block size, the dtype, the K/V format, the
shapes of the layers and the tokens that they keep match the cache, and the file is unaltered. It is
a :class:`Tier`, to and from which blocks are copied in small batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlx.nn.layers.base import Module

from mlx_paged.cache import Sequences
from mlx_paged.cache.state_bytes import state_from_bytes, state_to_bytes
from mlx_paged.cache.transfer import load_blocks, store_blocks
from mlx_paged.core.tier import BlockHeader, Tier
from mlx_paged.errors import ArgumentError
from mlx_paged.models.identity import identities_of
from mlx_paged.ops import StateRow
from mlx_paged.request import SeqId
from mlx_paged.snapshots.errors import SnapshotError, check_path, system_errors
from mlx_paged.snapshots.facts import (
    FORMAT,
    STATE,
    KVFacts,
    check_has_blocks,
    check_token_ids,
    has_evicted,
    token_ids_of,
)
from mlx_paged.snapshots.rows import RowTier, sequence_headers
from mlx_paged.snapshots.tensor_file import TensorFile, written_tensor_file


def save_snapshot(
    path: str | Path, model: Module, sequences: Sequences, seq: SeqId, token_ids: Sequence[int]
) -> int:
    """Write the K/V of a sequence to a safetensors file; returns its bytes.

    The file is written aside, then renamed. Only another snapshot is overwritten.

    Args:
        path: the file.
        model: the model of the K/V, as :func:`mlx_paged.load` returned it.
        token_ids: of the sequence, one for each of its tokens in the cache.

    Raises:
        KeyError: there is no such sequence.
        ArgumentError: a wrong number of token ids, tokens have left the window, or the cache is not
            a paged one.
        SnapshotError: a file of that name is not a snapshot, or the file can't be written; an
            existing snapshot is unchanged.
    """
    file, token_ids = check_path(path), check_token_ids(token_ids)
    cache = check_has_blocks(sequences.cache)
    num_tokens = check_sequence(sequences, seq)
    check_num_tokens(seq, num_tokens, token_ids)
    facts = KVFacts.of(identities_of(model), cache)
    headers = sequence_headers(cache.config, num_tokens)
    states = sequences.manager.states
    state = None if states is None else state_to_bytes(states.get(seq, num_tokens))
    with written_snapshot(file, facts, token_ids, headers, state) as tier:
        store_sequence(sequences, seq, tier, headers)
    return file.stat().st_size


def load_snapshot(path: str | Path, model: Module, sequences: Sequences, seq: SeqId) -> list[int]:
    """Replace the contents of a sequence by the K/V of a file; returns their token ids.

    Raises:
        SnapshotError: the file can't be read, was truncated or altered, or its model, block size,
            dtype, format, shape or window differs; nothing was changed.
        ArgumentError: the cache is not a paged one.
        CacheFullError: the K/V exceed the budget.
    """
    cache = check_has_blocks(sequences.cache)
    file = SnapshotFile(path, KVFacts.of(identities_of(model), cache))
    num_tokens = len(file.token_ids)
    if has_evicted(cache.config, num_tokens):
        raise SnapshotError(
            file.file,
            "holds only the tokens in the windows, which only an engine's prefix cache can take",
        )
    headers = sequence_headers(cache.config, num_tokens)
    load_sequence(sequences, seq, num_tokens, file.tier(headers), headers, file.state())
    return file.token_ids


# One sequence of a cache


def check_sequence(sequences: Sequences, seq: SeqId) -> int:
    """The number of tokens of a sequence.

    Raises:
        KeyError: there is no such sequence.
        ArgumentError: some of its tokens have left the window.
    """
    if seq not in sequences:
        raise KeyError(f"[snapshot] no sequence {seq!r}; the cache holds {list(sequences)}")
    num_tokens = sequences.seq_len(seq)
    if has_evicted(sequences.cache.config, num_tokens):
        raise ArgumentError(
            f"[snapshot] tokens of sequence {seq!r} have left the window: it has {num_tokens}",
            "seq",
        )
    return num_tokens


def check_num_tokens(seq: SeqId, num_tokens: int, token_ids: Sequence[int]) -> None:
    """Raise ``ArgumentError`` unless a sequence has one token for each token id."""
    if len(token_ids) != num_tokens:
        raise ArgumentError(
            f"[snapshot] sequence {seq!r} has {num_tokens} tokens in the cache, and token_ids are "
            f"{len(token_ids)}",
            "token_ids",
        )


def store_sequence(
    sequences: Sequences, seq: SeqId, tier: Tier, headers: Sequence[BlockHeader]
) -> None:
    """Copy the blocks of a sequence into a tier."""
    cache = check_has_blocks(sequences.cache)
    store_blocks(cache, tier, _with_ids(sequences, seq, headers))


def load_sequence(
    sequences: Sequences,
    seq: SeqId,
    num_tokens: int,
    tier: Tier,
    headers: Sequence[BlockHeader],
    state: StateRow | None = None,
) -> None:
    """Replace the contents of a sequence by the blocks of a tier and the recurrent state after
    them.

    Raises:
        CacheFullError: they exceed the budget.
    """
    cache = check_has_blocks(sequences.cache)
    if seq in sequences:
        sequences.free(seq)
    with sequences.step({seq: num_tokens}) as step:
        load_blocks(cache, tier, _with_ids(sequences, seq, headers))
        if step.states is not None:
            step.states[0].after = state


def _with_ids(
    sequences: Sequences, seq: SeqId, headers: Sequence[BlockHeader]
) -> list[tuple[BlockHeader, int]]:
    tables, block_size = sequences.manager.groups[seq], sequences.cache.config.block_size
    return [
        (header, tables[header.group].block_ids[header.first_token // block_size])
        for header in headers
    ]


# The file


def is_snapshot(file: Path) -> bool:
    """Whether a file begins like a snapshot, complete or not."""
    try:
        with file.open("rb") as stream:
            return f'"format": "{FORMAT}"'.encode() in stream.read(4096)
    except OSError:
        return False


@contextmanager
def written_snapshot(
    file: Path,
    facts: KVFacts,
    token_ids: Sequence[int],
    headers: Sequence[BlockHeader],
    state: bytes | None = None,
) -> Iterator[Tier]:
    """Write a snapshot of the state after these tokens, and of the blocks that the body stores in
    the tier. Raises as :func:`save_snapshot`.
    """
    with system_errors(file, "written"):
        if file.exists() and not is_snapshot(file):
            raise SnapshotError(file, "exists and is not a snapshot; choose another name")
    num_tokens = len(token_ids)
    metadata, tensors = facts.as_metadata(token_ids), facts.tensors(num_tokens, len(state or b""))
    with written_tensor_file(file, metadata, tensors) as rows:
        if state is not None:
            rows.write(STATE, 0, slice(0, 1), memoryview(state))
        yield RowTier(facts.config, rows, headers, num_tokens)


class SnapshotFile:
    """A snapshot that was verified, and matches a model and a cache.

    Attributes:
        token_ids: of its K/V.
        is_foreign: whether its K/V may differ from those that would be computed here: the file
            states no origin or another one, such as another version of MLX.

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
        self.is_foreign = not facts.are_computed_here(metadata)
        state = self._tensors.tensors.get(STATE)
        expected = facts.tensors(len(self.token_ids), 0 if state is None else state.nbytes)
        has_state = facts.config.state_nbytes > 0
        if self._tensors.tensors != expected or has_state != (state is not None):
            raise SnapshotError(
                self.file, "is not a snapshot: its arrays are not those of its tokens"
            )

    def __repr__(self) -> str:
        return f"SnapshotFile({str(self.file)!r}, {len(self.token_ids):,} tokens)"

    def state(self) -> StateRow | None:
        """The recurrent state after its tokens; ``None`` for a model without one.

        Raises:
            SnapshotError: it can't be read, or a dtype differs from the cache's.
        """
        if STATE not in self._tensors.tensors:
            return None
        try:
            content = self._tensors.read(STATE, 0, slice(0, 1))
            return state_from_bytes(content, self._facts.config.state_layout)
        except ValueError as error:
            raise SnapshotError(self.file, f"holds no state for this cache: {error}") from error

    def tier(self, headers: Sequence[BlockHeader]) -> Tier:
        """Its blocks, under the keys of these headers."""
        return RowTier(self._facts.config, self._tensors, headers, len(self.token_ids))
