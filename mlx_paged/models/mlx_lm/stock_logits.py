"""What a model of mlx-lm's answers on mlx-lm's own caches, and how exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.errors import UnsuitableModelError, one_line

# The error of a row of logits, over its length, that rounding explains in float32. A layer that
# attends to something else is off by more: afm7 by 0.30.
FLOAT32_LIMIT = 1e-3
# The same in half precision, where nothing better is known: see Yardstick.
HALF_LIMIT = 0.05
# A model's own error is that between two ways to cut a prompt.
NUM_TIMES_OWN_ERROR = 4
# Beyond this many limits, the model means something else by each cut, and there is nothing to be
# equal to: plamo3 prefills with a window that is longer by one than that of its cache.
MAX_OWN_LIMITS = 10
# Another order of the same sums in half precision is as far from float32, and one of two is up to
# twice as far as the other.
NUM_TIMES_HALF_ERROR = 2
# What the weights of a model may take once more, in float32, while it is tried.
MAX_FLOAT32_NBYTES = 2**30


@dataclass(frozen=True)
class Prompts:
    """The tokens that a model is tried with.

    Attributes:
        ids, other: of two sequences.
        num_first: of the tokens of ``ids``, those of its first chunk. The others up to
            ``num_tokens`` are the second one.
        num_decoded: how many of the last tokens of either come one by one.
    """

    ids: list[int]
    other: list[int]
    num_first: int
    num_decoded: int

    @property
    def num_tokens(self) -> int:
        return len(self.ids) - self.num_decoded

    @property
    def num_other(self) -> int:
        return len(self.other) - self.num_decoded


class StockLogits:
    """Of all tokens of two prompts.

    Args:
        model: of mlx-lm's, as it is at this moment.

    Attributes:
        rows: of the first one, in its chunks, ``[num_tokens, vocab_size]``.
        again: the same, with the prompt cut elsewhere and the last tokens one by one.
        other: of the second one.
    """

    def __init__(self, model: Module, prompts: Prompts):
        ones, num_last = [1] * prompts.num_decoded, prompts.num_tokens - prompts.num_first
        self.rows = _logits(model, prompts.ids, [prompts.num_first, num_last, *ones])
        self.num_alone = max(prompts.num_decoded, 1)
        rest = len(prompts.ids) - num_last - self.num_alone
        self.again = _logits(model, prompts.ids, [num_last, rest, *[1] * self.num_alone])
        self.other = _logits(model, prompts.other, [prompts.num_other, *ones])

    @cached_property
    def own_error(self) -> float:
        return self.error(self)

    def error(self, exact: StockLogits) -> float:
        """Of all rows, or of those of tokens that come alone, if that is larger: then a model may
        add up in another order.
        """
        return max(
            median_error(self.again, exact.rows),
            median_error(self.again[-self.num_alone :], exact.rows[-self.num_alone :]),
            median_error(self.rows, exact.rows),
        )


@dataclass(frozen=True)
class Yardstick:
    """What a way to run a model is held to.

    In half precision that is what mlx-lm answers with the same weights in float32, from which a
    right answer may be twice as far as mlx-lm's own. A model so large that its weights should not
    lie in memory once more is held to mlx-lm's answers in half precision instead, more loosely:
    rounding can't be told from a small fault there.

    Attributes:
        logits: the answers.
        limit: the error that rounding explains.
    """

    logits: StockLogits
    limit: float

    @classmethod
    def of(cls, model: Module, prompts: Prompts) -> Yardstick:
        """Raises:
        UnsuitableModelError: mlx-lm can't run the model, or its answers depend on where a prompt is
            cut.
        """
        try:
            own = StockLogits(model, prompts)
        except Exception as error:
            # An unknown model may raise anything, as on a device that lacks an operation for its
            # dtype.
            raise UnsuitableModelError(
                f"mlx-lm can't run it on its own caches ({type(error).__name__}: {one_line(error)})"
            ) from error
        exact = own if own.rows.dtype == mx.float32 else _in_float32(model, prompts)
        best, limit = (own, HALF_LIMIT) if exact is None else (exact, FLOAT32_LIMIT)
        if best.own_error > MAX_OWN_LIMITS * limit:
            raise UnsuitableModelError(
                f"its logits on mlx-lm's own caches differ by {best.own_error:.2g} where a prompt "
                "is cut elsewhere"
            )
        if best is own:
            return cls(own, max(limit, NUM_TIMES_OWN_ERROR * own.own_error))
        # And one rounding of the logits themselves.
        eps = mx.finfo(own.rows.dtype).eps
        return cls(best, NUM_TIMES_HALF_ERROR * own.error(best) + eps)


def _in_float32(model: Module, prompts: Prompts) -> StockLogits | None:
    """What the model answers with its weights in float32; ``None`` if that takes too much memory,
    or it can't be had.
    """
    narrow = filter(_is_half, dict(tree_flatten(model.parameters())).values())
    if sum(4 * weight.size for weight in narrow) > MAX_FLOAT32_NBYTES:
        return None
    try:
        with _widened(model):
            logits = StockLogits(model, prompts)
    except Exception:
        return None  # The model runs, and a kernel may want half precision.
    return logits if logits.rows.dtype == mx.float32 else None


@contextmanager
def _widened(model: Module) -> Iterator[None]:
    before = model.parameters()
    try:
        model.update(
            tree_map(lambda w: w.astype(mx.float32) if _is_half(w) else w, before), strict=False
        )
        yield
    finally:
        model.update(before, strict=False)


def _is_half(weight: mx.array) -> bool:
    return weight.dtype in (mx.float16, mx.bfloat16)


def _logits(model: Module, ids: Sequence[int], chunks: Sequence[int]) -> mx.array:
    """``[num_tokens, vocab_size]``"""
    cache, logits, start = make_prompt_cache(model), [], 0
    for size in chunks:
        logits.append(model(mx.array([ids[start : start + size]]), cache=cache)[0])
        mx.eval(logits, [entry.state for entry in cache])
        start += size
    return mx.concatenate(logits)


def median_error(logits: mx.array, expected: mx.array) -> float:
    """Of the rows, ``[num_rows, vocab_size]``: the length of a difference over that of the expected
    row. Tokens that a model never allows count where only one side allows them.

    Rounding may send single tokens of a mixture to other experts: hence the median.
    """
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    never = mx.isneginf(logits) & mx.isneginf(expected)
    logits, expected = mx.where(never, 0, logits), mx.where(never, 0, expected)
    centred = expected - expected.mean(-1, keepdims=True)
    errors = mx.linalg.norm(logits - expected, axis=-1) / mx.linalg.norm(centred, axis=-1)
    median: float = mx.median(errors).item()  # type: ignore[assignment]
    return median
