"""When the Metal backend is chosen, what is said when it can't be, and which kernels an operation
takes.
"""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

import mlx.core as mx
import pytest
from helpers.backends import METAL
from helpers.fast_lane import mostly_slow
from helpers.numpy_attention import assert_matches_formula, before_the_step, make_problem

import mlx_paged
from mlx_paged.cache import KVCacheConfig, PagedKVCache
from mlx_paged.ops import (
    AttentionShape,
    BackendError,
    KVFormat,
    KVHandle,
    choose,
    choose_backend,
    kernels,
)
from mlx_paged.ops.metal import MetalBackend
from mlx_paged.options.config import KVBits


@pytest.fixture
def a_mac(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(choose, "working_backend", lambda shapes: MetalBackend())


def shape_of(key_dim: int, value_dim: int, block_size: int) -> AttentionShape:
    return AttentionShape(1, 2, key_dim, value_dim, block_size, KVFormat.dense("float32"))


def cache_of(head_dim: int, backend: str = "auto") -> PagedKVCache:
    config = KVCacheConfig.uniform(
        num_layers=1, num_kv_heads=1, head_dim=head_dim, dtype="float32", block_size=8, num_blocks=4
    )
    return PagedKVCache(config, backend=backend)


def test_auto_is_metal_on_a_mac(a_mac):
    shapes = [shape_of(128, 128, 16), shape_of(64, 64, 16)]
    for backend in (choose_backend("auto", shapes), choose_backend("metal", shapes)):
        assert isinstance(backend, MetalBackend)
        assert backend.name == "metal"
    assert choose_backend("reference", shapes).name == "reference"
    assert cache_of(64).backend.name == "metal"


def test_auto_is_the_reference_where_the_default_device_is_the_cpu(a_mac, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert choose_backend("auto", [shape_of(128, 128, 16)]).name == "reference"
    with pytest.raises(
        BackendError,
        match=r"^\[backend\] the Metal backend needs mx.gpu as MLX's default device; choose",
    ):
        choose_backend("metal", [])


LACKS = {
    "block_size": (
        (128, 128, 4),
        "block_size 4 has no Metal kernel; there are kernels for 8, 16, 32, 64",
    ),
}
lacks = pytest.mark.parametrize(("shape", "lack"), LACKS.values(), ids=LACKS)


@lacks
def test_metal_for_a_shape_without_kernels_is_refused_by_name(shape, lack, a_mac):
    with pytest.raises(BackendError) as refusal:
        choose_backend("metal", [shape_of(64, 64, 16), shape_of(*shape)])
    assert str(refusal.value) == f"[backend] {lack}; choose the backend 'reference' or 'auto'"


@lacks
def test_auto_for_a_shape_without_kernels_is_the_reference_and_says_so_once(shape, lack, a_mac):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            shapes = [shape_of(64, 64, 16), *[shape_of(*shape)] * 2]
            assert choose_backend("auto", shapes).name == "reference"
    assert [str(warning.message) for warning in said] == [
        f"[backend] {lack}; plain MLX operations run instead"
    ]


@lacks
def test_slabs_of_another_shape_than_was_chosen_for_are_refused(shape, lack, metal):
    key_dim, value_dim, block_size = shape
    kv = KVHandle.allocate(2, 1, block_size, key_dim, value_dim)
    for work in (lambda: METAL.copy_blocks(kv, [(0, 1)]), lambda: METAL.gather_blocks(kv, [1], 1)):
        with pytest.raises(ValueError) as refusal:
            work()
        assert str(refusal.value).endswith(f"_blocks] {lack}")
    assert metal == []


QUANTISED = KVFormat.quantised(KVBits(8, 8), 64, 64, "float32")


def test_quantised_rows_of_other_widths_run_in_plain_mlx(a_mac):
    shape = AttentionShape(1, 2, 320, 64, 16, QUANTISED)
    with pytest.warns(UserWarning, match="key_dim 320 has no Metal kernel"):
        assert choose_backend("auto", [shape]).name == "reference"


def test_a_cache_keeps_the_backend_that_auto_stood_for(a_mac):
    with pytest.warns(UserWarning, match=NO_ATTENTION["head_dim"][1]):
        assert cache_of(72).backend.name == "metal"


NO_ATTENTION = {
    "head_dim": (
        AttentionShape(1, 2, 72, 72, 16, KVFormat.dense("float32")),
        "head_dim 72 has no Metal kernel; there are kernels for 32, 64, 80, 96, 128, 192, 256, 512",
    ),
    "two_widths": (
        AttentionShape(1, 2, 128, 72, 16, KVFormat.dense("float32")),
        "value_dim 72 has no Metal kernel; there are kernels for "
        "32, 64, 80, 96, 128, 192, 256, 512",
    ),
    "latents": (
        AttentionShape(1, 2, 448, 64, 16, KVFormat.dense("float32"), holds_latents=True),
        "latents of width 448 with rotated keys of 64 have no Metal kernel",
    ),
    "rotated_latents": (
        AttentionShape(
            *(1, 2, 512, 64, 16, KVFormat.quantised(KVBits(4, 8), 512, 64, "float32")),
            holds_latents=True,
        ),
        "4-bit latents are rotated, and rotating the output back would take another launch",
    ),
    "many_heads_of_latents": (
        AttentionShape(1, 33, 512, 64, 16, KVFormat.dense("float32"), holds_latents=True),
        "33 heads on shared latents are slower in the attention kernel, which takes up to 32",
    ),
    "large_group": (
        AttentionShape(1, 129, 64, 64, 16, KVFormat.dense("float32")),
        "the attention kernel supports up to 128 query heads per KV head, got 129",
    ),
}


@pytest.mark.parametrize(("shape", "lack"), NO_ATTENTION.values(), ids=NO_ATTENTION)
def test_a_shape_without_a_kernel_for_attention_is_gathered_and_that_is_said_once(
    shape, lack, a_mac
):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            assert choose_backend("auto", [shape, shape]).name == "metal"
    assert [str(warning.message) for warning in said] == [
        f"[backend] {lack}; K/V are gathered for MLX's own attention instead"
    ]


@pytest.mark.parametrize(
    ("query_len", "expected"),
    [(1, ["paged_attention"]), (8, ["paged_attention"]), (9, ["gather_blocks"])],
    ids=["decode", "longest_run", "prefill"],
)
def test_runs_of_up_to_eight_follow_the_table_and_longer_ones_are_gathered(
    query_len, expected, metal
):
    problem = make_problem([40], query_len)
    assert_matches_formula(METAL.attend(*problem.args), problem)
    assert [call.kernel.removeprefix("mlx_paged_") for call in metal] == expected


DECODES = {"direct": ([40, 7], 1), "merged": ([40, 300], 1), "mixed": ([40, 300, 20], [1, 8, 2])}


@mostly_slow("kind", DECODES)
def test_a_decode_has_one_frame_of_ours_below_the_call_of_a_kernel(kind, metal, monkeypatch):
    ours = str(Path(mlx_paged.__file__).parent)
    stacks = []
    made = kernels.kernel

    def watched(name):
        def call(**arguments):
            frames = (frame for frame, _ in traceback.walk_stack(None))
            stacks.append(
                [f.f_code.co_name for f in frames if f.f_code.co_filename.startswith(ours)]
            )
            return made(name)(**arguments)

        return call

    monkeypatch.setattr(kernels, "kernel", watched)
    problem = make_problem(*DECODES[kind], sinks=True)
    kv, k, v = before_the_step(problem)
    out = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_matches_formula(out, problem)
    assert len(stacks) == {"direct": 1, "merged": 2, "mixed": 4}[kind]
    assert stacks == [["update_and_attend"]] * len(stacks)


def test_a_kernel_is_made_once(metal):
    made = []
    emulated = mx.fast.metal_kernel
    mx.fast.metal_kernel = lambda *args, **kwargs: (
        made.append(kwargs["name"]) or emulated(*args, **kwargs)
    )
    try:
        kernels.kernel.cache_clear()
        for length in (5, 20, 300):
            METAL.attend(*make_problem([length], 1).args)
    finally:
        mx.fast.metal_kernel = emulated
    assert made == ["mlx_paged_paged_attention", "mlx_paged_merge_partitions"]


def test_what_a_step_has_in_common_is_packed_once_for_all_layers(metal):
    problem = make_problem([40, 20], 1)
    for _ in range(3):
        METAL.attend(*problem.args)
    plans = {id(call.inputs["plan"]) for call in metal}
    assert len(metal) == 3
    assert len(plans) == 1
