"""The identity of a model by its content: only the model that made K/V may use stored ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlx_paged.argument_values import is_plain_integer
from mlx_paged.models.array_digests import NOTHING_KNOWN, KnownDigests, array_digests
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.models.mlx_lm import check_model

KV_VERSION = 2
"""The version of the code that computes K/V: increase it when a model's K/V change. Snapshots of
another version are refused; see also ``block_store.STORED_KV_VERSION``.
"""

# Attributes that do not affect what a model computes.
_UNRELATED = {"name", "description", "_training"}


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


def model_identity(model: Module, known: KnownDigests = NOTHING_KNOWN) -> ModelIdentity:
    """The identity of a model that :func:`mlx_paged.load` returned, adapters included.

    It covers every array of the model, every plain value of its modules (such as the base of RoPE,
    which is in no weight), and the version of the code that runs it.

    Args:
        known: see :func:`array_digests`.

    Raises:
        ValueError: not a model of :func:`mlx_paged.load`.
    """
    checked = check_model(model)
    total = hashlib.sha256(json.dumps(_code_of(checked)).encode())
    for path, module in sorted(checked.named_modules(), key=lambda pair: pair[0]):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        total.update(json.dumps([path, kind, _plain_values(module)], sort_keys=True).encode())
    leaves = sorted(dict(tree_flatten(checked)).items())
    arrays = {name: leaf for name, leaf in leaves if isinstance(leaf, mx.array)}
    digests = array_digests(list(arrays.values()), known)
    for (name, array), digest in zip(arrays.items(), digests, strict=True):
        total.update(f"{name} {array.shape} {array.dtype}".encode() + b"\0" + digest)
    return ModelIdentity(total.hexdigest(), checked.name or model_type_of(checked))


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


def identities_of(
    model: Module, draft_model: Module | None = None, known: KnownDigests = NOTHING_KNOWN
) -> list[ModelIdentity]:
    """The identities of all models with K/V in a cache, the model first."""
    models = [model] if draft_model is None else [model, draft_model]
    return [model_identity(each, known) for each in models]


def _code_of(model: Module) -> list[str]:
    code = [f"mlx_paged {KV_VERSION}"]
    if any(type(module).__module__.startswith("mlx_lm.") for module in model.modules()):
        code.append(f"mlx_lm {mlx_lm.__version__}")
    return code


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
