"""No append copies a slab, whatever the pool's size; slabs grow inside the budget. Counted in
bytes, not in seconds.
"""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from helpers.cache_helpers import assert_holds

from mlx_paged.cache import KVCacheConfig, PagedKVCache, Sequences
from mlx_paged.ops import CopyDetector, choose


def config(num_slots: int) -> KVCacheConfig:
    return KVCacheConfig.uniform(
        num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, num_blocks=-(-num_slots // 16)
    )


def rows(num_tokens: int) -> mx.array:
    return mx.random.normal((2, num_tokens, 4, 64))


def extra_bytes(seqs: Sequences, new_tokens: dict[str, int]) -> int:
    """Peak memory of one step above what was held before it: writes and attention of all layers."""
    k = rows(sum(new_tokens.values()))
    mx.eval(k)
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    with seqs.step(new_tokens):
        outputs = [
            seqs.cache.layers[layer].update_and_attend(k[layer], k[layer], k[layer], scale=0.1)
            for layer in range(2)
        ]
        mx.eval(outputs, seqs.cache.arrays)
    return max(0, mx.get_peak_memory() - base)


def filled_cache(num_slots: int) -> Sequences:
    seqs = Sequences(PagedKVCache(config(num_slots), initial_blocks=config(num_slots).num_blocks))
    for seq in ("a", "b"):
        seqs.append(seq, rows(100), rows(100))
    # Leave a hole, so that block tables are not one run of adjacent blocks.
    seqs.free("a")
    seqs.append("b", rows(40), rows(40))
    seqs.append("c", rows(200), rows(200))
    return seqs


@pytest.mark.parametrize("num_slots", [1_000, 100_000])
@pytest.mark.parametrize(
    "new_tokens", [{"b": 1}, {"b": 1, "c": 1}, {"b": 3, "c": 1}, {"new": 40}], ids=str
)
def test_a_step_costs_memory_for_its_own_tokens_whatever_the_size_of_the_pool(
    new_tokens: dict[str, int], num_slots: int
):
    seqs = filled_cache(num_slots)
    # A few times the K/V that the step itself reads and writes; a copy of one slab of 100,000 slots
    # would be 100 MB.
    touched = sum(seqs.seq_len(seq) + n + 16 for seq, n in new_tokens.items())
    bound = 6 * touched * seqs.cache.config.nbytes_per_token
    assert extra_bytes(seqs, new_tokens) <= bound < config(100_000).nbytes // 4 // 10


def peak_of_a_prompt(num_layers: int) -> int:
    """Peak memory of a prompt of 500 tokens above what was held before, in layers that follow one
    another.
    """
    cache = PagedKVCache(KVCacheConfig.uniform(num_layers, 4, 64, num_blocks=32), initial_blocks=32)
    x = mx.random.normal((500, 4, 64))
    mx.eval(x)
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    with Sequences(cache).step({"a": 500}):
        for layer in cache.layers:
            x = layer.update_and_attend(x, x * 2, x * 3, scale=0.1) + 1
        mx.eval(x, cache.arrays)
    return mx.get_peak_memory() - base


def test_a_prompt_holds_its_rows_of_a_few_layers_at_a_time():
    # MLX computes some hundred operations behind Python at most, which is a few layers; how
    # many depends on the machine. Twelve layers that held their rows of K and V to the step's
    # end would add all of these.
    nbytes_rows_of_a_layer = 2 * 500 * 4 * 64 * 4
    more = peak_of_a_prompt(24) - peak_of_a_prompt(12)
    assert more <= 12 * nbytes_rows_of_a_layer / 2


def test_the_memory_counter_sees_a_slab_that_is_copied(monkeypatch):
    monkeypatch.setattr(
        choose, "is_metal_available", lambda: False
    )  # kernels write into a slab in any case
    seqs = filled_cache(100_000)
    holder = seqs.cache.arrays[0][0:1]
    mx.eval(holder)
    assert extra_bytes(seqs, {"b": 1}) > config(100_000).nbytes // 4 // 2


def step_of_one_token(seqs: Sequences) -> None:
    k = rows(1)
    with seqs.step({"b": 1}):
        outputs = [
            layer.update_and_attend(new, new, new, scale=0.1)
            for layer, new in zip(seqs.cache.layers, k, strict=True)
        ]
        mx.eval(outputs, seqs.cache.arrays)


def test_a_cache_that_watches_for_copies_leaves_the_peak_of_the_process_as_it_is():
    seqs = filled_cache(100_000)
    seqs.cache._copy_detector = CopyDetector(3)  # as on Metal
    mx.eval(mx.zeros((2**28,), mx.uint8))  # a prefill, say
    peak = mx.get_peak_memory()
    for _ in range(4):
        step_of_one_token(seqs)
    assert mx.get_peak_memory() == peak


def test_a_slab_of_any_layer_that_a_step_copies_is_reported_once():
    seqs = filled_cache(1_000)
    seqs.cache._copy_detector = CopyDetector(3)
    step_of_one_token(seqs)
    held = seqs.cache.layers[1].kv.v[0][0:1]
    mx.eval(held)
    with pytest.warns(UserWarning, match="MLX copies slabs instead of writing into them") as said:
        step_of_one_token(seqs)
    mx.eval(holds := seqs.cache.layers[0].kv.k[0][0:1])
    step_of_one_token(seqs)
    assert len(said) == 1 and held.size and holds.size


def test_materialize_leaves_no_view_behind_that_would_make_the_next_write_copy():
    seqs = filled_cache(100_000)
    held = [seqs.materialize(seq, layer) for seq in ("b", "c") for layer in range(2)]
    assert extra_bytes(seqs, {"b": 1}) < config(100_000).nbytes // 4 // 100
    assert len(held) == 4


def test_slabs_start_small_and_double_within_the_budget():
    full = KVCacheConfig.uniform(
        num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, num_blocks=300
    )
    seqs = Sequences(PagedKVCache(full, initial_blocks=64))
    k, v = rows(300 * 16), rows(300 * 16)
    held = []
    for start in range(0, 300 * 16, 160):
        seqs.append("a", k[:, start : start + 160], v[:, start : start + 160])
        blocks = seqs.stats().nbytes_held // full.nbytes_per_block
        if not held or held[-1] != blocks:
            held.append(blocks)
    assert held == [65, 129, 257, 301]
    assert seqs.stats().nbytes_held == full.nbytes
    assert_holds(seqs, "a", k, v)


@pytest.mark.parametrize("num_logit_rows", [None, [1, 0], [3, 1]])
def test_a_finished_step_keeps_no_arrays_until_the_garbage_collector_runs(num_logit_rows):
    seqs = filled_cache(1_000)
    k = rows(4)
    mx.eval(k)
    gc.collect()
    gc.disable()
    try:
        held = []
        for _ in range(3):
            with seqs.step({"b": 3, "c": 1}, num_logit_rows) as step:
                for layer, new in zip(seqs.cache.layers, k, strict=True):
                    wanted = new if step.logit_rows is None else new[step.logit_rows]
                    mx.eval(layer.update_and_attend(wanted, new, new, scale=0.1))
                mx.eval(seqs.cache.arrays)
            del step, wanted, layer, new
            mx.synchronize()
            held.append(mx.get_active_memory())
        assert held[0] == held[1] == held[2]
    finally:
        gc.enable()
