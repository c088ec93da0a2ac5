"""Models without their weights: built from configurations and shapes, before anything large is read
or downloaded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_paged.errors import one_line
from mlx_paged.loading.folder import LoadError, find_local_model, find_model, load_errors
from mlx_paged.loading.gguf import is_gguf
from mlx_paged.loading.heads import AUTO, load_head
from mlx_paged.loading.loader import build_model, on_our_caches
from mlx_paged.models.identity import model_name
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.memory import format_nbytes, why_too_large

if TYPE_CHECKING:
    from huggingface_hub import SafetensorsFileMetadata


# Files beside the weights of a repository that may have its head.
_SIDECARS = ("mtp.safetensors", "mtp/model.safetensors", "model-mtp.safetensors")


class Outline(NamedTuple):
    """A model whose weights are not read, and one that drafts for it. Their arrays must not be
    evaluated.
    """

    model: LanguageModel
    name: str
    num_bytes_to_download: int  # 0 for what is on this machine
    draft_model: LanguageModel | None = None


def read_outline(
    path_or_hf_repo: str | Path,
    revision: str | None = None,
    draft_model: str | Path | None = None,
) -> Outline:
    """The outline of a model that :func:`mlx_paged.load` would load: from the configuration and the
    headers of the weights, which for a repository that is not on this machine come from the hub.

    The model has the layers, dtypes and sizes of the loaded one, and runs in the same way (packed
    or per sequence), which is tested with a small copy.

    Args:
        draft_model: a model or a head of the model that drafts, or ``"auto"`` for the head in the
            model's own folder.

    Raises:
        LoadError: the model is not found, neither here nor on the hub, or can't run here.
    """
    is_own = draft_model in (AUTO, path_or_hf_repo)
    with _described(path_or_hf_repo, revision, _SIDECARS if is_own else ()) as found:
        path, name, num_bytes = found
        model = _outline_of(path)
        if draft_model is None:
            return Outline(model, name, num_bytes)
        try:
            with nullcontext((path, name, 0)) if is_own else _described(draft_model, None) as found:
                path, _, num_more = found
                where = AUTO if draft_model == AUTO else path
                draft = load_head(model, where, evaluates_weights=False) or _outline_of(path)
                return Outline(model, name, num_bytes + num_more, draft)
        except LoadError as error:
            reason = str(error).removeprefix("[load] ")
            raise LoadError(f"[load] draft_model: {reason}", "draft_model") from error


@contextmanager
def _described(
    path_or_hf_repo: str | Path, revision: str | None, sidecars: Sequence[str] = ()
) -> Iterator[tuple[Path, str, int]]:
    """The folder or file of a model, its name, and the bytes to download. For a repository that is
    not on this machine, a temporary folder with its configuration, and the headers of its weights
    and of those sidecars that it has.
    """
    path = find_local_model(path_or_hf_repo, revision)
    if path is not None:
        yield path, model_name(path), 0
        return
    repo = str(path_or_hf_repo)
    with TemporaryDirectory() as name:
        folder = Path(name) / repo
        with load_errors(f"no folder {one_line(repr(repo))}, and the lookup on the hub failed"):
            num_bytes = _write_headers(repo, revision, folder, sidecars)
        yield folder, repo, num_bytes


def find_model_for(path_or_hf_repo: str | Path, force: bool) -> Path:
    """As :func:`find_model`, but refuses to download weights that exceed this machine's memory,
    unless ``force`` is set.

    Raises:
        LoadError: the model is not found, or its weights are too large.
    """
    if not force and find_local_model(path_or_hf_repo) is None:
        from huggingface_hub import HfApi

        try:
            files = HfApi().get_safetensors_metadata(str(path_or_hf_repo)).files_metadata
        except Exception:  # A failure to get the size is no reason to refuse.
            files = {}
        check_size(sum(map(_num_bytes, files.values())))
    return find_model(path_or_hf_repo)


def check_size(weight_nbytes: int) -> None:
    """Raise :class:`LoadError` for weights that exceed this machine's memory."""
    reason = why_too_large(weight_nbytes, None)
    if reason is not None:
        raise LoadError(
            f"[load] the weights take {format_nbytes(weight_nbytes)}, and {reason}; use a smaller "
            "model or one of fewer bits (mlx-paged fit says what fits), or load it with force",
            "force",
        )


def _outline_of(path: Path) -> LanguageModel:
    if is_gguf(path):
        from mlx_paged.loading.gguf.loader import build_unread

        model, config = build_unread(path)
    else:
        model, config, _ = build_model(path)
    outlined = on_our_caches(model, config, evaluates_weights=False)
    outlined.path = path
    return outlined


def _write_headers(
    repo: str, revision: str | None, folder: Path, sidecars: Sequence[str] = ()
) -> int:
    """Write the configuration of a repository, and files of weights with headers and no data;
    returns the size of the real files on the hub.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    # This comes first: without a network it fails at once, while a download retries for long.
    api = HfApi()
    files = dict(api.get_safetensors_metadata(repo, revision=revision).files_metadata)
    for name in sidecars:
        with suppress(EntryNotFoundError):
            files[name] = api.parse_safetensors_file_metadata(repo, name, revision=revision)
    hf_hub_download(repo, "config.json", revision=revision, local_dir=folder)
    return sum(_write_header(folder / name, file) for name, file in files.items())


def _write_header(path: Path, file: SafetensorsFileMetadata) -> int:
    tensors: dict[str, Any] = {
        name: {"dtype": each.dtype, "shape": each.shape, "data_offsets": each.data_offsets}
        for name, each in file.tensors.items()
    }
    header = json.dumps({"__metadata__": file.metadata or {}, **tensors}).encode()
    end = _num_bytes(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as written:
        written.write(struct.pack("<Q", len(header)) + header)
        # MLX requires the size that the header implies; a sparse file takes no space.
        written.truncate(8 + len(header) + end)
    return 8 + len(header) + end


def _num_bytes(file: SafetensorsFileMetadata) -> int:
    """The size of all tensors."""
    return max((each.data_offsets[1] for each in file.tensors.values()), default=0)
