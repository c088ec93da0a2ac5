"""The detector of copied slabs: what it judges, and that it speaks once."""

from __future__ import annotations

import warnings

import mlx.core as mx
import pytest

from mlx_paged.ops import CopyDetector
from mlx_paged.ops.copy_detector import MAX_TOKENS, MIN_SLAB_BYTES

SLAB = MIN_SLAB_BYTES


def step(detector: CopyDetector, allocated: int, num_tokens: int = 1, slab: int = SLAB) -> bool:
    """A step that allocates so many bytes; whether the detector spoke."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        detector.begin_step(num_tokens, slab)
        held = mx.zeros((allocated,), mx.uint8)
        mx.eval(held)
        del held
        detector.end_step(slab)
    return bool(said)


@pytest.fixture(autouse=True)
def no_buffers_kept_for_reuse():
    mx.clear_cache()


def test_a_step_that_takes_less_than_a_slab_is_silent():
    assert not step(CopyDetector(3), SLAB - 2**16)


def test_a_step_that_takes_a_slab_is_reported_with_both_numbers():
    detector = CopyDetector(3)
    detector.begin_step(1, SLAB)
    held = mx.zeros((SLAB,), mx.uint8)
    mx.eval(held)
    with pytest.warns(
        UserWarning, match=rf"took \d{{8}} bytes, a slab has {SLAB}: MLX copies slabs instead"
    ):
        detector.end_step(SLAB)


def test_it_speaks_once():
    detector = CopyDetector(3)
    assert [step(detector, SLAB) for _ in range(3)] == [True, False, False]


def test_it_judges_the_first_steps_only():
    detector = CopyDetector(2)
    assert [step(detector, size) for size in (0, 0, SLAB)] == [False, False, False]


@pytest.mark.parametrize(
    ("num_tokens", "slab"),
    [(MAX_TOKENS + 1, SLAB), (1, SLAB - 1)],
    ids=["a_prefill", "a_small_slab"],
)
def test_what_could_take_a_slab_for_other_reasons_is_not_judged_and_does_not_count(
    num_tokens, slab
):
    detector = CopyDetector(1)
    assert not step(detector, 2 * SLAB, num_tokens, slab)
    assert step(detector, SLAB)


def test_an_aborted_step_is_not_judged():
    detector = CopyDetector(1)
    detector.begin_step(1, SLAB)
    mx.eval(mx.zeros((SLAB,), mx.uint8))
    assert not step(detector, 0, num_tokens=MAX_TOKENS + 1)
    assert step(detector, SLAB)


def test_peak_memory_is_left_alone_where_nothing_is_judged():
    mx.eval(mx.zeros((SLAB,), mx.uint8))
    peak = mx.get_peak_memory()
    step(CopyDetector(0), 0)
    assert mx.get_peak_memory() == peak
