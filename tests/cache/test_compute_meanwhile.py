"""A CPU computes a layer while Python builds the next one; a GPU is left to MLX."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from helpers.cache_helpers import CONFIG, assert_holds, rows

from mlx_paged.cache import Sequences
from mlx_paged.ops import device

Attend = Callable[[], list[list[mx.array]]]


@pytest.fixture
def attend(seqs: Sequences, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """One decode in all layers; returns what each call of ``mx.async_eval`` was given."""

    def run() -> list[list[mx.array]]:
        begun: list[list[mx.array]] = []
        k, v = rows(9)
        seqs.append("s", k[:, :8], v[:, :8])
        begin = mx.async_eval

        def note(*arrays: mx.array) -> None:
            begun.append(list(arrays))
            begin(*arrays)

        monkeypatch.setattr(mx, "async_eval", note)
        with seqs.step({"s": 1}):
            results = [
                layer.update_and_attend(k[i, 8:], k[i, 8:], v[i, 8:], scale=0.5)
                for i, layer in enumerate(seqs.cache.layers)
            ]
            assert all(any(out is result for result in results) for (out,) in begun)
            mx.eval(results, seqs.cache.arrays)
        assert_holds(seqs, "s", k, v)
        return begun

    return run


def test_a_cpu_begins_with_each_layer_when_it_is_built(attend: Attend):
    if not device.is_cpu():
        pytest.skip("MLX computes on a GPU here")
    assert len(attend()) == len(CONFIG.layers)


def test_on_a_gpu_no_layer_ends_a_command_buffer(attend: Attend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "is_cpu", lambda: False)
    assert attend() == []
