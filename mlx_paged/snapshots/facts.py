"""``KVFacts``: what K/V depend on, and whether a file matches a cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_paged.argument_values import is_plain_integer
from mlx_paged.cache import KVCache, KVCacheConfig, PagedKVCache
from mlx_paged.core import Retention
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.models.identity import ModelIdentity
from mlx_paged.ops import dtype_name
from mlx_paged.snapshots.errors import SnapshotError
from mlx_paged.snapshots.rows import num_kept_tokens, parts_of, retention_of
from mlx_paged.snapshots.tensor_file import TensorInfo

FORMAT = "mlx_paged.snapshot"
VERSION = "2"
_READABLE = ("1", VERSION)
COMPUTED_BY = "computed_by"
STATE = "state"  # name of the array with the bytes of the recurrent state
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32"}


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

    def are_computed_here(self, metadata: Mapping[str, str]) -> bool:
        """Whether a file that matches states that its K/V are what is computed here."""
        is_stated = metadata.get("version") == VERSION and COMPUTED_BY in metadata
        return is_stated and metadata[COMPUTED_BY] == self.computed_by

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

    def tensors(self, num_tokens: int, state_nbytes: int = 0) -> dict[str, TensorInfo]:
        """The arrays of a file with this many tokens and a state of this many bytes."""
        tensors = {}
        for layer, spec in enumerate(self.config.layers):
            num_kept = num_kept_tokens(self.config, layer, num_tokens)
            for part in parts_of(self.config, layer):
                code = _DTYPES[dtype_name(part.dtype)]
                shape = (spec.num_kv_heads, num_kept, part.width)
                tensors[part.name] = TensorInfo(code, shape)
        if state_nbytes:
            tensors[STATE] = TensorInfo("U8", (1, 1, state_nbytes))
        return tensors


def check_has_blocks(cache: KVCache) -> PagedKVCache:
    """The cache, if it is a paged one; raises ``ArgumentError`` otherwise."""
    if not isinstance(cache, PagedKVCache):
        raise ArgumentError(
            f"[snapshot] snapshots and prompt caches need blocks, which kv={cache.kind!r} does not "
            "have; use kv='paged'",
            "kv",
        )
    return cache


def check_keeps_kv_alone(cache: KVCache) -> None:
    """Raise ``ArgumentError`` if the model of a cache has a recurrent state."""
    if cache.config.state_nbytes:
        raise ArgumentError(
            "[snapshot] the model keeps a recurrent state beside K/V, and mlx-lm's prompt caches "
            "are exchanged without it; use a snapshot",
            "model",
        )


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
