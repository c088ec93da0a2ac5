"""A model that is split over the ranks of ``mlx.launch``."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.distributed import Ranks
from mlx_paged.loading.beside import KernelsBeside
from mlx_paged.loading.folder import LoadError, find_model, find_tokenizer
from mlx_paged.loading.loader import load_from, load_whole
from mlx_paged.loading.outline import check_size
from mlx_paged.models.kv_cache import weight_nbytes
from mlx_paged.models.mlx_lm import layer_specs_of

_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "*.txt", "model*.safetensors", "*.gguf")
# Samples of a file: its beginning, which has the names, shapes and types of weights, and parts of
# the rest.
_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 16


def load_for(
    ranks: Ranks | None,
    path_or_hf_repo: str | Path,
    *,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    tokenizer_path: str | Path | None = None,
    skip_check: bool = False,
    engine_options: Mapping[str, Any] | None = None,
    refuses_too_large: bool = False,
) -> tuple[Module, TokenizerWrapper]:
    """Load a model and its tokenizer, and split the model if there are several ranks.

    Each rank reads its own copy of the files and keeps only its share of the weights. All ranks
    have to call it.

    Args:
        ranks: as :func:`mlx_paged.distributed.launched_ranks` returns them; ``None`` is as
            :func:`load`.
        engine_options: of the engine that will run the model, whose kernels are tested meanwhile
            (:class:`KernelsBeside`); by default none are.
        refuses_too_large: whether a model that does not fit in this machine is refused before its
            weights are read; one that is split never is.
        Others, and errors raised: see :func:`load`.

    Raises:
        RanksError: the ranks have different packages or files.
        LoadError: the model can't be split over this number of ranks, or it has adapters.
    """
    if ranks is None:
        with KernelsBeside(engine_options) as beside:

            def before_reading(model: Module) -> None:
                if refuses_too_large:
                    check_size(weight_nbytes(model))
                if adapter_path is None:
                    beside.begin(layer_specs_of(model), model)

            model, tokenizer, _ = load_whole(
                path_or_hf_repo,
                tokenizer_config=tokenizer_config,
                model_config=model_config,
                adapter_path=adapter_path,
                tokenizer_path=tokenizer_path,
                skip_check=skip_check,
                before_reading=before_reading,
            )
            return model, tokenizer
    if adapter_path is not None:
        raise LoadError(
            "[load] adapter_path: adapters can't be split over ranks; fuse them with the model "
            "(mlx_lm.fuse), and load that",
            "adapter_path",
        )
    path = find_model(path_or_hf_repo)
    folder = None if tokenizer_path is None else find_tokenizer(tokenizer_path)
    facts = files_facts(path, "the model")
    if folder is not None:
        facts |= files_facts(folder, "the tokenizer")
    ranks.compare(facts)
    model, tokenizer, _ = load_from(
        path,
        tokenizer_path=folder,
        tokenizer_config=tokenizer_config,
        model_config=model_config,
        skip_check=skip_check,
        group=ranks.group,
    )
    return model, tokenizer


def files_facts(path: Path, whose: str) -> dict[str, str]:
    """Sizes and digests of a file, or of the files of a folder, for :meth:`Ranks.compare`.

    Of each file a sample of at most a megabyte is read: different weights under the same names
    differ in many places.

    Args:
        whose: for the names of the facts, such as "the model".
    """
    found = {file for pattern in _PATTERNS for file in path.glob(pattern)}
    return {
        f"the file {file.name} of {whose}": f"{file.stat().st_size} bytes ({_digest(file)})"
        for file in ([path] if path.is_file() else sorted(found))
        if file.is_file()
    }


def _digest(file: Path) -> str:
    last = max(0, file.stat().st_size - _SAMPLE_BYTES)
    digest = blake2b(digest_size=8)
    with file.open("rb") as stream:
        for number in range(_NUM_SAMPLES):
            stream.seek(last * number // (_NUM_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
