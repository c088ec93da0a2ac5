"""The LoRA adapters of an engine: their folders, and which of them are loaded. They run in one
packed step (:mod:`mlx_paged.models.adapted_layers`), without a second copy of the model's weights.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from mlx_paged.errors import (
    AdapterError,
    AdaptersInUseError,
    one_line,
    shown,
    system_reason,
)
from mlx_paged.models.adapted_layers import AdaptedLayer, Matrices, sizes_of, wrapper_of
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.ops import device
from mlx_paged.options.config import DEFAULT_ADAPTER_RANK
from mlx_paged.request import NAME

T = TypeVar("T")

# What a file may have besides its matrices: the header of its safetensors.
HEADER_NBYTES = 2**22
_OF_MLX_LM = re.compile(r"(.+)\.lora_([ab])")
_OF_PEFT = re.compile(r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")

# The files of an adapter


@dataclass(frozen=True, eq=False)
class AdapterFiles:
    """An adapter as its folder has it.

    Attributes:
        name: by which requests choose it.
        layers: its matrices, evaluated, by the names of layers in the file.
    """

    name: str
    folder: Path
    layers: Mapping[str, Matrices]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of its matrices and scales."""
        total = hashlib.sha256(b"lora 2")
        for path, (a, b, scale) in sorted(self.layers.items()):
            text = f"{path} {scale!r} {a.shape} {a.dtype} {b.shape} {b.dtype}"
            total.update(text.encode() + b"\0")
            for array in (a, b):
                flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
                total.update(np.array(flat, copy=False).data)
        return total.digest()

    @property
    def rank(self) -> int:
        """The largest one of its layers."""
        return max(each.a.shape[1] for each in self.layers.values())

    @classmethod
    def read(cls, name: str, folder: Path | str, max_nbytes: int) -> AdapterFiles:
        """Read a folder of mlx-lm's, with ``adapters.safetensors``, or of PEFT's, with
        ``adapter_model.safetensors``.

        Args:
            max_nbytes: of the file.

        Raises:
            AdapterError: the folder can't be read, or the adapter is of another kind than LoRA.
        """
        folder = Path(folder).expanduser()
        config_file = folder / "adapter_config.json"
        try:
            if config_file.stat().st_size > HEADER_NBYTES:
                raise ValueError(f"{config_file.name} has more than {HEADER_NBYTES:,} bytes")
            config = json.loads(config_file.read_text(encoding="utf-8-sig"))
            if not isinstance(config, dict):
                raise ValueError("it is not a JSON object")
            is_of_peft = "peft_type" in config
            scale = _scale_of_peft(config) if is_of_peft else _scale_of_mlx_lm(config)
            file = folder / ("adapter_model" if is_of_peft else "adapters")
            file = file.with_suffix(".safetensors")
            nbytes = file.stat().st_size
            if not file.is_file():
                raise ValueError(f"{file.name} is not a file")
            if nbytes > max_nbytes:
                raise ValueError(
                    f"{file.name} has {nbytes:,} bytes, and an adapter of this model has at most "
                    f"{max_nbytes:,}"
                )
            arrays: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
            layers = _layers_of(arrays, _OF_PEFT if is_of_peft else _OF_MLX_LM, scale)
            mx.eval([(each.a, each.b) for each in layers.values()])
        except OSError as error:
            where = Path(error.filename or config_file).name
            raise AdapterError(
                f"{where} of the adapter in {one_line(folder)} can't be read: "
                f"{system_reason(error)}"
            ) from error
        except (ValueError, RuntimeError, RecursionError) as error:
            raise AdapterError(
                f"the adapter in {one_line(folder)} can't be used: {one_line(error)}"
            ) from error
        return cls(name, folder, layers)


# The scale of a layer by its rank.
_Scale: TypeAlias = Callable[[int], float]


def _scale_of_mlx_lm(config: Mapping[str, Any]) -> _Scale:
    kind, params = config.get("fine_tune_type", "lora"), config.get("lora_parameters")
    if kind != "lora":
        raise ValueError(f"its fine_tune_type is {shown(kind)}, and only lora is supported")
    if not isinstance(params, dict) or not isinstance(params.get("scale"), int | float):
        raise ValueError("adapter_config.json has no number as scale of its lora_parameters")
    scale = float(params["scale"])
    return lambda rank: scale


