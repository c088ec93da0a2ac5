"""The folder of a model: finding or downloading it, and reading its JSON files."""

from __future__ import annotations

import codecs
import difflib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_paged.errors import ArgumentError, one_line, shown

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
UTF_8 = "utf-8-sig"  # with a byte order mark, which editors on Windows write, or without
# What users type for a model elsewhere: an address on the hub, a path that does not exist.
_HUB_ADDRESS = re.compile(r"(https://)?(huggingface\.co|hf\.co)/(?P<id>[\w.-]+/[\w.-]+)\S*")
_LIKE_A_PATH = re.compile(r"(\.\.?|~|/\S+)/\S+")
GGUF_SUFFIX = ".gguf"
DEMO = "demo"  # the name of the bundled model, where there is no such folder
_MODEL_FILES = [
    "*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl",
    "*.jinja", "mtp.safetensors", "mtp/*.safetensors",
]  # fmt: skip


class LoadError(ArgumentError):
    """The model is missing, broken or not supported; the message is one line with the way out."""


@contextmanager
def load_errors(what: str) -> Iterator[None]:
    """Turn any error inside the context into a :class:`LoadError`.

    Args:
        what: says what is wrong; the text of the error follows it.
    """
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        # Libraries raise anything for a broken file or a network failure; to the user all are the
        # same.
        raise LoadError(f"[load] {what}: {one_line(error)}") from error


def demo_model_path() -> Path:
    """The folder of the bundled demo model."""
    return Path(str(files("mlx_paged"))) / "demo_model"


