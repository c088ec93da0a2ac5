"""A model that is split over the ranks of ``mlx.launch``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.distributed import Ranks, folder_facts, package_facts
from mlx_paged.loading.folder import LoadError, find_model
from mlx_paged.loading.loader import load, load_folder


def load_for(
    ranks: Ranks | None,
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
) -> tuple[Module, TokenizerWrapper]:
    """A model and its tokenizer; split, where there are several ranks.

    Each rank reads its own copy of the files, and keeps its share of the weights only. All ranks
    have to call it.

    Args:
        ranks: as :func:`mlx_paged.distributed.launched_ranks` returns them; ``None`` is as
            :func:`load`.
        Others, and errors raised: see :func:`load`.

    Raises:
        RanksError: the ranks have other packages or other files.
        LoadError: the model can't be split over so many ranks; or it has adapters.
    """
    if ranks is None:
        return load(path_or_hf_repo, tokenizer_config, adapter_path=adapter_path)
    if adapter_path is not None:
        raise LoadError(
            "[load] adapter_path: adapters can't be split over ranks; fuse them with the model "
            "(mlx_lm.fuse), and load that",
            "adapter_path",
        )
    folder = find_model(path_or_hf_repo)
    ranks.compare({**package_facts(), **folder_facts(folder)})
    model, tokenizer, _ = load_folder(folder, tokenizer_config, group=ranks.group)
    return model, tokenizer
