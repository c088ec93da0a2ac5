"""When the Metal backend is chosen, what is said when it can't be, and which kernels an operation
takes.
"""

from __future__ import annotations

import inspect
import warnings

import mlx.core as mx
import pytest
from numpy_attention import assert_matches_formula, make_problem

from mlx_paged.cache import KVCacheConfig, PagedKVCache
from mlx_paged.ops import (
    BackendError,
    KVHandle,
    kernels,
    paged_attention,
    reference,
    resolve_backend,
)
from mlx_paged.ops import metal as metal_backend
from mlx_paged.ops.backends import load_backend
from mlx_paged.ops.notices import say_once


@pytest.fixture(autouse=True)
def nothing_was_said():
    say_once.cache_clear()


@pytest.fixture
def a_mac(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)


def cache_of(head_dim: int, backend: str = "auto") -> PagedKVCache:
    config = KVCacheConfig.uniform(
        num_layers=1, num_kv_heads=1, head_dim=head_dim, dtype="float32", block_size=8, num_blocks=4
    )
    return PagedKVCache(config, backend=backend)


def test_auto_is_metal_on_a_mac(a_mac):
    assert (
        resolve_backend(),
        resolve_backend("auto", 128, 16),
        resolve_backend("metal", 128, 16),
    ) == ("metal",) * 3
    assert load_backend("auto", KVHandle.allocate(1, 1, 8, 32)) is metal_backend
    assert resolve_backend("reference", 128, 16) == "reference"
    assert cache_of(64).backend_name == "metal"


def test_auto_is_the_reference_where_the_default_device_is_the_cpu(a_mac, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert resolve_backend("auto", 128, 16) == "reference"
    with pytest.raises(
        BackendError,
        match=r"^\[backend\] the Metal backend needs mx.gpu as MLX's default device; use",
    ):
        resolve_backend("metal")


LACKS = [
    (72, 16, "head_dim 72 has no Metal kernel; there are kernels for 32, 64, 80, 96, 128, 256"),
    (128, 4, "block_size 4 has no Metal kernel; there are kernels for 8, 16, 32, 64"),
]


@pytest.mark.parametrize(("head_dim", "block_size", "lack"), LACKS, ids=["head_dim", "block_size"])
def test_metal_for_a_shape_without_kernels_is_refused_by_name(head_dim, block_size, lack, a_mac):
    with pytest.raises(BackendError) as refusal:
        resolve_backend("metal", head_dim, block_size)
    assert str(refusal.value) == f"[backend] {lack}; use --backend reference (or auto)"


@pytest.mark.parametrize(("head_dim", "block_size", "lack"), LACKS, ids=["head_dim", "block_size"])
def test_auto_for_a_shape_without_kernels_is_the_reference_and_says_so_once(
    head_dim, block_size, lack, a_mac
):
    with pytest.warns(UserWarning) as said:
        assert resolve_backend("auto", head_dim, block_size) == "reference"
    assert [str(warning.message) for warning in said] == [
        f"[backend] {lack}; plain MLX operations run instead"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_backend("auto", head_dim, block_size) == "reference"


def test_a_cache_keeps_the_backend_that_auto_stood_for(a_mac):
    with pytest.warns(UserWarning, match="head_dim 72 has no Metal kernel"):
        assert cache_of(72).backend_name == "reference"
    with pytest.raises(BackendError, match="head_dim 72 has no Metal kernel"):
        cache_of(72, "metal")


@pytest.mark.parametrize(
    ("query_len", "expected"),
    [(1, ["paged_attention"]), (8, ["paged_attention"]), (9, ["gather_blocks"])],
    ids=["decode", "longest_run", "prefill"],
)
def test_runs_of_up_to_eight_follow_the_table_and_longer_ones_are_gathered(
    query_len, expected, metal
):
    problem = make_problem([40], query_len)
    assert_matches_formula(paged_attention(*problem.args, backend="metal"), problem)
    assert [call.kernel.removeprefix("mlx_paged_") for call in metal] == expected


def test_a_large_group_is_gathered_and_that_is_said(metal):
    problem = make_problem([40], 1, num_kv_heads=1, group=17)
    with pytest.warns(
        UserWarning,
        match=r"^\[metal\] 17 query heads per KV head are more than .* \(16\); K/V are gathered",
    ):
        out = paged_attention(*problem.args, backend="metal")
    assert_matches_formula(out, problem)
    assert [call.kernel for call in metal] == ["mlx_paged_gather_blocks"]


def test_a_kernel_is_made_once(metal):
    made = []
    emulated = mx.fast.metal_kernel
    mx.fast.metal_kernel = lambda *args, **kwargs: (
        made.append(kwargs["name"]) or emulated(*args, **kwargs)
    )
    try:
        kernels.kernel.cache_clear()
        for length in (5, 20, 300):
            paged_attention(*make_problem([length], 1).args, backend="metal")
    finally:
        mx.fast.metal_kernel = emulated
    assert made == ["mlx_paged_paged_attention", "mlx_paged_merge_partitions"]


def test_what_a_step_has_in_common_is_packed_once_for_all_layers(metal):
    problem = make_problem([40, 20], 1)
    for _ in range(3):
        paged_attention(*problem.args, backend="metal")
    plans = {id(call.inputs["plan"]) for call in metal}
    assert len(metal) == 3
    assert len(plans) == 1


def test_both_backends_have_the_same_operations_with_the_same_arguments():
    names = [
        "reshape_and_cache",
        "paged_attention",
        "paged_prefill_attention",
        "attend",
        "update_and_attend",
    ]
    for name in [*names, "gather_blocks", "copy_blocks", "zero_blocks"]:
        ours, theirs = (
            list(inspect.signature(getattr(module, name)).parameters)
            for module in (metal_backend, reference)
        )
        assert ours == theirs, name
