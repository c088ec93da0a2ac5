"""mlx-lm's prompt caches: export and import of ``mlx_lm.models.cache.save_prompt_cache`` files.

The conversion is exact, so both sides continue with the tokens that they would have generated
themselves. Everything else is refused by name: windows that have wrapped in mlx-lm's cache, K/V of
4 bits (whose keys are rotated here), different bits for K and V, other group sizes, recurrent
states, and models whose layers have several caches each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import (
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)

from mlx_paged.block_store.directory import replaced_file
from mlx_paged.cache import KVCache as Cache
from mlx_paged.cache import KVCacheConfig, KVFormat, Sequences
from mlx_paged.core.tier import BlockHeader, Tier
from mlx_paged.errors import ArgumentError, one_line, shown
from mlx_paged.models.identity import may_be_called
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.ops import affine_name, dtype_name
from mlx_paged.request import SeqId
from mlx_paged.snapshots.rows import (
    HostRows,
    RowTier,
    SnapshotError,
    arrays_of,
    check_path,
    names_of,
    retention_of,
    sequence_headers,
    system_errors,
)
from mlx_paged.snapshots.snapshots import (
    check_has_blocks,
    check_sequence,
    is_snapshot,
    load_sequence,
    store_sequence,
    token_ids_of,
)

_MODEL = "model"
_TOKENIZER_CONFIG = "tokenizer_config"
_TOKEN_IDS = "token_ids"


def export_prompt_cache(
    path: str | Path,
    model: Module,
    sequences: Sequences,
    seq: SeqId,
    *,
    model_name: str | None = None,
    token_ids: Sequence[int] | None = None,
) -> int:
    """Write the K/V of a sequence as mlx-lm's own prompt cache; returns their number of tokens.

    ``mlx_lm.models.cache.load_prompt_cache`` reads it, and ``mlx_lm.generate
    --prompt-cache-file``. A file of that name is replaced.

    Args:
        path: the file; it has to end with ``.safetensors``, by which mlx-lm recognises the format.
        model_name: the model's folder or hub id, which ``mlx_lm.generate`` loads and compares; by
            default the name by which it was loaded.
        token_ids: of the sequence; stored in the file's metadata, which mlx-lm keeps and
            :func:`import_prompt_cache` reads.

    Raises:
        KeyError: there is no such sequence.
        ArgumentError: tokens have left the window, or mlx-lm's caches can't represent these K/V.
        SnapshotError: the file can't be written; an existing one is unchanged.
    """
    cache = check_has_blocks(sequences.cache)
    num_tokens = check_sequence(sequences, seq, token_ids)
    headers = sequence_headers(cache.config, num_tokens)
    with written_prompt_cache(
        path, model, cache, num_tokens, headers, model_name, token_ids
    ) as tier:
        store_sequence(sequences, seq, tier, headers)
    return num_tokens


def import_prompt_cache(
    path: str | Path,
    model: Module,
    sequences: Sequences,
    seq: SeqId,
    *,
    allow_other_model: bool = False,
) -> int:
    """Replace the contents of a sequence by the K/V of one of mlx-lm's prompt caches; returns the
    number of tokens.

    Args:
        allow_other_model: use the file even if it names another model than this one.

    Raises:
        SnapshotError: the file can't be read, is not a prompt cache, names another model, or its
            layers, dtype or format don't match, which are named.
        ArgumentError: the model has a recurrent state, or the cache keeps a ``window`` of a model
            that attends to all tokens.
        CacheFullError: the K/V exceed the budget.
    """
    cache = check_has_blocks(sequences.cache)
    file = PromptCacheFile(path, model, cache, allow_other_model)
    headers = sequence_headers(cache.config, file.num_tokens)
    load_sequence(sequences, seq, file.num_tokens, file.tier(headers), headers)
    return file.num_tokens


@contextmanager
def written_prompt_cache(
    path: str | Path,
    model: Module,
    cache: Cache,
    num_tokens: int,
    headers: Sequence[BlockHeader],
    model_name: str | None,
    token_ids: Sequence[int] | None,
) -> Iterator[Tier]:
    """Write a prompt cache of mlx-lm's from the blocks that the body stores in the tier. Raises as
    :func:`export_prompt_cache`.
    """
    file, checked = check_path(path), check_model(model)
    if file.suffix != ".safetensors":
        raise SnapshotError(
            file, "must end with .safetensors, by which mlx-lm recognises the format"
        )
    stock = _stock_caches(checked, cache)
    for _, layer in stock:
        retention = None if layer is None else retention_of(cache.config, layer)
        if retention and (retention.cuts_runs or retention.primary is not None):
            raise ArgumentError(
                "[snapshot] window: mlx-lm has no cache for a window with sinks", "window"
            )
    rows = HostRows(arrays_of(cache.config, num_tokens))
    yield RowTier(cache.config, rows, headers, num_tokens)
    filled = [
        empty if layer is None else _filled(empty, cache.config, layer, rows, num_tokens)
        for empty, layer in stock
    ]
    metadata = {_MODEL: model_name or checked.name or "", _TOKENIZER_CONFIG: "{}"}
    if token_ids is not None:
        metadata[_TOKEN_IDS] = json.dumps(list(token_ids))
    with system_errors(file, "written"), replaced_file(file) as stream:
        save_prompt_cache(cast(Any, stream), filled, metadata)  # or whatever MLX writes to


def _stock_caches(model: LanguageModel, cache: Cache) -> list[tuple[Any, int | None]]:
    if cache.config.state_nbytes:
        raise ArgumentError(
            "[snapshot] the model keeps a recurrent state beside K/V, and mlx-lm's prompt caches "
            "are exchanged without it; use a snapshot",
            "model",
        )
    stock = model.stock_caches()
    layers = [layer for _, layer in stock if layer is not None]
    if len(layers) != len(cache.config.layers):
        # A draft model adds layers, and a layer of some models has several caches.
        raise ArgumentError(
            f"[snapshot] mlx-lm's caches of this model hold {len(layers)} layers of K/V and this "
            f"cache {len(cache.config.layers)}: a draft model, or caches of several parts, can't "
            "be mapped",
            "model",
        )
    return stock


# To mlx-lm


def _filled(empty: Any, config: KVCacheConfig, layer: int, rows: HostRows, num_tokens: int) -> Any:
    """mlx-lm's cache of a layer, filled with its rows."""
    spec = config.layers[layer]
    parts = tuple(rows.get(name)[None] for name in names_of(config, layer))
    k, v = parts[: spec.format.key.num_parts], parts[spec.format.key.num_parts :]
    is_rotating = type(empty) is RotatingKVCache
    if is_rotating and not spec.format.is_as_computed:
        raise _unmapped(spec.format, "mlx-lm does not quantise layers with a window")
    try:
        quantisation = spec.format.stock_quantisation
    except ValueError as error:
        raise _unmapped(spec.format, str(error)) from None
    if is_rotating:
        return _rotating(empty, k[0], v[0], num_tokens)
    if quantisation is None:
        empty.keys, empty.values = k[0], v[0]
    else:
        empty = QuantizedKVCache(**quantisation)
        empty.keys, empty.values = k, v
    empty.offset = num_tokens
    return empty


