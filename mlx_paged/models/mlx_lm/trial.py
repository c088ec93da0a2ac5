"""How a model of mlx-lm runs on this package's caches, found by comparing its logits with those on
mlx-lm's own: some models would be wrong without any error.

afm7, for example, takes the positions of its queries from the shape of K, which in a packed step is
not that of the sequence.

What the class does with its caches is tested on a small copy of the model in float32, where
rounding hides nothing and windows end after a few tokens. Then the model itself is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlx_paged.cache import LayerSpec
from mlx_paged.errors import FailedCheckError, UnsuitableModelError, one_line
from mlx_paged.models.context_length import context_length
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.module_calls import ModuleClasses
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.mlx_lm.per_sequence import PerSequenceModel
from mlx_paged.models.mlx_lm.recording import RecurrentCaches, record_packed
from mlx_paged.models.mlx_lm.small_copy import small_copy
from mlx_paged.models.mlx_lm.stock_logits import Prompts, StockLogits, Yardstick, median_error
from mlx_paged.models.run_step import probe_ids, probe_sequences, run_step

# Tokens of the first sequence; its second chunk, which runs in one step with all of the second
# sequence; and tokens of that.
NUM_TOKENS = 24
NUM_LAST = 9
NUM_OTHER = 7
# More tokens, beyond the windows, where that takes no more multiplications than two cores do in a
# tenth of a second.
MORE_TOKENS = 40
MAX_NUM_TOKENS = 512
MAX_WORK = 2**31
# Decodes of each sequence in float32, which reveal a step that has read a wrong state.
NUM_DECODED = 3

Kind: TypeAlias = type[PackedModel | PerSequenceModel]
WAYS: dict[str, Kind] = {"packed": PackedModel, "per sequence": PerSequenceModel}


def adapt(
    model: Module,
    config: dict[str, Any],
    *,
    evaluates_weights: bool = True,
    skip_check: bool = False,
) -> LanguageModel:
    """A model of mlx-lm as a :class:`LanguageModel`: packed, or else one sequence at a time.

    Args:
        model: with its weights, adapters included.
        config: its ``config.json``.
        evaluates_weights: whether the model itself is tested too, and not only a small copy of it.
        skip_check: run a model whose logits differ. The small copy alone decides how it runs (the
            model itself if it has none), and if that differs in both ways, the model runs one
            sequence at a time, with its own attention.

    Raises:
        FailedCheckError: its logits differ in one of the ways, and it can't run in the other.
        UnsuitableModelError: it can run in neither way; the message gives both reasons.
    """
    trial = Trial(model, config, evaluates_weights, skip_check)
    errors: dict[str, UnsuitableModelError] = {}
    for way, kind in WAYS.items():
        try:
            return trial.run(kind)
        except UnsuitableModelError as error:
            errors[way] = error
    if skip_check:
        for way in reversed(WAYS):
            if isinstance(errors[way], FailedCheckError):
                return WAYS[way](model, config)
    reasons = [str(error) for error in errors.values()]
    text = "; ".join(f"{way}, {reason}" for way, reason in zip(WAYS, reasons, strict=True))
    is_check = any(isinstance(error, FailedCheckError) for error in errors.values())
    kind_of_error = FailedCheckError if is_check else UnsuitableModelError
    raise kind_of_error(reasons[0] if len(set(reasons)) == 1 else text)


def layer_specs_of(model: Module) -> list[LayerSpec]:
    """The layers of a model of this package or of mlx-lm, without evaluating a weight; empty for a
    model that can't run packed.
    """
    if isinstance(model, LanguageModel):
        return model.layer_specs
    classes = ModuleClasses(model.modules())
    try:
        return list(record_packed(model, RecurrentCaches(model)).layers)
    except UnsuitableModelError:
        return []
    finally:
        classes.restore()


class Trial:
    """Runs a model of mlx-lm in one way after the other.

    Args:
        model: with its weights.
        config: its ``config.json``.
        evaluates_weights: whether the model itself is tested too, and not only a small copy of it.
        skip_check: whether it is not if there is a small copy, although its weights are evaluated.
    """

    def __init__(
        self,
        model: Module,
        config: dict[str, Any],
        evaluates_weights: bool = True,
        skip_check: bool = False,
    ):
        self.model, self.config = model, config
        self._evaluates_weights, self._skip_check = evaluates_weights, skip_check
        if evaluates_weights:
            # Arrays that are not parameters, such as frequencies of RoPE, are lazy at first, and
            # another thread can't evaluate what this one leaves lazy.
            mx.eval([value for module in model.modules() for value in module.values()])
        self._prepared: tuple[Prompts, list[Yardstick]] | None = None

    def run(self, kind: Kind) -> LanguageModel:
        """The model as it runs in this way.

        Raises:
            UnsuitableModelError: its logits differ by more than rounding, or mlx-lm's own do, or
                mlx-lm can't run the model.
        """
        # A kind of model may give modules other classes.
        classes = ModuleClasses(self.model.modules())
        try:
            adapted = kind(self.model, self.config)
            if self._small is not None:
                self._small._run_as_a_copy(kind)
            if self._evaluates_weights and not (self._skip_check and self._small is not None):
                self._check(adapted)
        except BaseException:
            classes.restore()
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
            return  # The model itself can run in this way, so the copy is the exception.
        try:
            self._check(adapted)
        except UnsuitableModelError as error:
            raise type(error)(f"in a small copy of the model, {error}") from error

    def _check(self, model: LanguageModel) -> None:
        if self._prepared is None:
            prompts = _prompts(model)
            self._prepared = prompts, Yardstick.of(self.model, prompts)
        prompts, yardsticks = self._prepared
        differences = []
        for yardstick in yardsticks:
            difference = _difference(model, prompts, yardstick)
            if difference is None:
                return
            differences.append(difference)
        raise FailedCheckError(differences[-1])


def _difference(model: LanguageModel, prompts: Prompts, yardstick: Yardstick) -> str | None:
    """A text about the first logits that differ by more than rounding; ``None`` if none do."""
    try:
        parts = list(_parts(model, prompts, yardstick.logits))
    except Exception as error:
        # It may rely on any detail of mlx-lm's caches, such as the shape of a mask.
        raise UnsuitableModelError(
            f"it can't run on caches here ({type(error).__name__}: {one_line(error)})"
        ) from error
    for what, logits, expected in parts:
        found = median_error(logits, expected)
        # NaN counts as a difference unless mlx-lm's logits are NaN, too.
        if not found <= yardstick.limit and not mx.isnan(expected).any():
            return (
                f"its logits of {what} differ from those on mlx-lm's caches by {found:.2g} "
                f"(rounding explains {yardstick.limit:.2g})"
            )
    return None


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
    """The comparisons: a name, the model's rows of logits, and those on mlx-lm's caches."""
    sequences = probe_sequences(model, len(prompts.ids) + len(prompts.other))
    ids, other, first, end = prompts.ids, prompts.other, prompts.num_first, prompts.num_tokens
    yield (
        "its first tokens",
        run_step(model, sequences, {"a": ids[:first]}, [first]),
        stock.rows[:first],
    )
    # Logits of some tokens only, so that a model that can drop rows does so here.
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
