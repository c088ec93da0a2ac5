"""How an engine joins those of the other ranks: the checks that they match, and a common budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from hashlib import blake2b

from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.distributed import Ranks, connect
from mlx_paged.errors import ArgumentError
from mlx_paged.models.kv_cache import kv_budget
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.ops import device


def join_ranks(
    model: LanguageModel, tokenizer: TokenizerWrapper | None, settings: Mapping[str, object]
) -> Ranks | None:
    """Connect the ranks that a model is split over, and check that they match; ``None`` if the
    model is not split.

    Args:
        settings: of the engine, by name.

    Raises:
        ArgumentError: a setting is not supported on several ranks.
        RanksError: the ranks have different packages, settings, models or tokenizers.
    """
    if model.group is None:
        return None
    if settings.get("draft_model") is not None:
        raise ArgumentError(
            "[ranks] draft_model can't be combined with several ranks; with num_draft_tokens "
            "alone, drafts are looked up in the request's own tokens",
            "draft_model",
        )
    ranks, args = connect(model.group), model.args
    config = vars(args) if dataclasses.is_dataclass(args) else {"vocab_size": args.vocab_size}
    facts: dict[str, object] = {
        **{f"the setting {name}": repr(value) for name, value in sorted(settings.items())},
        "the device": "CPU" if device.is_cpu() else "GPU",
        "the kind of model": type(model),
        **{f"{name} of the model": repr(value) for name, value in sorted(config.items())},
        # The shares of all ranks have equal shapes.
        "the names, shapes and types of the weights": [
            (name, leaf.shape, leaf.dtype)
            for name, leaf in dict(tree_flatten(model.parameters())).items()
        ],
    }
    if tokenizer is not None:
        vocabulary = repr(sorted(tokenizer.get_vocab().items())).encode(errors="replace")
        facts |= {
            "the tokenizer": type(tokenizer._tokenizer),
            "the vocabulary of the tokenizer": blake2b(vocabulary, digest_size=8).hexdigest(),
            "the end of sequence of the tokenizer": sorted(tokenizer.eos_token_ids),
        }
    ranks.compare(facts)
    return ranks


def least_budget(ranks: Ranks, kv_cache_bytes: str | int | None, model: LanguageModel) -> str | int:
    """The largest K/V budget that fits on every rank. A token takes the same number of bytes on
    each of them, so equal bytes are equal numbers of blocks.
    """
    budget = kv_budget(kv_cache_bytes, model)
    if budget.nbytes is None:
        return f"{budget.num_blocks}blocks"
    return int(min(ranks.all_gather(budget.nbytes)))
