"""The logits of a model of mlx-lm on mlx-lm's own caches, and how exact they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.errors import FailedCheckError, UnsuitableModelError, one_line

# The relative error of a row of logits that rounding explains in float32. A layer that attends to
# the wrong tokens has a larger one: 0.30 for afm7.
FLOAT32_LIMIT = 1e-3
# The same in half precision, if there is no reference in float32: see Yardstick.
HALF_LIMIT = 0.05
# A model's own error is the difference between two ways to cut a prompt.
NUM_TIMES_OWN_ERROR = 4
# With an own error of more limits than this, a model computes something else for each cut, and
# there is no reference: plamo3 prefills with a window one token longer than that of its cache.
MAX_OWN_LIMITS = 10
# Another order of summation in half precision has an error of the same size, and of two such errors
# one may be twice the other.
NUM_TIMES_HALF_ERROR = 2
# The most memory that a copy of the weights in float32 may take.
MAX_FLOAT32_NBYTES = 2**30


@dataclass(frozen=True)
class Prompts:
    """The tokens that a model is tested with.

    Attributes:
        ids, other: two sequences.
        num_first: the length of the first chunk of ``ids``; the second ends at ``num_tokens``.
        num_decoded: the number of last tokens of each sequence that are decoded one by one.
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
    """The logits of all tokens of two sequences, ``[num_tokens, vocab_size]``.

    Attributes:
        rows: of the first sequence, in its chunks.
        again: the same, with the prompt cut elsewhere and the last tokens one by one.
        other: of the second sequence.
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
        """The larger of the errors of all rows and of decoded tokens alone, for which a model may
        sum in another order.
        """
        return max(
            median_error(self.again, exact.rows),
            median_error(self.again[-self.num_alone :], exact.rows[-self.num_alone :]),
            median_error(self.rows, exact.rows),
        )


@dataclass(frozen=True)
class Yardstick:
    """A reference for a model's logits.

    In half precision there are two. The first is what mlx-lm computes with the same weights in
    float32, with twice the error of mlx-lm's own logits in half precision as the limit. The second
    is these logits themselves: rounding may send a token to other experts than float32 does, and
    then logits that equal mlx-lm's are as far from float32 as they like. A model too large for a
    copy of its weights in float32 has the second alone, and its small faults can't be told from
    rounding.

    Attributes:
        logits: the reference.
        limit: the error that rounding explains.
    """

    logits: StockLogits
    limit: float

    @classmethod
    def of(cls, model: Module, prompts: Prompts) -> list[Yardstick]:
        """A model's references; it has to equal one of them.

        Raises:
            UnsuitableModelError: mlx-lm can't run the model.
            FailedCheckError: its answers depend on where a prompt is cut.
        """
        try:
            own = StockLogits(model, prompts)
        except Exception as error:
            # An unknown model may raise anything, for example if the device lacks an operation for
            # its dtype.
            raise UnsuitableModelError(
                f"mlx-lm can't run it on its own caches ({type(error).__name__}: {one_line(error)})"
            ) from error
        if own.rows.dtype == mx.float32:
            return [cls._itself(own, FLOAT32_LIMIT)]
        exact = _in_float32(model, prompts)
        if exact is None:
            return [cls._itself(own, HALF_LIMIT)]
        _refuse_other_cuts(exact, FLOAT32_LIMIT)
        # Plus one rounding of the logits themselves.
        eps = mx.finfo(own.rows.dtype).eps
        found: list[Yardstick] = [cls(exact, NUM_TIMES_HALF_ERROR * own.error(exact) + eps)]
        if own.own_error <= MAX_OWN_LIMITS * HALF_LIMIT:
            found.append(cls._itself(own, HALF_LIMIT))
        return found

    @classmethod
    def _itself(cls, own: StockLogits, limit: float) -> Yardstick:
        """mlx-lm's logits as they are, with a limit for those of one order of summation."""
        _refuse_other_cuts(own, limit)
        return cls(own, max(limit, NUM_TIMES_OWN_ERROR * own.own_error))


def _refuse_other_cuts(logits: StockLogits, limit: float) -> None:
    if logits.own_error > MAX_OWN_LIMITS * limit:
        raise FailedCheckError(
            f"its logits on mlx-lm's own caches differ by {logits.own_error:.2g} where a prompt is "
            "cut elsewhere"
        )


def _in_float32(model: Module, prompts: Prompts) -> StockLogits | None:
    """The logits with weights in float32; ``None`` if these take too much memory, or the model does
    not compute in float32.
    """
    narrow = filter(_is_half, dict(tree_flatten(model.parameters())).values())
    if sum(4 * weight.size for weight in narrow) > MAX_FLOAT32_NBYTES:
        return None
    try:
        with _widened(model):
            logits = StockLogits(model, prompts)
    except Exception:
        return None  # A kernel may require half precision.
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
    """The median over rows, ``[num_rows, vocab_size]``, of the norm of the difference over the norm
    of the expected row. Logits of minus infinity count if only one side has them.

    The median, because rounding may route single tokens of a mixture to other experts.
    """
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    never = mx.isneginf(logits) & mx.isneginf(expected)
    logits, expected = mx.where(never, 0, logits), mx.where(never, 0, expected)
    centred = expected - expected.mean(-1, keepdims=True)
    errors = mx.linalg.norm(logits - expected, axis=-1) / mx.linalg.norm(centred, axis=-1)
    median: float = mx.median(errors).item()  # type: ignore[assignment]
    return median
