"""The check at start-up that writes in place happen, in order and without a copy; and what runs
when they don't.
"""

from __future__ import annotations

import warnings

import mlx.core as mx
import pytest
from helpers.numpy_attention import assert_matches_formula, make_problem
from paged_testing.by_hand import dense_handle, slots_of

from mlx_paged.ops import KVHandle, choose_backend, in_place, kernels
from mlx_paged.ops.in_place import check_writes_in_place, writes_in_place
from mlx_paged.ops.metal import MetalBackend

CHECK_KERNELS = ["mlx_paged_reshape_and_cache", "mlx_paged_gather_blocks"]


@pytest.fixture(autouse=True)
def as_many_turns_as_on_a_device(metal, monkeypatch):
    monkeypatch.setattr(in_place, "NUM_TURNS", 8)


def broken(monkeypatch, name: str, change) -> None:
    """Calls of a kernel are ``change(run, *args)``, where ``run(*args)`` is what they were."""
    launch = getattr(kernels, name)
    monkeypatch.setattr(
        kernels, name, lambda *args: lambda: change(lambda *args: launch(*args)(), *args)
    )


def test_a_device_that_writes_in_place_passes(metal):
    assert check_writes_in_place() is None
    kernels_seen = [call.kernel for call in metal]
    assert kernels_seen == CHECK_KERNELS * in_place.NUM_TURNS + CHECK_KERNELS[:1]


def test_a_lost_write_is_found(metal, monkeypatch):
    def lose_the_third(run, k, v, kv, slots):
        return [kv.fence] if k[0][0, 0, 0].item() == 3 else run(k, v, kv, slots)

    broken(monkeypatch, "write_slots", lose_the_third)
    expected = "writes in place are lost or out of order on this device (turns [3] of 8)"
    assert check_writes_in_place() == expected


def test_a_write_before_an_earlier_read_is_found(metal, monkeypatch):
    # Reads happen one turn late, as if nothing held the next write back.
    late = []

    def read_late(run, kv, plan):
        shape = (in_place.NUM_KV_HEADS * plan.num_tokens[0], in_place.HEAD_DIM)
        late.append(mx.zeros(shape, kv.dtype))
        return late[-1], late[-1], kv.fence

    def fill(run, k, v, kv, slots):
        fence = run(k, v, kv, slots)
        if late:
            late[-1][:] = k[0][0, 0, 0]
        return fence

    broken(monkeypatch, "gather", read_late)
    broken(monkeypatch, "write_slots", fill)
    assert "out of order on this device" in check_writes_in_place()


def test_a_slab_that_is_written_in_a_copy_is_found(metal, monkeypatch):
    def write_a_copy(run, k, v, kv, slots):
        copy = dense_handle(mx.array(kv.k[0]) * 1, kv.v[0] * 1)
        mx.eval(copy.arrays)
        return run(k, v, copy, slots)

    broken(monkeypatch, "write_slots", write_a_copy)
    assert "are lost or out of order" in check_writes_in_place()


def test_a_write_that_costs_a_slab_is_found(metal, monkeypatch):
    def write_and_copy(run, k, v, kv, slots):
        fence = run(k, v, kv, slots)
        mx.eval(kv.k[0] * 1)
        return fence

    broken(monkeypatch, "write_slots", write_and_copy)
    slab = (
        KVHandle.allocate(in_place.NUM_BLOCKS, in_place.NUM_KV_HEADS, 16, 128, 128, in_place.FORMAT)
        .k[0]
        .nbytes
    )
    assert check_writes_in_place().endswith(f"so MLX copies the slab of {slab} bytes")


def test_what_another_thread_takes_meanwhile_is_no_copy(metal, monkeypatch):
    """As where weights are read beside the check."""
    look, looks = in_place._nbytes_of_a_write, iter([2**30, 2**30, 0])
    monkeypatch.setattr(in_place, "_nbytes_of_a_write", lambda kv: look(kv) + next(looks))
    assert check_writes_in_place() is None
    assert next(looks, None) is None


def test_the_check_leaves_the_peak_of_the_process_as_it_is(metal):
    mx.eval(mx.zeros((2**24,), mx.uint8))
    peak = mx.get_peak_memory()
    assert check_writes_in_place() is None
    assert mx.get_peak_memory() == peak


@pytest.fixture
def without_writes_in_place(metal, monkeypatch):
    monkeypatch.setattr(in_place, "check_writes_in_place", lambda: "this device fails the test")
    writes_in_place.forget()
    with pytest.warns(
        UserWarning,
        match=r"^\[metal\] this device fails the test; slots are written by donated scatter",
    ):
        assert not writes_in_place()
    return metal


def test_the_backend_that_is_chosen_knows_what_the_device_does(without_writes_in_place):
    assert choose_backend("metal", [])._scatter is not None


def test_the_failure_is_said_once(without_writes_in_place):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not writes_in_place()


def test_without_writes_in_place_no_kernel_writes_and_attention_is_the_same(
    without_writes_in_place,
):
    trace, backend = without_writes_in_place, MetalBackend(writes_in_place=False)
    problem = make_problem([5, 300, 40], [1, 8, 20])
    rows = [
        mx.concatenate(
            [dense[part][-n:] for dense, n in zip(problem.dense, [1, 8, 20], strict=True)]
        )
        for part in (1, 2)
    ]
    slots = [slot for table, n, q in zip(problem.tables, [5, 300, 40], [1, 8, 20], strict=True)
             for slot in (table[p // 16] * 16 + p % 16 for p in range(n - q, n))]  # fmt: skip
    for slot in slots:
        problem.kv.k[0][slot // 16, :, slot % 16] = 77.0
    q, kv, *rest = problem.args
    assert_matches_formula(backend.update_and_attend(q, *rows, kv, *rest), problem)
    assert_matches_formula(backend.attend(*problem.args), problem)
    free = sorted(
        set(range(kv.num_blocks)) - {block for table in problem.tables for block in table}
    )
    backend.reshape_and_cache(
        (rows[0][:1],), (rows[1][:1],), kv, slots_of([free[0] * 16], kv.block_size)
    )
    backend.copy_blocks(kv, [(free[0], free[1])])
    backend.zero_blocks(kv, [free[0]])
    assert mx.array_equal(kv.k[0][free[1], :, 0], rows[0][0])
    assert not kv.k[0][free[0]].any().item()
    assert {call.kernel.removeprefix("mlx_paged_") for call in trace} == {
        "paged_attention",
        "merge_partitions",
        "gather_blocks",
    }
    assert all(not call.written_inputs for call in trace)