def _scale_of_peft(config: Mapping[str, Any]) -> _Scale:
    if config["peft_type"] != "LORA":
        raise ValueError(f"its peft_type is {shown(config['peft_type'])}, and only LORA is known")
    for name in ("use_dora", "alpha_pattern", "fan_in_fan_out", "modules_to_save"):
        if config.get(name):
            raise ValueError(f"its {name} is {shown(config[name])}, which is not supported")
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float):
        raise ValueError("adapter_config.json has no number as lora_alpha")
    power = 0.5 if config.get("use_rslora") else 1.0
    return lambda rank: float(alpha / rank**power)


def _layers_of(
    arrays: Mapping[str, mx.array], pattern: re.Pattern[str], scale: _Scale
) -> dict[str, Matrices]:
    """The matrices of each layer.

    Raises:
        ValueError: an array is none, or belongs to none.
    """
    pairs: dict[str, dict[str, mx.array]] = {}
    for name, array in arrays.items():
        found = pattern.fullmatch(name)
        if found is None:
            dora = "; DoRA is not supported" if name.endswith((".m", "magnitude_vector")) else ""
            raise ValueError(f"{shown(name)} is not a matrix of LoRA{dora}")
        pairs.setdefault(found[1], {})[found[2].lower()] = array
        if array.ndim != 2:
            raise ValueError(
                f"{shown(name)} has the shape {[*array.shape]}; the layers of experts, and others "
                "with more than two dimensions, are not supported"
            )
        if not mx.issubdtype(array.dtype, mx.floating):
            raise ValueError(f"{shown(name)} is of type {array.dtype}")
    layers = {}
    for path, pair in pairs.items():
        if len(pair) < 2:
            raise ValueError(f"{shown(path)} has only one of its two matrices")
        a, b = pair["a"], pair["b"]
        if pattern is _OF_PEFT:
            a, b = mx.contiguous(a.T), mx.contiguous(b.T)
        if a.shape[1] != b.shape[0] or not a.shape[1]:
            raise ValueError(
                f"the matrices of {shown(path)} have the shapes {[*a.shape]} and {[*b.shape]}"
            )
        layers[path] = Matrices(a, b, scale(a.shape[1]))
    if not layers:
        raise ValueError("it has no matrices")
    return layers


# The adapters of an engine


class Place(NamedTuple):
    """Where a layer is: ``parent[key]``."""

    parent: Any
    key: Any
    layer: Module