def _rotating(empty: Any, k: mx.array, v: mx.array, num_tokens: int) -> Any:
    """A rotating cache with its newest rows in order, as after a prompt."""
    num_rows = min(num_tokens, empty.max_size)
    # The oldest row may have been dropped. It is never attended to: the next token overwrites it.
    missing = max(0, num_rows - k.shape[2])
    assert missing <= 1, "the rows that the next token attends to are kept"
    k, v = (
        mx.concatenate([mx.zeros_like(part[:, :, :missing]), part[:, :, -num_rows:]], axis=2)
        for part in (k, v)
    )
    empty.keys, empty.values, empty.offset, empty._idx = k, v, num_tokens, num_rows
    return empty


def _unmapped(form: KVFormat, why: str) -> ArgumentError:
    return ArgumentError(
        f"[snapshot] kv_format: K/V of {form} can't be exported: {why}", "kv_format"
    )


# From mlx-lm


class PromptCacheFile:
    """A prompt cache of mlx-lm's that matches the layers of a model and the formats of a cache.

    Attributes:
        num_tokens: number of tokens with K/V.
        token_ids: their ids; ``None`` if the file has none, as files of mlx-lm itself.
        is_foreign: always true: the file does not identify weights and versions.

    Raises:
        SnapshotError, ArgumentError: as :func:`import_prompt_cache`.
    """

    is_foreign = True

    def __init__(
        self, path: str | Path, model: Module, cache: Cache, allow_other_model: bool = False
    ):
        self.file, checked = check_path(path), check_model(model)
        self._stock = _stock_caches(checked, cache)
        self._config = cache.config
        if any(retention.cuts_runs for retention in cache.config.retentions):
            raise ArgumentError(
                "[snapshot] window: mlx-lm computes K/V with attention to all tokens, which differ "
                "from those within a window; leave window out",
                "window",
            )
        self._caches, self.metadata = read_prompt_cache(self.file)
        named = self.metadata.get(_MODEL)
        if named and not allow_other_model and not may_be_called(checked, named):
            raise SnapshotError(
                self.file,
                f"was made with the model {shown(named)}, and this one is {checked.name}; if they "
                "are the same, allow it with allow_other_model=True",
            )
        if len(self._caches) != len(self._stock):
            raise SnapshotError(
                self.file,
                f"has caches of {len(self._caches)} layers, and the model has {len(self._stock)}",
            )
        used = [
            (each, layer)
            for each, (_, layer) in zip(self._caches, self._stock, strict=True)
            if layer is not None
        ]
        for each, layer in used:
            self._check(each, layer)
        lengths = {int(each.offset) for each, _ in used}
        if len(lengths) != 1 or min(lengths) < 1:
            raise SnapshotError(self.file, f"has layers of {sorted(lengths)} tokens")
        (self.num_tokens,) = lengths
        self.token_ids: list[int] | None = None
        if _TOKEN_IDS in self.metadata:
            self.token_ids = token_ids_of(self.file, self.metadata)
            self.check_token_ids(self.token_ids)

    def __repr__(self) -> str:
        return f"PromptCacheFile({str(self.file)!r}, {self.num_tokens:,} tokens)"

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Raise ``ArgumentError`` unless there is one token id for each token."""
        if len(token_ids) != self.num_tokens:
            raise ArgumentError(
                f"[snapshot] {self.file} holds K/V of {self.num_tokens} tokens, and token_ids are "
                f"{len(token_ids)}",
                "token_ids",
            )

    def _check(self, held: Any, layer: int) -> None:
        spec, form = self._config.layers[layer], self._config.layers[layer].format
        kinds = (KVCache, ConcatenateKVCache, RotatingKVCache, QuantizedKVCache)
        if type(held) not in kinds or held.keys is None:
            kind = "nothing" if getattr(held, "keys", 0) is None else f"a {type(held).__name__}"
            raise SnapshotError(self.file, f"has {kind} in layer {layer}, which can't be mapped")
        if type(held) is RotatingKVCache and not held._idx == held.offset <= held.keys.shape[2]:
            raise SnapshotError(
                self.file,
                f"has {held.offset} tokens in layer {layer} and keeps the last {held.max_size}; "
                "make it again from fewer tokens or without max_kv_size",
            )
        stored = _stored_as(held)
        if stored != str(form):
            raise SnapshotError(
                self.file, f"holds K/V of {stored} in layer {layer}, and this cache {form}"
            )
        if form.rotates_keys:
            raise SnapshotError(
                self.file, f"holds K/V of {stored}, whose keys are rotated here, and not by mlx-lm"
            )
        for name, parts, width in (
            ("K", held.keys, spec.key_dim),
            ("V", held.values, spec.value_dim),
        ):
            rows = form.key if name == "K" else form.value
            wanted = rows.part_shapes(width)
            for part, (part_width, dtype) in zip(_parts(parts), wanted, strict=True):
                shape, heads = list(part.shape), spec.num_kv_heads
                is_of_layer = shape[:2] == [1, heads] and shape[3:] == [part_width]
                if not is_of_layer or shape[2] < held.offset or part.dtype != dtype:
                    raise SnapshotError(
                        self.file,
                        f"has {name} of shape {shape} and {part.dtype} in layer {layer}, and the "
                        f"model has {heads} KV heads of {width} numbers stored as {form}",
                    )

    def tier(self, headers: Sequence[BlockHeader]) -> Tier:
        """Its blocks, under the keys of these headers.

        Raises:
            SnapshotError: the file can't be read.
        """
        rows = HostRows(arrays_of(self._config, self.num_tokens, has_all=True))
        for held, (_, layer) in zip(self._caches, self._stock, strict=True):
            if layer is None:
                continue
            parts = [*_parts(held.keys), *_parts(held.values)]
            for name, part in zip(names_of(self._config, layer), parts, strict=True):
                try:
                    rows.put(name, part[0])
                except Exception as error:  # MLX reads the file lazily
                    raise _unreadable(self.file, error) from error
        return RowTier(self._config, rows, headers, self.num_tokens)


class PrefixFacts(NamedTuple):
    """What a file with the K/V of a prefix says before a model is loaded.

    Args:
        is_snapshot: whether it is a snapshot, whose model is compared when it is read, and not a
            prompt cache of mlx-lm's.
        model: the name of the model, as it was given to mlx-lm.
        tokenizer_config: replaces fields of the model's ``tokenizer_config.json``.
    """

    file: Path
    is_snapshot: bool = True
    model: str | None = None
    tokenizer_config: Mapping[str, Any] = {}

    @classmethod
    def read(cls, path: str) -> PrefixFacts:
        """Raises :class:`SnapshotError` unless the file is a snapshot, or a prompt cache of
        mlx-lm's with token ids.
        """
        file = check_path(path)
        if is_snapshot(file):
            return cls(file)
        _, metadata = read_prompt_cache(file)
        if _TOKEN_IDS not in metadata:
            raise SnapshotError(
                file,
                "does not contain the ids of its tokens, like all prompt caches that mlx-lm makes; "
                "give its text as the first message, and --cache-dir to keep the K/V",
            )
        try:
            config = json.loads(metadata.get(_TOKENIZER_CONFIG, "{}"))
            if not isinstance(config, dict):
                raise ValueError(f"{shown(config)} is not a mapping")
        except (ValueError, RecursionError) as error:
            raise SnapshotError(
                file, f"has a tokenizer_config that can't be read: {error}"
            ) from error
        # A file must not be able to allow the execution of code.
        config.pop("trust_remote_code", None)
        return cls(file, False, metadata.get(_MODEL) or None, config)


def read_prompt_cache(file: Path) -> tuple[list[Any], dict[str, str]]:
    """Read a file by mlx-lm's ``load_prompt_cache``; returns its caches and its metadata.

    Raises:
        SnapshotError: it can't be read, or is not a prompt cache.
    """
    with system_errors(file, "read"), file.open("rb"):
        pass  # to report the system's own error
    try:
        caches, metadata = load_prompt_cache(str(file), return_metadata=True)
        return list(caches), dict(metadata)
    except Exception as error:  # for a broken file, its readers may raise anything
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> SnapshotError:
    return SnapshotError(file, f"is not one of mlx-lm's prompt caches: {one_line(error)}")


def _parts(parts: Any) -> tuple[mx.array, ...]:
    return tuple(parts) if isinstance(parts, list | tuple) else (parts,)


def _stored_as(held: Any) -> str:
    """The name that the format of one of mlx-lm's caches has here."""
    dtype = dtype_name(_parts(held.keys)[-1].dtype)
    if type(held) is not QuantizedKVCache:
        return dtype
    return affine_name(held.bits, held.group_size)
