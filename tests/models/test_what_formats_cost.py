"""What few bits of K and V change of a model's predictions, as docs/guide/memory.md says."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.fast_lane import mostly_slow
from paged_testing.biased_keys import llama_with_biased_keys

from benchmarks.cache.key_outliers import divergence, log_probabilities
from mlx_paged.options.config import KVBits


@mostly_slow(
    ("times", "at_8", "at_8_and_4", "at_4"),
    [(0, 0.0003, 0.034, 0.078), (20, 0.015, 0.080, 0.24), (50, 0.12, 0.20, 0.54)],
    quick=(1,),
)
def test_a_bias_of_k_costs_what_the_guide_says(
    times: float, at_8: float, at_8_and_4: float, at_4: float
):
    """Within half of it for other tokens, and fewer: the guide's are 512."""
    model = llama_with_biased_keys(times)
    ids = mx.random.randint(0, 256, (256,), key=mx.random.key(1)).tolist()
    exact = log_probabilities(model, None, ids)
    for name, expected in ((8, at_8), ("K:8,V:4", at_8_and_4), (4, at_4)):
        found = divergence(exact, log_probabilities(model, KVBits.parse(name), ids))
        assert found == pytest.approx(expected, rel=0.5)


def test_the_divergence_is_that_of_the_definition():
    exact, found = (mx.array([[p, 1 - p], [0.5, 0.5]]) for p in (0.5, 0.25))
    # 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75), and nothing in the other row.
    assert divergence(mx.log(exact), mx.log(found)) == pytest.approx(0.143841 / 2, rel=1e-5)
    never = mx.array([[0.0, -mx.inf]])
    assert divergence(never, never) == 0