class KnownAdapter(NamedTuple):
    """An adapter that requests may choose, loaded or not: its folder, and the digest of its files
    when they were read first.
    """

    folder: Path
    digest: bytes


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter.

    Attributes:
        digest: SHA-256 of everything that it adds to the model, which is hashed with each block.
        slot: in the stacks.
    """

    name: str
    folder: Path
    rank: int
    digest: bytes
    slot: int


class Adapters:
    """The adapters of one engine, on modules of its own: the caller's model is not changed.

    Args:
        model: that they belong to.
        folders: of the adapters that requests may choose, by name. All are read and checked.
        max_adapters: the most loaded ones; by default, the number of folders. 0: none can be.
        max_rank: of an adapter; by default ``DEFAULT_ADAPTER_RANK``, or the next power of two of
            the largest rank of the folders.

    Attributes:
        model: the model that has them; ``model`` itself if none can be loaded.
        known: the adapters that requests may choose, by name.
        first: those of them that :meth:`load` is to load at the start, the first ``max_adapters``.
        loaded: by name, the least recently used first.
        lock: of ``known`` and ``loaded``; held, too, while the engine takes on a request for one
            of them.

    Raises:
        AdapterError: a folder can't be read or does not fit the model; or a setting does not fit.
    """

    def __init__(
        self,
        model: LanguageModel,
        folders: Mapping[str, str | Path],
        max_adapters: int | None = None,
        max_rank: int | None = None,
    ):
        self.max_adapters = len(folders) if max_adapters is None else max_adapters
        self.lock = threading.Lock()
        self.known: dict[str, KnownAdapter] = {}
        self.loaded: dict[str, Adapter] = {}
        self.first: list[AdapterFiles] = []
        self.model, self.max_rank, self.nbytes = model, max_rank or DEFAULT_ADAPTER_RANK, 0
        self._slots: list[Adapter | None] = [None] * self.max_adapters
        self._places: dict[str, Place] = {}
        self._wrapped: dict[str, AdaptedLayer] = {}
        if not self.max_adapters:
            if folders:
                what = f"there is no room for {len(folders)} with max_adapters 0; raise it"
                raise AdapterError(what, "max_adapters")
            return
        if model.group is not None and model.group.size() > 1:
            raise AdapterError(
                "adapters can't be split over ranks; leave them out, or run one process"
            )
        self.model = _with_own_modules(model)
        root = self.model.get("inner", self.model)
        self._kinds = {path: type(module).__name__ for path, module in root.named_modules()}
        for path, place in _places_in(root):
            if wrapper_of(place.layer) is not None:
                self._places[path] = place
        self._dtype = mx.float32 if device.is_cpu() else model.dtype
        # Of any rank, to find out which there are.
        checked_rank = 2**20 if max_rank is None else max_rank
        for name, folder in folders.items():
            files = self.read(name, folder, max_rank=checked_rank)
            self.add(files)
            if max_rank is None and files.rank > self.max_rank:
                self.max_rank = 1 << (files.rank - 1).bit_length()
            if len(self.first) < self.max_adapters:
                self.first.append(files)
        self.nbytes = (self.max_adapters + 1) * self._nbytes_of_one(self.max_rank, self._dtype)
        self.model.adapter_nbytes = self.nbytes

    def _nbytes_of_one(self, rank: int, dtype: mx.Dtype) -> int:
        """Of an adapter that targets every layer."""
        num_rows = sum(sum(sizes_of(place.layer)) for place in self._places.values())
        return num_rows * rank * dtype.size

    def find(self, name: str) -> Adapter | None:
        """An adapter, which becomes the most recently used one; ``None`` if it is not loaded.

        Raises:
            AdapterError: there is none of this name.
        """
        with self.lock:
            if (adapter := self.loaded.get(name)) is not None:
                self.loaded = {**_without(name, self.loaded), name: adapter}
                return adapter
            if name in self.known:
                return None
            names = ", ".join(map(shown, self.known)) or "none"
        raise AdapterError(f"there is no adapter {shown(name)}; there are {names}")

    def is_loaded(self, adapter: Adapter | None) -> bool:
        """Whether what a request is to use is still there; ``None`` is the model alone. Called with
        the lock.
        """
        return adapter is None or self.loaded.get(adapter.name) is adapter

    def add(self, files: AdapterFiles) -> None:
        """Let requests choose an adapter.

        Raises:
            AdapterError: they can choose one of this name already.
        """
        with self.lock:
            if files.name in self.known:
                raise AdapterError(
                    f"there is an adapter {shown(files.name)} already; unload it first, or use "
                    "another name"
                )
            of_it = KnownAdapter(files.folder.absolute(), files.digest)
            self.known = {**self.known, files.name: of_it}

    def read(self, name: str, folder: str | Path, *, max_rank: int | None = None) -> AdapterFiles:
        """Read and check a folder, in any thread.

        Raises:
            AdapterError: it can't be read, or does not fit the model.
        """
        if NAME.read(name) is None:
            raise AdapterError(f"a name must be a text that is not empty, got {shown(name)}")
        if not isinstance(folder, str | Path):
            raise AdapterError(f"the folder of {shown(name)} must be a path, got {shown(folder)}")
        if not self.max_adapters:
            what = "this engine has no room for adapters; give it max_adapters"
            raise AdapterError(what, "max_adapters")
        max_rank = max_rank or self.max_rank
        max_nbytes = HEADER_NBYTES + self._nbytes_of_one(max_rank, mx.float32)
        files = AdapterFiles.read(name, folder, max_nbytes)
        layers = {self._path_of(path, files): each for path, each in files.layers.items()}
        if len(layers) < len(files.layers):
            raise AdapterError(f"the adapter in {one_line(files.folder)} targets a layer twice")
        for path, (a, b, _) in layers.items():
            what = f"{path} of the adapter in {one_line(files.folder)}"
            sizes = sizes_of(self._places[path].layer)
            if (a.shape[0], b.shape[1]) != sizes:
                raise AdapterError(
                    f"{what} is for {a.shape[0]} inputs and {b.shape[1]} outputs, and the "
                    f"model's layer has {sizes[0]} and {sizes[1]}"
                )
            if a.shape[1] > max_rank:
                raise AdapterError(
                    f"{what} has rank {a.shape[1]}, and max_adapter_rank is {max_rank}; raise it",
                    "max_adapter_rank",
                )
        return AdapterFiles(name, files.folder, layers)

    def read_again(self, name: str) -> AdapterFiles:
        """Read an adapter that requests may choose.

        Raises:
            AdapterError: there is none of this name; or its files can't be read any more, or have
                changed.
        """
        with self.lock:
            known = self.known.get(name)
        if known is None:
            raise AdapterError(f"the adapter {shown(name)} was unloaded")
        try:
            files = self.read(name, known.folder)
        except AdapterError as error:  # Its message has the folder, and this one is for anybody.
            raise AdapterError(f"the adapter {shown(name)} can't be loaded again") from error
        if files.digest != known.digest:
            raise AdapterError(
                f"the files of {shown(name)} have changed since it was loaded; unload it, and load "
                "it again"
            )
        return files

    def _path_of(self, path: str, files: AdapterFiles) -> str:
        """The path of a layer in the model, which may have further modules around it."""
        suffix = f".{path}"
        paths = [path] if path in self._kinds else []
        paths = paths or [each for each in self._kinds if each.endswith(suffix)]
        what = f"the adapter in {one_line(files.folder)} targets {shown(path)}"
        if len(paths) != 1:
            raise AdapterError(f"{what}, which the model does not have")
        if paths[0] not in self._places:
            raise AdapterError(
                f"{what}, a {self._kinds[paths[0]]}; adapters can target linear layers and "
                "embeddings"
            )
        return paths[0]

    def load(self, files: AdapterFiles, used: Callable[[], Iterable[Adapter | None]]) -> Adapter:
        """Load an adapter, between two steps, unless another thread has done so. If there are
        ``max_adapters``, it takes the place of the least recently used one.

        Args:
            used: returns those of unfinished requests, which are kept. Called with the lock.

        Raises:
            AdaptersInUseError: requests use all of them.
        """
        with self.lock:
            if (adapter := self.loaded.get(files.name)) is not None:
                return adapter
            slot = self._free_slot(set(used()))
        self._slots[slot - 1] = None
        for path in files.layers.keys() - self._wrapped.keys():
            parent, key, layer = self._places[path]
            kind = wrapper_of(layer)
            assert kind is not None
            wrapped = kind(layer, self.max_adapters + 1, self.max_rank, self._dtype)
            mx.eval(wrapped)
            parent[key] = self._wrapped[path] = wrapped
        for path, wrapped in self._wrapped.items():
            wrapped.put(slot, files.layers.get(path))
        # The rank and the dtype decide how products are rounded.
        digest = hashlib.sha256(f"{self.max_rank} {self._dtype} ".encode() + files.digest).digest()
        adapter = Adapter(files.name, files.folder, files.rank, digest, slot)
        with self.lock:
            self._slots[slot - 1] = adapter
            known = self.known.get(files.name)
            if known is not None and known.digest == files.digest:  # Neither unloaded nor replaced.
                self.loaded = {**self.loaded, files.name: adapter}
        return adapter

    def unload(self, name: str) -> None:
        """Refuse further requests for an adapter. Its slot is used again when the last request for
        it has ended.

        Raises:
            AdapterError: there is none of this name.
        """
        self.find(name)
        with self.lock:
            self.known, self.loaded = _without(name, self.known), _without(name, self.loaded)

    def _free_slot(self, running: Set[Adapter | None]) -> int:
        """A slot for another adapter, whose own one is no longer loaded. Called with the lock."""
        kept = {*running, *self.loaded.values()}
        for slot, adapter in enumerate(self._slots, 1):
            if adapter is None or adapter not in kept:
                return slot
        for name, adapter in self.loaded.items():
            if adapter not in running:
                self.loaded = _without(name, self.loaded)
                return adapter.slot
        raise AdaptersInUseError(
            f"requests use all of the {self.max_adapters} adapters that can be loaded; retry "
            "later, or raise max_adapters",
            "max_adapters",
        )


def _without(name: str, items: Mapping[str, T]) -> dict[str, T]:
    """A new dict, because other threads read the old one without the lock."""
    return {each: item for each, item in items.items() if each != name}


def _with_own_modules(model: LanguageModel) -> LanguageModel:
    """A copy of the modules of a model, which share the arrays of the original ones."""
    copies: dict[int, Any] = {}

    def copied(node: Any) -> Any:
        if isinstance(node, mx.array) or not isinstance(node, dict | list | tuple):
            return node
        if id(node) not in copies:
            if isinstance(node, dict):
                copies[id(node)] = new = copy.copy(node)
                dict.update(new, {key: copied(child) for key, child in node.items()})
            else:
                copies[id(node)] = type(node)(map(copied, node))
        return copies[id(node)]

    own: LanguageModel = copied(model)
    return own


def _places_in(root: Module) -> Iterator[tuple[str, Place]]:
    """The path and the place of each module in a module."""
    pending: list[tuple[str, Any]] = [("", root)]
    while pending:
        prefix, node = pending.pop()
        children = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in list(children):
            path = f"{prefix}.{key}" if prefix else str(key)
            if isinstance(child, Module):
                yield path, Place(node, key, child)
            if isinstance(child, dict | list):
                pending.append((path, child))
