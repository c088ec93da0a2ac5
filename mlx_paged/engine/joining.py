"""How an engine joins those of the other ranks: what has to be equal, and what they agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from hashlib import blake2b

from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.cache import KVCache
from mlx_paged.distributed import Ranks, connect, package_facts
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.models.kv_cache import kv_budget
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.ops import device


def join_ranks(
    model: LanguageModel, tokenizer: TokenizerWrapper | None, settings: Mapping[str, object]
) -> Ranks | None:
    """The ranks that a model is split over; ``None`` for a whole one.

    Args:
        settings: of the engine, by their names.

    Raises:
        ArgumentError: a setting that a model of several ranks can't have.
        RanksError: the ranks have other packages, settings, models or tokenizers.
    """
    if model.group is None:
        return None
    if settings.get("draft_model") is not None:
        raise ArgumentError(
            "[ranks] draft_model can't be combined with several ranks; with num_draft_tokens "
            "alone, drafts are looked up in the request's own tokens",
            "draft_model",
        )
    ranks = connect(model.group)
    ranks.compare(
        {
            **package_facts(),
            **{f"the setting {name}": shown(value) for name, value in sorted(settings.items())},
            **_model_facts(model),
            **_tokenizer_facts(tokenizer),
        }
    )
    return ranks


def least_budget(ranks: Ranks, kv_cache_bytes: str | int | None, model: LanguageModel) -> str | int:
    """The K/V budget that every rank has room for. What a rank keeps of a token is as large on all
    of them, so the same bytes are the same blocks.
    """
    budget = kv_budget(kv_cache_bytes, model)
    if budget.nbytes is None:
        return f"{budget.num_blocks}blocks"
    least: int = ranks.agree(budget.nbytes, min)
    return least


def check_steps_are_alike(ranks: Ranks, cache: KVCache, run_ahead: bool) -> None:
    """Raises :class:`RanksError` if the ranks would not run the same steps."""
    backend = cache.backend
    ranks.compare(
        {
            "the backend": "MLX's own" if backend is None else type(backend).__name__,
            "run_ahead": str(run_ahead),
            "the number of blocks": str(cache.config.num_blocks),
        }
    )


def _model_facts(model: LanguageModel) -> dict[str, str]:
    """What describes a rank's share; the shares are alike."""
    leaves = dict(tree_flatten(model.parameters())).items()
    shapes = [f"{name} {leaf.shape} {leaf.dtype}" for name, leaf in sorted(leaves)]
    args = model.args
    config = vars(args) if dataclasses.is_dataclass(args) else {"vocab_size": args.vocab_size}
    return {
        "the device": "CPU" if device.is_cpu() else "GPU",
        "the kind of model": f"{type(model).__module__}.{type(model).__qualname__}",
        **{f"{name} of the model": shown(value) for name, value in sorted(config.items())},
        "the dtype of the model": str(model.dtype),
        "the names and shapes of the weights": _digest("\n".join(shapes)),
    }


def _tokenizer_facts(tokenizer: TokenizerWrapper | None) -> dict[str, str]:
    if tokenizer is None:
        return {"the tokenizer": "none"}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return {
        "the tokenizer": type(tokenizer._tokenizer).__name__,
        "the vocabulary of the tokenizer": _digest(repr(vocabulary)),
        "the end of sequence of the tokenizer": str(sorted(tokenizer.eos_token_ids)),
    }


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
