"""The way in which a model of mlx-lm runs on the caches here, found by holding it against itself on
mlx-lm's: some would be wrong without any error.

afm7, for one, takes the positions of its queries from the shape of K, which in a packed step is not
that of the sequence.

What a class does with its caches shows on a small copy of the model, in float32, where rounding
hides nothing and windows end after a few tokens. What this model does shows on itself, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlx_paged.cache import LayerSpec
from mlx_paged.errors import UnsuitableModelError, one_line
from mlx_paged.models.context_length import context_length
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.module_calls import put_back
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.mlx_lm.per_sequence import PerSequenceModel
from mlx_paged.models.mlx_lm.recording import RecurrentCaches, record_packed
from mlx_paged.models.mlx_lm.small_copy import small_copy
from mlx_paged.models.mlx_lm.stock_logits import (
    Prompts,
    StockLogits,
    Yardstick,
    median_error,
)
from mlx_paged.models.run_step import probe_ids, probe_sequences, run_step

# Of a sequence, its second chunk among them, which runs beside the whole of another.
NUM_TOKENS = 24
NUM_LAST = 9
NUM_OTHER = 7
# More tokens, beyond the windows, where that is little work: products of two numbers, of which two
# cores do as many in a tenth of a second.
MORE_TOKENS = 40
MAX_NUM_TOKENS = 512
MAX_WORK = 2**31
# Decodes of each sequence in float32: they show at once which state a step has read.
NUM_DECODED = 3

Kind = Callable[[Module, dict[str, Any]], LanguageModel]


def adapt(model: Module, config: dict[str, Any]) -> LanguageModel:
    """A model of mlx-lm, as one that runs here: packed, or else one sequence at a time.

    Args:
        model: with its weights, adapters among them.
        config: its ``config.json``.

    Raises:
        UnsuitableModelError: it runs in neither way, with both reasons.
    """
    return _first_way(Trial(model, config).run)


def adapt_unread(model: Module, config: dict[str, Any]) -> LanguageModel:
    """As :func:`adapt`, tried with a small copy alone: none of the weights is evaluated.

    Raises:
        UnsuitableModelError: it runs in neither way, with both reasons.
    """
    return _first_way(Trial(model, config, evaluates_weights=False).run)


def _first_way(run: Callable[[Kind], LanguageModel]) -> LanguageModel:
    reasons: dict[str, str] = {}
    for kind, way in ((PackedModel, "packed"), (PerSequenceModel, "per sequence")):
        try:
            return run(kind)
        except UnsuitableModelError as error:
            reasons[way] = str(error)
    if len(set(reasons.values())) == 1:
        raise UnsuitableModelError(reasons["packed"])
    raise UnsuitableModelError("; ".join(f"{way}, {text}" for way, text in reasons.items()))


def layer_specs_of(model: Module) -> list[LayerSpec]:
    """The layers of a model, of this package or of mlx-lm, found without evaluating a weight; empty
    where only a run of the model says them.
    """
    if isinstance(model, LanguageModel):
        return model.layer_specs
    classes = [(module, type(module)) for module in model.modules()]
    try:
        return list(record_packed(model, RecurrentCaches(model)).layers)
    except UnsuitableModelError:
        return []
    finally:
        put_back(classes)


class Trial:
    """A model of mlx-lm's, which is tried in one way after another.

    Args:
        model: with its weights.
        config: its ``config.json``.
        evaluates_weights: whether the model itself is tried, and not only a small copy of it.
    """

    def __init__(self, model: Module, config: dict[str, Any], evaluates_weights: bool = True):
        self.model, self.config = model, config
        self._evaluates_weights = evaluates_weights
        if evaluates_weights:
            # Arrays that are not parameters, as frequencies of RoPE, are made lazily, and no other
            # thread can run what this one leaves lazy.
            mx.eval([value for module in model.modules() for value in module.values()])
        self._yardstick: tuple[Prompts, Yardstick] | None = None

    def run(self, kind: Kind) -> LanguageModel:
        """The model as it runs in this way.

        Raises:
            UnsuitableModelError: its logits differ by more than rounding, or mlx-lm's own do, or
                mlx-lm can't run the model.
        """
        # In some ways modules run with other classes.
        classes = [(module, type(module)) for module in self.model.modules()]
        try:
            adapted = kind(self.model, self.config)
            if self._small is not None:
                self._small._run_as_a_copy(kind)
            if self._evaluates_weights:
                self._check(adapted)
        except BaseException:
            put_back(classes)
            raise
        return adapted

    @cached_property
    def _small(self) -> Trial | None:
        copy = small_copy(self.model, self.config)
        return None if copy is None else Trial(*copy)

    def _run_as_a_copy(self, kind: Kind) -> None:
        try:
            adapted = kind(self.model, self.config)
        except UnsuitableModelError:
            return  # The model itself can, so it is the copy that is odd.
        try:
            self._check(adapted)
        except UnsuitableModelError as error:
            raise UnsuitableModelError(f"in a small copy of the model, {error}") from error

    def _check(self, model: LanguageModel) -> None:
        if self._yardstick is None:
            prompts = _prompts(model)
            self._yardstick = prompts, Yardstick.of(self.model, prompts)
        prompts, yardstick = self._yardstick
        try:
            parts = list(_parts(model, prompts, yardstick.logits))
        except Exception as error:
            # It may rely on anything that mlx-lm's caches have, as on the shape of a mask.
            raise UnsuitableModelError(
                f"it can't run on caches here ({type(error).__name__}: {one_line(error)})"
            ) from error
        for what, logits, expected in parts:
            found = median_error(logits, expected)
            # A NaN is not an agreement, unless mlx-lm's are NaN, too.
            if not found <= yardstick.limit and not mx.isnan(expected).any():
                raise UnsuitableModelError(
                    f"its logits of {what} differ from those on mlx-lm's caches by {found:.2g} "
                    f"(rounding explains {yardstick.limit:.2g})"
                )


def _prompts(model: LanguageModel) -> Prompts:
    windows = [spec.window for spec in model.layer_specs if spec.window is not None]
    num_tokens = max([MORE_TOKENS, *(window + NUM_LAST + NUM_OTHER for window in windows)])
    weights = dict(tree_flatten(model.parameters()))
    num_parameters = sum(weight.size for weight in weights.values())
    num_decoded = NUM_DECODED if model.dtype == mx.float32 else 0
    if num_tokens > MAX_NUM_TOKENS or num_tokens * num_parameters > MAX_WORK:
        num_tokens, num_decoded = NUM_TOKENS, 0
    num_tokens = max(4, min(num_tokens, context_length(model.args) - num_decoded))
    size = model.args.vocab_size
    return Prompts(
        probe_ids(size, num_tokens + num_decoded),
        probe_ids(size, min(NUM_OTHER, num_tokens) + num_decoded, first=5),
        num_tokens - min(NUM_LAST, num_tokens // 2),
        num_decoded,
    )


def _parts(
    model: LanguageModel, prompts: Prompts, stock: StockLogits
) -> Iterator[tuple[str, mx.array, mx.array]]:
    """What is compared: its name, the model's rows of logits, and those of mlx-lm's caches."""
    sequences = probe_sequences(model, len(prompts.ids) + len(prompts.other))
    ids, other, first, end = prompts.ids, prompts.other, prompts.num_first, prompts.num_tokens
    yield (
        "its first tokens",
        run_step(model, sequences, {"a": ids[:first]}, [first]),
        stock.rows[:first],
    )
    # Not of all tokens, so that a model that leaves rows out does so here.
    num_other = prompts.num_other
    last, last_other = (end - first) // 2, (num_other + 1) // 2
    batch = {"a": ids[first:end], "b": other[:num_other]}
    both = run_step(model, sequences, batch, [last, last_other])
    yield "later tokens", both[:last], stock.rows[end - last : end]
    expected = stock.other[num_other - last_other : num_other]
    yield "tokens of a second sequence", both[last:], expected
    decoded = [
        run_step(model, sequences, {"a": [a], "b": [b]}, [1, 1])
        for a, b in zip(ids[end:], other[num_other:], strict=True)
    ]
    if decoded:
        expected = mx.stack([stock.rows[end:], stock.other[num_other:]], axis=1).flatten(0, 1)
        yield "tokens that come one by one", mx.concatenate(decoded), expected
