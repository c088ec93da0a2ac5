"""Which backend runs: what the names stand for on this machine, and what is said when one can't be
had.
"""

import mlx.core as mx
import pytest

from mlx_paged.ops import BACKENDS, AttentionShape, Backend, BackendError, KVFormat, choose_backend
from mlx_paged.ops.metal import MetalBackend
from mlx_paged.ops.reference import ReferenceBackend

SHAPES = [AttentionShape(8, 2, 128, 128, 16, KVFormat.dense("bfloat16"))]
UNKNOWN = [AttentionShape(8, 2, 72, 64, 4, KVFormat.dense("bfloat16"))]


@pytest.fixture
def without_metal(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)


def test_the_backends_have_three_names():
    assert BACKENDS == ("auto", "reference", "metal")


@pytest.mark.parametrize("shapes", [[], SHAPES, UNKNOWN], ids=["none", "known", "unknown"])
def test_reference_is_always_there(shapes):
    backend = choose_backend("reference", shapes)
    assert isinstance(backend, ReferenceBackend)
    assert backend.name == "reference"


def test_auto_is_the_reference_where_there_is_no_metal(without_metal):
    assert choose_backend("auto", SHAPES).name == choose_backend("auto", []).name == "reference"


def test_metal_without_metal_is_an_error_that_says_what_it_needs_and_what_to_use(without_metal):
    for _ in range(2):
        with pytest.raises(BackendError) as refusal:
            choose_backend("metal", SHAPES)
        assert str(refusal.value) == (
            "[backend] the Metal backend needs a Mac with Apple Silicon; "
            "choose the backend 'reference' or 'auto'"
        )


@pytest.mark.parametrize("name", ["cuda", "", "Metal", "REFERENCE"])
def test_an_unknown_backend_is_refused_with_the_names_there_are(name):
    with pytest.raises(BackendError) as refusal:
        choose_backend(name, SHAPES)
    assert (
        str(refusal.value)
        == f"[backend] unknown backend {name!r}; choose one of auto, reference, metal"
    )


def test_a_backend_error_is_a_value_error():
    assert issubclass(BackendError, ValueError)


@pytest.mark.parametrize("backend", [ReferenceBackend, MetalBackend])
def test_a_backend_has_the_operations_of_the_base_class_and_no_others(backend):
    public = {name for name in vars(backend) if not name.startswith("_")}
    assert public == Backend.__abstractmethods__ | {"name", "reads_unused_slots"}


def test_a_class_without_all_operations_is_not_a_backend():
    with pytest.raises(TypeError, match="abstract method"):
        type("Incomplete", (Backend,), {"name": "incomplete"})()
