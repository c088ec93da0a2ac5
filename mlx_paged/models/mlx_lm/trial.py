"""A model on our caches, held against itself on mlx-lm's: some would be wrong without any error.

afm7, for one, takes the positions of its queries from the shape of K, which in a packed step is not
that of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.cache import KVCacheConfig, PagedKVCache, group_layers
from mlx_paged.config import KVBudget
from mlx_paged.errors import one_line
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.errors import UnsuitableModelError

BLOCK_SIZE = 8
BUDGET = KVBudget(num_blocks=64)
# Two chunks of a sequence; the second runs beside the whole of another.
CHUNKS = 15, 9
OTHER = 7
# The error of a row of logits, over its length, that rounding explains. A layer that attends to
# something else is off by more: afm7 by 0.30. Rounding may send single tokens of a mixture to other
# experts, so what counts is the median of rows.
LIMITS = {mx.float32: 1e-3}
LIMIT = 0.05
# A model's own error is that on mlx-lm's caches, with its chunks cut elsewhere.
NUM_TIMES_OWN_ERROR = 4
# Beyond so many limits, the model means something else by each cut, and there is nothing to be
# equal to: plamo3 prefills with a window that is longer by one than that of its cache.
MAX_OWN_LIMITS = 10


def check_against_stock(model: LanguageModel, stock: Module) -> None:
    """Compare logits of some tokens.

    Args:
        model: on our caches.
        stock: the same, as mlx-lm runs it.

    Raises:
        UnsuitableModelError: they differ by more than rounding, or mlx-lm's own do, or mlx-lm can't
            run the model.
    """
    ids = _token_ids(model.args.vocab_size, sum(CHUNKS))
    other = _token_ids(model.args.vocab_size, OTHER, first=5)
    try:
        expected = _stock_logits(stock, ids, CHUNKS)
        again = _stock_logits(stock, ids, CHUNKS[::-1])
        expected_other = _stock_logits(stock, other, (OTHER,))[-1:]
    except Exception as error:
        # An unknown model may raise anything, as on a device that lacks an operation for its dtype.
        raise UnsuitableModelError(
            f"mlx-lm can't run it on its own caches ({type(error).__name__}: {one_line(error)})"
        ) from error
    own_error, limit = _median_error(again, expected), LIMITS.get(expected.dtype, LIMIT)
    if own_error > MAX_OWN_LIMITS * limit:
        raise UnsuitableModelError(
            f"its logits on mlx-lm's own caches differ by {own_error:.2g} where a prompt is cut "
            "elsewhere"
        )
    limit = max(limit, NUM_TIMES_OWN_ERROR * own_error)

    groups = group_layers(model.layer_specs, BLOCK_SIZE)
    config = KVCacheConfig.within(BUDGET, model.layer_specs, BLOCK_SIZE, groups)
    config = replace(config, state_nbytes=model.state_nbytes)
    cache = PagedKVCache(config, "reference")
    first, last = CHUNKS[0], CHUNKS[1] // 2
    parts = {
        "its first tokens": (_run(model, cache, {"a": ids[:first]}, [first]), expected[:first])
    }
    both = _run(model, cache, {"a": ids[first:], "b": other}, [last, 1])
    parts["later tokens"] = both[:last], expected[-last:]
    parts["tokens of a second sequence"] = both[last:], expected_other
    for what, (logits, rows) in parts.items():
        found = _median_error(logits, rows)
        # A NaN is no agreement, unless mlx-lm's are NaN, too.
        if not found <= limit and not mx.isnan(rows).any():
            raise UnsuitableModelError(
                f"its logits of {what} differ from those on mlx-lm's caches by {found:.2g} "
                f"(rounding explains {limit:.2g})"
            )


def _token_ids(vocab_size: int, count: int, first: int = 3) -> list[int]:
    return [(first + 7 * i + 13 * i * i) % vocab_size for i in range(count)]


def _stock_logits(stock: Module, ids: list[int], chunks: tuple[int, ...]) -> mx.array:
    """``[num_tokens, vocab_size]``"""
    cache, logits, start = make_prompt_cache(stock), [], 0
    for size in chunks:
        logits.append(stock(mx.array([ids[start : start + size]]), cache=cache)[0])
        mx.eval(logits, [entry.state for entry in cache])
        start += size
    return mx.concatenate(logits)


def _run(
    model: LanguageModel,
    cache: PagedKVCache,
    batch: Mapping[str, list[int]],
    num_logit_rows: list[int],
) -> mx.array:
    tokens = [token for ids in batch.values() for token in ids]
    with cache.step({seq: len(ids) for seq, ids in batch.items()}, num_logit_rows) as step:
        logits = model(mx.array(tokens), cache.layers, step.logit_rows)
        mx.eval(logits, cache.arrays)
    return logits


def _median_error(logits: mx.array, expected: mx.array) -> float:
    """Of the rows, ``[num_rows, vocab_size]``: the length of a difference over that of the expected
    row. Tokens that a model never allows count where only one side allows them.
    """
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    never = mx.isneginf(logits) & mx.isneginf(expected)
    logits, expected = mx.where(never, 0, logits), mx.where(never, 0, expected)
    centred = expected - expected.mean(-1, keepdims=True)
    errors = mx.linalg.norm(logits - expected, axis=-1) / mx.linalg.norm(centred, axis=-1)
    median: float = mx.median(errors).item()  # type: ignore[assignment]
    return median
