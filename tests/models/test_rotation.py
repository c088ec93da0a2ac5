"""Queries and keys rotated together, as on a CPU, or each on its own, as on a GPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from helpers.qwen3_helpers import CACHES, make_cache

from mlx_paged.cache import Sequences
from mlx_paged.models import qwen3
from mlx_paged.ops import device

STEPS = ({"a": [3, 1, 4, 1, 5], "b": [9, 2]}, {"a": [6], "b": [5]}, {"a": [3, 5, 8], "b": [9]})


@pytest.mark.parametrize("kind", CACHES)
def test_it_makes_no_difference_to_a_bit(
    model: qwen3.Model, kind: str, monkeypatch: pytest.MonkeyPatch
):
    logits = {}
    is_cpu = device.is_cpu
    rotate = qwen3.Attention._rotate_both
    for together in (True, False):

        def rotate_both(self, q, k, positions, together=together):
            with monkeypatch.context() as patch:
                patch.setattr(device, "is_cpu", lambda: together)
                rotated = rotate(self, q, k, positions)
            assert device.is_cpu is is_cpu
            return rotated

        monkeypatch.setattr(qwen3.Attention, "_rotate_both", rotate_both)
        seqs = Sequences(make_cache(model, kind))
        logits[together] = []
        for batch in STEPS:
            with seqs.step({seq: len(tokens) for seq, tokens in batch.items()}) as step:
                tokens = mx.array([token for new in batch.values() for token in new])
                out = model(tokens, seqs.cache.layers, step.logit_rows)
                mx.eval(out, seqs.cache.arrays)
            logits[together].append(np.array(out.astype(mx.float32)))
    for together, alone in zip(logits[True], logits[False], strict=True):
        np.testing.assert_array_equal(together, alone)
