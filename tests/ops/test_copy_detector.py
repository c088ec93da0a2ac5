"""The detector of copied slabs: what it judges, and that it speaks once."""

from __future__ import annotations

import warnings

import mlx.core as mx
import pytest

from mlx_paged.ops import CopyDetector, KVHandle
from mlx_paged.ops.copy_detector import MAX_TOKENS
from mlx_paged.ops.formats import AffineFormat, KVFormat

FORMATS = [
    KVFormat.dense("float32"),
    KVFormat.dense("bfloat16"),
    KVFormat(AffineFormat("float16", 8), AffineFormat("float16", 4)),
]


def slabs(format: KVFormat = FORMATS[0]) -> KVHandle:
    return KVHandle.allocate(8, 2, 16, 64, 64, format)


def write(kv: KVHandle) -> None:
    """One slot of every slab, as a step does."""
    for slab in kv.slabs:
        slab[3, :, 5] = 1


def step(detector: CopyDetector, kv: KVHandle, num_tokens: int = 1, copies: bool = True) -> bool:
    """A step, in which somebody else holds a slab or not; whether the detector spoke."""
    held = kv.slabs[-1][:1] if copies else None
    mx.eval(held)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        detector.begin_step(num_tokens, [kv])
        write(kv)
        detector.end_step([kv])
    return bool(said)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_steps_that_write_in_place_are_silent(format: KVFormat):
    detector, kv = CopyDetector(3), slabs(format)
    assert [step(detector, kv, copies=False) for _ in range(4)] == [False] * 4


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_slab_that_is_copied_is_reported_whichever_it_is(format: KVFormat):
    for which in range(len(slabs(format).slabs)):
        detector, handles = CopyDetector(3), [slabs(format), slabs(format)]
        detector.begin_step(1, handles)
        held = handles[1].slabs[which][:1]
        mx.eval(held)
        for kv in handles:
            write(kv)
        num_slabs = 2 * len(handles[0].slabs)
        with pytest.warns(
            UserWarning, match=rf"copied 1 of {num_slabs} slabs: MLX copies slabs instead"
        ):
            detector.end_step(handles)


def test_it_speaks_once():
    detector, kv = CopyDetector(3), slabs()
    assert [step(detector, kv) for _ in range(3)] == [True, False, False]


def test_it_judges_the_first_steps_only():
    detector, kv = CopyDetector(2), slabs()
    assert [step(detector, kv, copies=copies) for copies in (False, False, True)] == [False] * 3


def test_a_prefill_is_not_judged_and_does_not_count():
    detector, kv = CopyDetector(1), slabs()
    assert not step(detector, kv, num_tokens=MAX_TOKENS + 1)
    assert step(detector, kv, num_tokens=MAX_TOKENS)


def test_an_aborted_step_is_not_judged():
    detector, kv = CopyDetector(1), slabs()
    detector.begin_step(1, [kv])
    held = kv.k[0][:1]
    mx.eval(held)
    write(kv)
    assert not step(detector, kv, num_tokens=MAX_TOKENS + 1, copies=False)
    assert step(detector, kv)


def test_peak_memory_is_left_alone():
    detector, kv = CopyDetector(3), slabs()
    mx.eval(mx.zeros((2**26,), mx.uint8))
    peak = mx.get_peak_memory()
    assert [step(detector, kv, copies=copies) for copies in (False, True)] == [False, True]
    assert mx.get_peak_memory() == peak