def find_model(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """The path of a model: a local folder, a GGUF file, or the folder of a repository on the hub,
    which is downloaded once.

    Raises:
        LoadError: it is not found.
    """
    path = _local(path_or_hf_repo)
    if path is None and str(path_or_hf_repo).lower().endswith(GGUF_SUFFIX):
        raise LoadError(f"[load] no file {one_line(repr(str(path_or_hf_repo)))}")
    if path is None:
        return _downloaded(str(path_or_hf_repo), revision, _MODEL_FILES)
    if path.is_file() and path.suffix.lower() != GGUF_SUFFIX:
        raise LoadError(
            f"[load] {path} is a file; give the folder that holds config.json and "
            "model*.safetensors, or a .gguf file"
        )
    return path


def pull(repo: str, revision: str | None = None) -> Path:
    """The folder of a repository on the hub, given as its id or its address, with everything
    downloaded that was missing.

    Raises:
        LoadError: there is no such repository, it can't be had, or it has no weights of a model.
    """
    if _local(repo) is not None:
        raise LoadError(f"[load] {shown(repo)} is on this machine already, and not from the hub")
    address = _HUB_ADDRESS.fullmatch(repo)
    folder = _downloaded(address["id"] if address else repo, revision, _MODEL_FILES)
    if not _has_all_weights(folder):
        raise LoadError(
            f"[load] {shown(repo)} has no model*.safetensors; a GGUF file of it is downloaded with "
            "hf download REPO FILE, and given by its path"
        )
    return folder


def find_local_model(path_or_hf_repo: str | Path, revision: str | None = None) -> Path | None:
    """As :func:`find_model`, without a download: ``None`` for a repository that is not on this
    machine, or only in part.

    Raises:
        LoadError: it is neither a local model nor the id of a repository.
    """
    repo = str(path_or_hf_repo)
    if _local(repo) is not None or not _HUB_ID.fullmatch(repo) or repo.lower().endswith(".gguf"):
        return find_model(path_or_hf_repo)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return path if _has_all_weights(path) else None


def _has_all_weights(folder: Path) -> bool:
    """Whether the download of a repository is complete."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("model*.safetensors"))
    files = read_json_object(index).get("weight_map")
    return isinstance(files, dict) and all(
        (folder / str(name)).is_file() for name in files.values()
    )


def is_model(path: Path) -> bool:
    """Whether a path is that of a GGUF file, or of a folder with a model's configuration."""
    is_gguf = path.suffix.lower() == GGUF_SUFFIX and path.is_file()
    return is_gguf or (path / "config.json").is_file()


def local_model_of(word: str) -> tuple[str | None, str | None]:
    """The model on this machine that a word names: a path, ``demo``, or a repository in the hub's
    cache, by its id or by the last part of it. If there is none, how to get the model that the word
    seems to name, which exists and is none, or has the form of a path, a hub id or an address.

    Raises:
        LoadError: several repositories have this name.
    """
    path = _local(word)
    if path is not None:
        if is_model(path):
            return word, None
        return None, "a model is a folder with config.json and weights, or a .gguf file"
    found = [repo for repo in local_repositories() if word in (repo, repo.partition("/")[2])]
    if word in found or len(found) == 1:
        return word if word in found else found[0], None
    if found:
        raise LoadError(f"[load] {shown(word)} is the name of several models: {', '.join(found)}")
    if word.lower().endswith(GGUF_SUFFIX) or _LIKE_A_PATH.fullmatch(word):
        return None, "give a path that exists"
    if not (address := _HUB_ADDRESS.fullmatch(word)) and not _HUB_ID.fullmatch(word):
        return None, None
    return None, f"--model {address['id'] if address else word} downloads it from the hub"


def find_tokenizer(path_or_hf_repo: str | Path) -> Path:
    """The folder of a tokenizer: a local one, or that of a repository, downloaded without weights.

    Raises:
        LoadError: it is not found.
    """
    path = _local(path_or_hf_repo)
    if path is None:
        files = [name for name in _MODEL_FILES if "safetensors" not in name]
        return _downloaded(str(path_or_hf_repo), None, files)
    if path.is_file():
        raise LoadError(
            f"[load] {path} is a file; tokenizer_path is the folder of a tokenizer",
            "tokenizer_path",
        )
    return path


def _local(path_or_hf_repo: str | Path) -> Path | None:
    """The folder or file of this name, or the bundled model for ``demo``; ``None`` if missing."""
    repo = str(path_or_hf_repo)
    path = Path(repo)
    try:
        path = path.expanduser()
        if repo != "" and (path.is_dir() or path.is_file()):
            return path
    except (OSError, RuntimeError):
        # The name is too long for the file system, or begins with ~ and no user's name.
        return None
    return demo_model_path() if repo == DEMO else None


def _downloaded(repo: str, revision: str | None, files: list[str]) -> Path:
    named = one_line(repr(repo))
    if not _HUB_ID.fullmatch(repo):
        raise LoadError(f"[load] no folder {named}, and it is not a hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with load_errors(f"no folder {named}, and no such download"):
            return Path(snapshot_download(repo, revision=revision, allow_patterns=files))
    except LoadError as error:
        there = local_repositories()
        if not isinstance(error.__cause__, LocalEntryNotFoundError) or repo in there:
            raise
        # The most similar names first, since the name may be misspelt.
        near = difflib.get_close_matches(repo, there, n=max(1, len(there)), cutoff=0)
        names = one_line(", ".join(near)) or "none"
        raise LoadError(
            f"[load] no folder {named}, no network, and not among the local models: {names}"
        ) from error.__cause__


def local_repositories() -> list[str]:
    """The ids of the repositories in the hub's cache on this machine."""
    from huggingface_hub import constants

    return [
        folder.name.removeprefix("models--").replace("--", "/")
        for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*"))
        if any(folder.glob("snapshots/*"))
    ]


def read_json_object(file: Path, way_out: str = "") -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        way_out: is appended to the message of an error.

    Raises:
        LoadError: the file can't be read, or is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding=UTF_8))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"[load] {file} can't be read: {one_line(error)}{way_out}") from error
    return content


@contextmanager
def without_marks(folder: Path) -> Iterator[Path]:
    """A folder for mlx-lm and transformers, which refuse JSON that begins with a byte order mark:
    the same one, or, if it has such files, a temporary one with copies of them and links to the
    others.
    """
    marked = [file for file in folder.glob("*.json") if _has_mark(file)]
    if not marked:
        yield folder
        return
    with TemporaryDirectory() as name:
        for file in folder.iterdir():
            copy = Path(name) / file.name
            if file in marked:
                copy.write_bytes(file.read_bytes().removeprefix(codecs.BOM_UTF8))
            else:
                copy.symlink_to(file.absolute())
        yield Path(name)


def _has_mark(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    except OSError:
        return False  # Its reader gives the reason.
