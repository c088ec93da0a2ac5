"""A draft model, which must have the same vocabulary as the model that it drafts for."""

from __future__ import annotations

from pathlib import Path

from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.errors import shown
from mlx_paged.loading.folder import LoadError, find_model
from mlx_paged.loading.heads import AUTO, load_head
from mlx_paged.loading.loader import load_whole
from mlx_paged.models.mlx_lm import check_model


def load_draft_model(
    draft_model: str | Path | Module | None,
    tokenizer: TokenizerWrapper | None,
    target: Module | None = None,
    *,
    skip_check: bool = False,
) -> Module | None:
    """The draft model or the head that drafts, loaded unless it is a model already.

    Args:
        draft_model: a folder, a hub id, or a loaded model; ``"auto"`` for the head in the target's
            own folder. A folder whose tensors are those of a head of the target is one.
        tokenizer: of the model that it drafts for.
        target: that model; without it, heads are not looked for.
        skip_check: as in :func:`load`.

    Raises:
        LoadError: it is not found, broken, or has another vocabulary.
    """
    if draft_model is None or isinstance(draft_model, Module):
        return draft_model
    if not isinstance(draft_model, str | Path):
        raise LoadError(
            "[load] draft_model must be a folder, a hub id or a model that is loaded, got "
            f"{shown(draft_model)}",
            "draft_model",
        )
    try:
        if target is not None:
            name = draft_model if draft_model == AUTO else find_model(draft_model)
            head = load_head(check_model(target), name)
            if head is not None:
                return head
        loaded, draft_tokenizer, _ = load_whole(draft_model, skip_check=skip_check)
    except LoadError as error:
        reason = str(error).removeprefix("[load] ")
        raise LoadError(f"[load] draft_model: {reason}", "draft_model") from error
    if tokenizer is not None:
        differing = tokenizer.get_vocab().items() ^ draft_tokenizer.get_vocab().items()
        if differing:
            raise LoadError(
                f"[load] draft_model {shown(str(draft_model))} has another tokenizer than the "
                f"model: {len(differing):,} entries of their vocabularies differ",
                "draft_model",
            )
    return loaded
