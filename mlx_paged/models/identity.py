"""What stored K/V belong to: the identity of a model by its content, and the fingerprint of the
blocks of a cache. The identity of a model that was just read from files is looked up by the state
of these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlx_paged.block_store import STORED_KV_VERSION, Fingerprint
from mlx_paged.block_store.directory import Directory, make_folder
from mlx_paged.block_store.layout import (
    WEIGHTS_NAME,
    BadBlockFileError,
    BlockStoreError,
    folder_path,
)
from mlx_paged.cache import LayerSpec, PagedKVCache
from mlx_paged.core import KEEP_ALL, Retention
from mlx_paged.models.language_model import LanguageModel, WeightFiles, model_type_of
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.options.argument_values import is_plain_integer

KV_VERSION = 2
"""The version of the code that computes K/V: increase it when a model's K/V change, or the weights
that are read from its files. Snapshots of another version are refused; see also
``block_store.STORED_KV_VERSION``.
"""

# Attributes that do not affect what a model computes.
_UNRELATED = {"name", "description", "loaded_from", "_training"}

# The piece of an array that one task hashes; large enough that the cost of a task is negligible.
PIECE_NBYTES = 64 * 2**20
# The most bytes of arrays that are hashed at once: strided ones are copied for it.
WINDOW_NBYTES = 2**30

# Of the digests that a folder keeps, by the state of files.
MAX_KNOWN = 64
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class ModelIdentity:
    """Attributes:
    digest: SHA-256 in hex of everything a model computes with, equal in all processes and for all
        copies of a folder.
    name: for messages: a folder's or a repository's name, or the model's type.
    """

    digest: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.digest[:12]})"


def model_identity(
    model: Module, catalogue: WeightCatalogue | None = None, files: WeightFiles | None = None
) -> ModelIdentity:
    """The identity of a model that :func:`mlx_paged.load` returned, adapters included.

    It covers every array of the model, every plain value of its modules (such as the base of RoPE,
    which is in no weight), and the version of the code that runs it. The arrays are evaluated and
    hashed, some 2 GB per second and core, unless the catalogue has the digest for their files.

    Args:
        catalogue: has the digests of earlier starts; a new one is added.
        files: of :func:`take_files`, if no array was written since.

    Raises:
        ValueError: not a model of :func:`mlx_paged.load`.
    """
    checked = check_model(model)
    name = checked.name or model_type_of(checked)
    leaves = sorted(dict(tree_flatten(checked)).items())
    arrays = {path: leaf for path, leaf in leaves if isinstance(leaf, mx.array)}
    described = _described(checked)
    key = None
    if catalogue is not None and files is not None:
        mx.eval(list(arrays.values()))  # What is lazy is read from the files.
        layout = [f"{path} {array.shape} {array.dtype}" for path, array in arrays.items()]
        key = files.key(*described, *layout) if files.are_unchanged() else None
        if key is not None and (known := catalogue.load(key)) is not None:
            return ModelIdentity(known, name)
    total = hashlib.sha256("".join(described).encode())
    digests = array_digests(list(arrays.values()))
    for (path, array), digest in zip(arrays.items(), digests, strict=True):
        total.update(f"{path} {array.shape} {array.dtype}".encode() + b"\0" + digest)
    identity = ModelIdentity(total.hexdigest(), name)
    if catalogue is not None and key is not None:
        catalogue.store(key, identity.digest)
    return identity


def model_name(path: Path) -> str:
    """The name of the model at ``path``: the id of a repository in the hub's cache, or the name of
    the folder or file.
    """
    repository, is_snapshot = path.parent.parent.name, path.parent.name == "snapshots"
    if is_snapshot and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.resolve().name


def may_be_called(model: LanguageModel, given: str) -> bool:
    """Whether another program may have been given this model as ``given``: a path, or the id of a
    repository. A path that exists has to be that of the model, and an id that of its repository. In
    all other cases the last parts of the names are compared, because folders are moved and copied.
    A model without a name may be any.
    """
    if not model.name:
        return True
    path = Path(given)
    names = {path.name}
    # It may be too long, contain a null byte or begin with the home of an unknown user.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        path = path.expanduser()
        if path.exists() and model.path is not None and model.path.exists():
            return path.samefile(model.path)
        names.add(model_name(path).rpartition("/")[2])
    is_id = given.count("/") == 1 and not path.is_absolute() and not given.startswith((".", "~"))
    if is_id and "/" in model.name:
        return model.name == given
    return model.name.rpartition("/")[2] in names


def take_files(model: LanguageModel) -> WeightFiles | None:
    """The files of a model that was read for an engine, the first time; ``None`` afterwards, since
    its weights may be written.
    """
    files, model.loaded_from = model.loaded_from, None
    return files


def identities_of(model: Module, draft_model: Module | None = None) -> list[ModelIdentity]:
    """The identities of all models with K/V in a cache, the model first."""
    models = [model] if draft_model is None else [model, draft_model]
    return [model_identity(each) for each in models]


def _described(model: Module) -> list[str]:
    """Everything but the arrays: the code, and the modules with their plain values."""
    modules = sorted(model.named_modules(), key=lambda pair: pair[0])
    kinds = [f"{type(module).__module__}.{type(module).__qualname__}" for _, module in modules]
    code = [f"mlx_paged {KV_VERSION}"]
    if any(kind.startswith("mlx_lm.") for kind in kinds):
        code.append(f"mlx_lm {mlx_lm.__version__}")
    return [json.dumps(code)] + [
        json.dumps([path, kind, _plain_values(module)], sort_keys=True)
        for (path, module), kind in zip(modules, kinds, strict=True)
    ]


def _plain_values(module: Module) -> dict[str, Any]:
    values = {name: _plain(value) for name, value in vars(module).items()}
    return {
        name: value
        for name, value in values.items()
        if value is not NotImplemented and name not in _UNRELATED
    }


def _plain(value: Any) -> Any:
    """The value as JSON; ``NotImplemented`` for anything that JSON can't represent."""
    if is_dataclass(value) and not isinstance(value, type):
        # Not asdict(), which copies what it holds: a module with RoPE scaling can't be copied so.
        return _plain({field.name: getattr(value, field.name) for field in fields(value)})
    if value is None or isinstance(value, str | bool | float) or is_plain_integer(value):
        return value
    if isinstance(value, dict):
        items = {str(key): _plain(each) for key, each in value.items()}
        return {key: each for key, each in items.items() if each is not NotImplemented}
    if isinstance(value, list | tuple):
        return [each for each in map(_plain, value) if each is not NotImplemented]
    return NotImplemented


