"""Snapshots: K/V in a file, bit for bit as they are stored.

A file is refused unless the model (by content), the block size, the dtype, the K/V format, the
shapes of the layers and the tokens that they keep match the cache, and the file is unaltered. It is
a :class:`Tier`, to and from which blocks are copied in small batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlx.nn.layers.base import Module

from mlx_paged.cache import KVCache, KVCacheConfig, PagedKVCache, Sequences
from mlx_paged.cache.state_bytes import state_from_bytes, state_to_bytes
from mlx_paged.cache.transfer import load_blocks, store_blocks
from mlx_paged.core import Retention
from mlx_paged.core.tier import BlockHeader, Tier
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.models.identity import ModelIdentity, identities_of
from mlx_paged.ops import StateRow
from mlx_paged.options.argument_values import is_plain_integer
from mlx_paged.request import SeqId
from mlx_paged.snapshots.rows import (
    RowTier,
    SnapshotError,
    StoredArray,
    TensorFile,
    arrays_of,
    check_path,
    retention_of,
    sequence_headers,
    system_errors,
    written_tensor_file,
)

FORMAT = "mlx_paged.snapshot"
VERSION = "2"
_READABLE = ("1", VERSION)
COMPUTED_BY = "computed_by"
STATE = "state"  # name of the array with the bytes of the recurrent state


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
    num_tokens = check_sequence(sequences, seq, token_ids)
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


def check_sequence(sequences: Sequences, seq: SeqId, token_ids: Sequence[int] | None) -> int:
    """The number of tokens of a sequence.

    Args:
        token_ids: of the sequence, if they are known.

    Raises:
        KeyError: there is no such sequence.
        ArgumentError: some of its tokens have left the window, or the token ids are invalid or not
            one for each token.
    """
    if seq not in sequences:
        raise KeyError(f"[snapshot] no sequence {seq!r}; the cache holds {list(sequences)}")
    num_tokens = sequences.seq_len(seq)
    if has_evicted(sequences.cache.config, num_tokens):
        raise ArgumentError(
            f"[snapshot] tokens of sequence {seq!r} have left the window: it has {num_tokens}",
            "seq",
        )
    if token_ids is not None and len(check_token_ids(token_ids)) != num_tokens:
        raise ArgumentError(
            f"[snapshot] sequence {seq!r} has {num_tokens} tokens in the cache, and token_ids are "
            f"{len(token_ids)}",
            "token_ids",
        )
    return num_tokens


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


# What K/V depend on


@dataclass(frozen=True)
class KVFacts:
    """A model, and how a cache stores its K/V.

    Attributes:
        model: identified by content.
        draft_model: the draft model, if there is one; its layers follow those of the model.
        config: of the cache.
        computed_by: the versions and the backend that have computed the K/V from the tokens with
            these models; ``None`` if that is not known.
    """

    model: ModelIdentity
    draft_model: ModelIdentity | None
    config: KVCacheConfig
    computed_by: str | None = None

    @classmethod
    def of(
        cls, identities: Sequence[ModelIdentity], cache: KVCache, computed_by: str | None = None
    ) -> KVFacts:
        """The facts of a cache.

        Args:
            identities: as :func:`identities_of` returns them.
        """
        model, *drafts = identities
        return cls(model, drafts[0] if drafts else None, cache.config, computed_by)

    def as_metadata(self, token_ids: Sequence[int]) -> dict[str, str]:
        return {
            "format": FORMAT,
            "version": VERSION,
            **({} if self.computed_by is None else {COMPUTED_BY: self.computed_by}),
            "model_name": self.model.name,
            "draft_model_name": "" if self.draft_model is None else self.draft_model.name,
            **{name: text for name, _, text in self._compared()},
            "num_tokens": str(len(token_ids)),
            "token_ids": json.dumps(list(map(int, token_ids))),
        }

    def check(self, file: Path, metadata: Mapping[str, str]) -> None:
        """Check that a file matches.

        Raises:
            SnapshotError: it does not; the message has the first value that differs, on either
                side.
        """
        if metadata.get("format") != FORMAT:
            raise SnapshotError(file, "is not a snapshot of mlx_paged")
        if metadata.get("version") not in _READABLE:
            readable = " and ".join(_READABLE)
            raise SnapshotError(
                file, f"is of version {metadata.get('version')}, and only {readable} can be read"
            )
        for name, label, ours in self._compared():
            theirs = metadata.get(name)
            if theirs != ours:
                names = self._names(name)
                theirs = _with_name(metadata.get(f"{name}_name", ""), theirs)
                raise SnapshotError(
                    file,
                    f"has another {label} than this cache: {_short(theirs)} in the file, "
                    f"{_short(_with_name(names, ours))} here",
                )

    def _names(self, field: str) -> str:
        model = {"model": self.model, "draft_model": self.draft_model}.get(field)
        return "" if model is None else model.name

    def _compared(self) -> Iterator[tuple[str, str, str]]:
        """Name, label and value of everything that has to be equal."""
        specs, config = self.config.layers, self.config
        yield "model", "model", self.model.digest
        draft = self.draft_model
        yield "draft_model", "draft model", "none" if draft is None else draft.digest
        yield "block_size", "block size", str(config.block_size)
        yield "num_layers", "number of layers", str(len(specs))
        yield "dtype", "dtype", _runs(spec.format.key.dtype for spec in specs)
        yield "kv_format", "K/V format", _runs(str(spec.format) for spec in specs)
        shapes = (
            f"{spec.num_kv_heads} KV heads of {spec.key_dim} + {spec.value_dim}" for spec in specs
        )
        yield "layers", "shape", _runs(shapes)
        kept = (_described(retention_of(config, layer)) for layer in range(len(specs)))
        yield "kept", "window", _runs(kept)
        if config.state_layout:
            yield "state", "recurrent state", "; ".join(config.state_layout)

    def arrays(self, num_tokens: int, state_nbytes: int = 0) -> dict[str, StoredArray]:
        """The arrays of a file with this many tokens and a state of this many bytes."""
        state = {STATE: StoredArray("U8", (1, 1, state_nbytes))} if state_nbytes else {}
        return arrays_of(self.config, num_tokens) | state


def check_has_blocks(cache: KVCache) -> PagedKVCache:
    """The cache, if it is a paged one; raises ``ArgumentError`` otherwise."""
    if not isinstance(cache, PagedKVCache):
        raise ArgumentError(
            f"[snapshot] snapshots and prompt caches need blocks, which kv={cache.kind!r} does not "
            "have; use kv='paged'",
            "kv",
        )
    return cache


def has_evicted(config: KVCacheConfig, num_tokens: int) -> bool:
    """Whether a layer has dropped some of this many tokens."""
    return any(group.retention.num_evicted(num_tokens) for group in config.groups)


def token_ids_of(file: Path, metadata: Mapping[str, str]) -> list[int]:
    """The token ids whose K/V are in a file.

    Raises:
        SnapshotError: they can't be read.
    """
    try:
        token_ids = json.loads(metadata.get("token_ids", ""))
        if not isinstance(token_ids, list) or not all(map(is_plain_integer, token_ids)):
            raise ValueError("a list of integers was expected")
    except (ValueError, RecursionError) as error:
        raise SnapshotError(
            file, f"is not a snapshot: its token ids can't be read: {error}"
        ) from None
    return token_ids


def check_token_ids(token_ids: object) -> list[int]:
    """The token ids as a list.

    Raises:
        ArgumentError: it is not a sequence of integers, or is empty.
    """
    ids = list(token_ids) if isinstance(token_ids, Sequence) else None
    if not ids or not all(is_plain_integer(token_id) for token_id in ids):
        raise ArgumentError(
            f"[snapshot] token_ids must be a list of at least one integer, got {shown(token_ids)}",
            "token_ids",
        )
    return ids


def _described(retention: Retention) -> str:
    if retention.num_recent_tokens is None:
        return "all tokens"
    kept = f"the last {retention.num_recent_tokens}"
    if retention.num_sink_tokens:
        kept = f"the first {retention.num_sink_tokens} and {kept}"
    return f"{kept}, leaving by {retention.stride}"


def _runs(values: Iterator[str]) -> str:
    """The value that all layers share, or the value of each run of layers."""
    runs: list[tuple[int, int, str]] = []
    for layer, value in enumerate(values):
        if runs and runs[-1][2] == value:
            runs[-1] = (runs[-1][0], layer, value)
        else:
            runs.append((layer, layer, value))
    if len(runs) == 1:
        return runs[0][2]
    return "; ".join(
        f"layer {first}: {value}" if first == last else f"layers {first}-{last}: {value}"
        for first, last, value in runs
    )


def _with_name(name: str, value: str | None) -> str | None:
    return f"{name} ({value[:12]})" if name and value else value


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= 120 else value[:117] + "..."


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
    metadata, arrays = facts.as_metadata(token_ids), facts.arrays(num_tokens, len(state or b""))
    with written_tensor_file(file, metadata, arrays) as rows:
        if state is not None:
            rows.write(STATE, 0, slice(0, 1), memoryview(state))
        yield RowTier(facts.config, rows, headers, num_tokens)


class SnapshotFile(TensorFile):
    """A snapshot that was verified, and matches a model and a cache.

    Attributes:
        token_ids: of its K/V.
        is_foreign: whether its K/V may differ from those that would be computed here: the file
            states no origin or another one, such as another version of MLX.

    Raises:
        SnapshotError: as :func:`load_snapshot`.
    """

    def __init__(self, path: str | Path, facts: KVFacts):
        super().__init__(check_path(path))
        self._facts = facts
        facts.check(self.file, self.metadata)
        self.verify()
        self.token_ids = token_ids_of(self.file, self.metadata)
        is_stated = self.metadata.get("version") == VERSION and COMPUTED_BY in self.metadata
        self.is_foreign = not is_stated or self.metadata[COMPUTED_BY] != facts.computed_by
        state = self.arrays.get(STATE)
        expected = facts.arrays(len(self.token_ids), 0 if state is None else state.nbytes)
        has_state = facts.config.state_nbytes > 0
        if self.arrays != expected or has_state != (state is not None):
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
        if STATE not in self.arrays:
            return None
        try:
            content = self.read(STATE, 0, slice(0, 1))
            return state_from_bytes(content, self._facts.config.state_layout)
        except ValueError as error:
            raise SnapshotError(self.file, f"holds no state for this cache: {error}") from error

    def tier(self, headers: Sequence[BlockHeader]) -> Tier:
        """Its blocks, under the keys of these headers."""
        return RowTier(self._facts.config, self, headers, len(self.token_ids))
