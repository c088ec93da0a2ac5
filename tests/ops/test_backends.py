"""Which backend runs: what the names stand for on this machine, and what is said when one can't be
had.
"""

import mlx.core as mx
import pytest

from mlx_paged.ops import (
    BACKENDS,
    AttentionMetadata,
    BackendError,
    KVHandle,
    attend,
    copy_blocks,
    gather_blocks,
    paged_attention,
    paged_prefill_attention,
    reference,
    reshape_and_cache,
    resolve_backend,
    zero_blocks,
)
from mlx_paged.ops.backends import load_backend


def call(operation, backend):
    """Each operation on a tiny handle with ``backend``; returns nothing of interest."""
    kv = KVHandle.allocate(2, 1, 8, 32)
    rows = mx.ones((1, 1, 32))
    metadata = AttentionMetadata.build([[0]], [1], [1], 8)
    if operation is reshape_and_cache:
        return operation(rows, rows, kv, [0], backend=backend)
    if operation is gather_blocks:
        return operation(kv, [0], backend=backend)
    if operation is zero_blocks:
        return operation(kv, [0], backend=backend)
    if operation is copy_blocks:
        return operation(kv, [(0, 1)], backend=backend)
    return operation(rows, kv, metadata, 1.0, backend=backend)


OPERATIONS = [
    reshape_and_cache,
    paged_attention,
    paged_prefill_attention,
    attend,
    gather_blocks,
    copy_blocks,
    zero_blocks,
]
operations = pytest.mark.parametrize(
    "operation", OPERATIONS, ids=lambda operation: operation.__name__
)


KV = KVHandle.allocate(2, 1, 8, 32)


@pytest.fixture
def without_metal(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)


def test_the_backends_have_three_names():
    assert BACKENDS == ("auto", "reference", "metal")


def test_reference_is_always_there():
    assert (resolve_backend("reference"), load_backend("reference", KV)) == ("reference", reference)


def test_auto_is_the_reference_where_there_is_no_metal(without_metal):
    names = resolve_backend("auto"), resolve_backend(), resolve_backend("auto", 128, 16)
    assert (*names, load_backend("auto", KV)) == ("reference", "reference", "reference", reference)


@pytest.mark.parametrize(
    "ask", [resolve_backend, lambda name: load_backend(name, KV)], ids=["resolve", "load"]
)
def test_metal_without_metal_is_an_error_that_says_what_it_needs_and_the_way_out(
    ask, without_metal
):
    message = r"^\[backend\] the Metal backend needs a Mac with Apple Silicon; use --backend reference \(or auto\)$"
    for _ in range(2):
        with pytest.raises(BackendError, match=message):
            ask("metal")


@pytest.mark.parametrize("name", ["cuda", "", "Metal", "REFERENCE"])
def test_an_unknown_backend_is_refused_with_the_names_there_are(name):
    with pytest.raises(BackendError) as refusal:
        resolve_backend(name)
    assert (
        str(refusal.value)
        == f"[backend] unknown backend {name!r}; choose one of auto, reference, metal"
    )


def test_a_backend_error_is_a_value_error():
    assert issubclass(BackendError, ValueError)


@operations
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_every_operation_runs_with(backend, operation):
    call(operation, backend)


@operations
def test_every_operation_refuses_metal_where_there_is_none(operation, without_metal):
    with pytest.raises(BackendError, match="the Metal backend needs a Mac with Apple Silicon"):
        call(operation, "metal")


@operations
def test_every_operation_refuses_an_unknown_backend(operation):
    with pytest.raises(BackendError, match="unknown backend 'cuda'"):
        call(operation, "cuda")


@pytest.mark.parametrize(
    "name", ["reshape_and_cache", "paged_attention", "paged_prefill_attention", "gather_blocks"]
)
def test_auto_calls_the_backend_it_stands_for(name, monkeypatch, without_metal):
    called = []
    operation = getattr(reference, name)
    monkeypatch.setattr(reference, name, lambda *args: called.append(name) or operation(*args))
    call({o.__name__: o for o in OPERATIONS}[name], "auto")
    assert name in called