class WeightCatalogue:
    """The digests of models by the versions of their files, next to the blocks in a folder. Several
    processes may use it at once: files are replaced atomically, and the last one counts. Failures
    are ignored, and any of the files may be deleted.

    Args:
        folder: of blocks; made when something is stored.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder_path(folder)

    def load(self, key: str) -> str | None:
        """The digest stored under a key, which is hexadecimal; ``None`` if there is none."""
        with contextlib.suppress(OSError, BadBlockFileError):
            folder = Directory.at(self._folder).folder(WEIGHTS_NAME)
            digest = folder.read(key).decode(errors="replace")
            folder.set_time(key, time.time_ns())
            return digest if _DIGEST.fullmatch(digest) else None
        return None

    def store(self, key: str, digest: str) -> None:
        """Store a digest. The ``MAX_KNOWN`` most recently used ones are kept."""
        with contextlib.suppress(OSError, BlockStoreError):
            make_folder(self._folder)
            folder = Directory.at(self._folder).make_folder(WEIGHTS_NAME)
            folder.write_atomically(key, [digest.encode()])
            entries = folder.entries()
            folder.remove_abandoned(entries)
            # Earlier versions kept the digests of tensors there.
            ours = [each for each in entries if _DIGEST.fullmatch(each[0].removesuffix(".json"))]
            for name, _ in sorted(ours, key=lambda each: each[1].st_mtime_ns)[:-MAX_KNOWN]:
                folder.remove(name)


# The bytes of arrays


def array_digests(arrays: Sequence[mx.array]) -> list[bytes]:
    """For each array the concatenated SHA-256 digests of its 64 MiB pieces. The arrays are
    evaluated, and hashed with one thread per core.
    """
    distinct = {id(array): array for array in arrays}  # Tied weights are one array.
    digests = dict(zip(distinct, _hashed(list(distinct.values())), strict=True))
    return [digests[id(array)] for array in arrays]


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


# Blocks


def fingerprint_of(
    cache: PagedKVCache, identity: Sequence[ModelIdentity], matmul: str = ""
) -> Fingerprint:
    """What the bytes of a block depend on besides its tokens.

    Args:
        matmul: of :func:`code_of`.
    """
    config = cache.config
    layers = tuple(
        f"group {index}: {_spec(config.layers[layer])}, {_kept(group.retention)}"
        for index, group in enumerate(config.groups)
        for layer in group.layers
    )
    layers += tuple(f"state {index}: {text}" for index, text in enumerate(config.state_layout))
    digests = "\n".join(each.digest for each in identity)
    formats = dict.fromkeys(str(spec.format) for spec in config.layers)
    return Fingerprint(
        model=hashlib.sha256(digests.encode()).hexdigest(),
        model_name=" + ".join(each.name for each in identity),
        layers=layers,
        kv_format=", ".join(formats),
        block_size=config.block_size,
        code=code_of(cache, matmul),
    )


def code_of(cache: PagedKVCache, matmul: str = "") -> str:
    """The code that computes and stores K/V: the version of what is stored, that of MLX, the
    backend, the device and the matmul. They differ in rounding, and an answer must be the same as
    if it were computed here.

    Args:
        matmul: ``Matmul.computed_by``; empty for MLX's own.
    """
    computer = f"{cache.backend.name} backend on a {mx.default_device().type.name}"
    if matmul:
        computer += f", matmul {matmul}"
    return f"mlx_paged {STORED_KV_VERSION}, mlx {version('mlx')}, {computer}"


def _spec(spec: LayerSpec) -> str:
    window = "" if spec.window is None else f", window {spec.window}"
    widths = f"K {spec.key_dim} and V {spec.value_dim} wide"
    return f"{spec.num_kv_heads} heads, {widths}{window}, {spec.format.description}"


def _kept(retention: Retention) -> str:
    return "all tokens" if retention == KEEP_ALL else str(retention)
