"""The stand-ins for kernels that tests and benchmarks put steps in flight with."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from helpers.cache_helpers import rows, uniform
from paged_testing.by_hand import step_of
from paged_testing.lazy_metal import ChainedReferenceBackend, fused_operations, lazy_metal

from mlx_paged.cache import PagedKVCache, Sequences
from mlx_paged.ops import AttentionParams, KVHandle, kernels
from mlx_paged.ops.metal import MetalBackend

CONFIG = uniform(head_dim=32)  # that kernels are made for
SCALE = 0.3


def decodes(seqs: Sequences, num_steps: int, waits: bool) -> list[np.ndarray]:
    """The results of decodes, each built while the ones before are lazy, unless it ``waits``."""
    k, v = rows(20 + num_steps, config=CONFIG)
    seqs.append("s", k[:, :20], v[:, :20])
    results = []
    for position in range(20, 20 + num_steps):
        with seqs.step({"s": 1}):
            row = slice(position, position + 1)
            layers = enumerate(seqs.cache.layers)
            outs = [
                layer.update_and_attend(k[i, row], k[i, row], v[i, row], scale=SCALE)
                for i, layer in layers
            ]
        if waits:
            mx.eval(outs, seqs.cache.arrays)
        results.append(outs)
    # The last fence stands for all that came before it.
    mx.eval([layer.kv.arrays[-1] for layer in seqs.cache.layers])
    return [np.array(mx.stack(outs)) for outs in results]


def test_computed_results_of_lazy_steps_are_those_of_plain_mlx():
    expected = decodes(Sequences(PagedKVCache(CONFIG, "reference")), 12, waits=True)
    with lazy_metal(computes=True):
        seqs = Sequences(PagedKVCache(CONFIG, "auto"))
        assert seqs.cache.backend.name == "metal" and seqs.cache.backend.writes_in_place
        actual = decodes(seqs, 12, waits=False)
    for lazy, plain in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(lazy, plain)


def test_a_read_sees_the_writes_called_before_it_and_none_called_after_it():
    backend = ChainedReferenceBackend()
    kv = KVHandle.allocate(2, 1, 8, 4, 4)
    gathered = []
    for value in (1, 2, 3):
        step = step_of([[1]], [value], [1], 8)
        row = mx.full((1, 1, 4), value, dtype=mx.float32)
        backend.reshape_and_cache((row,), (-row,), kv, step.slot_mapping)
        gathered.append(backend.gather_blocks(kv, [1], 3))
    assert [keys[0, :, 0].tolist() for keys, _ in gathered] == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    assert gathered[-1][1][0, :, 0].tolist() == [-1, -2, -3]


def test_each_operation_binds_the_fence_and_leaves_the_next_one():
    backend = ChainedReferenceBackend()
    kv = KVHandle.allocate(3, 1, 8, 4, 4)
    step = step_of([[1]], [1], [1], 8)
    row = mx.ones((1, 1, 4))
    params = AttentionParams(SCALE)
    fences = []
    for run in (
        lambda: backend.reshape_and_cache((row,), (row,), kv, step.slot_mapping),
        lambda: backend.update_and_attend(row, row, row, kv, step, params),
        lambda: backend.attend(row, kv, step, params),
        lambda: backend.gather_blocks(kv, [1], 1),
        lambda: backend.copy_blocks(kv, [(1, 2)]),
        lambda: backend.zero_blocks(kv, [1]),
    ):
        run()
        assert kv.fence is not None
        assert all(kv.fence is not fence for fence in fences)
        fences.append(kv.fence)
    mx.eval(kv.fence)
    assert (
        kv.k[0][2, 0, 0].tolist() == [1] * 4 and kv.k[0][1].tolist() == mx.zeros((1, 8, 4)).tolist()
    )


def test_without_computing_the_metal_backend_runs_and_a_call_returns_zeros():
    with lazy_metal():
        seqs = Sequences(PagedKVCache(CONFIG, "metal"))
        assert type(seqs.cache.backend) is MetalBackend
        with seqs.step({"s": 5}):
            rows_of_step = mx.ones((5, 3, 32))
            out = seqs.cache.layers[0].update_and_attend(*[rows_of_step] * 3, scale=SCALE)
            assert seqs.cache.layers[0].kv.fence.shape == kernels.FENCE[0]
            assert seqs.cache.layers[0].kv.fence.dtype == kernels.FENCE[1]
        assert out.shape == (5, 3, 32)
        assert mx.all(seqs.cache.layers[0].kv.k[0] == 0).item()


def test_the_kernels_are_back_afterwards():
    metal_kernel, rms_norm = mx.fast.metal_kernel, mx.fast.rms_norm
    with lazy_metal(), fused_operations():
        assert mx.fast.metal_kernel is not metal_kernel and mx.fast.rms_norm is not rms_norm
    assert mx.fast.metal_kernel is metal_kernel and mx.fast.rms_norm is rms_norm
    assert kernels.kernel.cache_info().currsize == 0


def test_a_fused_operation_is_one_primitive_of_the_same_shape(tmp_path):
    x, weight, offset = mx.ones((2, 3, 1, 8)), mx.ones(8), mx.array([4, 5])
    mx.eval(x, weight, offset)
    with fused_operations():
        for result in (
            mx.fast.rms_norm(x, weight, 1e-5),
            mx.fast.rope(x, 8, traditional=False, base=1e4, scale=1.0, offset=offset),
            mx.fast.scaled_dot_product_attention(x, x, x, scale=SCALE),
        ):
            graph = tmp_path / "graph.dot"
            mx.export_to_dot(str(graph), result)
            assert graph.read_text().count("shape=rectangle") == 1
            assert result.shape == x.shape
