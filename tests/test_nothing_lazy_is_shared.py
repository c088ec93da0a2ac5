"""What one thread leaves for others is evaluated.

MLX's streams belong to threads, and so does an array that is still to be computed.
"""

from __future__ import annotations

import functools
import gc
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import CellType, FunctionType, MappingProxyType
from typing import Any, TypeVar

import mlx.core as mx
import pytest
from helpers.backends import METAL
from helpers.numpy_attention import PagedProblem, make_problem
from paged_testing.by_hand import dense_handle

import mlx_paged
from mlx_paged import generate, load, make_sampler
from mlx_paged.engine.request import Request
from mlx_paged.engine.sampling.sampler import sample
from mlx_paged.loading import demo_model_path
from mlx_paged.ops import kernels
from mlx_paged.options.sampling_params import SamplingParams

T = TypeVar("T")
CACHES: dict[str, Callable[[], mx.array]] = {
    "first_fence": kernels.first_fence,
    "scalar": lambda: kernels.scalar(0.125),
    "_no_sinks": lambda: kernels._no_sinks(2),
}
CONTAINERS = (dict, list, tuple, set, frozenset, MappingProxyType, CellType, functools.partial)


def in_a_thread_of_its_own(action: Callable[[], T]) -> T:
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(action).result()


@pytest.fixture
def nothing_is_kept() -> Iterator[None]:
    """The caches are empty, and hold nothing of the test afterwards."""

    def clear() -> None:
        for name in CACHES:
            getattr(kernels, name).cache_clear()

    clear()
    yield
    clear()


@pytest.fixture
def lazy_metal(nothing_is_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are as lazy as MLX's own.

    Each result needs every input, and nothing runs before it is asked for.
    """

    def kernel(name: str) -> Callable[..., list[mx.array]]:
        def call(
            *,
            inputs: list[mx.array],
            output_shapes: list[Any],
            output_dtypes: list[mx.Dtype],
            **_: Any,
        ) -> list[mx.array]:
            needed = sum((array.sum().astype(mx.float32) for array in inputs), start=mx.zeros(()))
            outputs = zip(output_shapes, output_dtypes, strict=True)
            return [mx.broadcast_to(needed, shape).astype(dtype) for shape, dtype in outputs]

        return call

    monkeypatch.setattr(kernels, "kernel", kernel)


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_what_kernels_keep_can_be_used_by_a_thread_that_did_not_make_it(
    make: Callable[[], mx.array], nothing_is_kept: None
) -> None:
    made = in_a_thread_of_its_own(make)
    assert make() is made
    in_a_thread_of_its_own(lambda: mx.eval(made + 1))


def attend(problem: PagedProblem) -> mx.array:
    kv = dense_handle(problem.kv.k[0], problem.kv.v[0])
    rows = mx.ones((problem.q.shape[0], kv.num_kv_heads, kv.key_dim))
    decoded = METAL.update_and_attend(problem.q, rows, rows, kv, *problem.args[2:])
    return decoded + METAL.attend(problem.q, kv, *problem.args[2:])


@pytest.mark.parametrize("context_len", [40, 300], ids=["direct", "merged"])
def test_a_step_that_is_not_evaluated_leaves_the_steps_of_other_threads_alone(
    context_len: int, lazy_metal: None
) -> None:
    problems = [make_problem([context_len], 1, seed=seed) for seed in range(3)]
    in_a_thread_of_its_own(lambda: attend(problems[0]))
    in_a_thread_of_its_own(lambda: mx.eval(attend(problems[1])))
    mx.eval(attend(problems[2]))


def test_a_model_that_one_thread_loads_runs_in_another() -> None:
    # The frequencies of such a model are no parameters: loading evaluates only these.
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = {"rope_scaling": scaling}
    model, tokenizer = in_a_thread_of_its_own(lambda: load(demo_model_path(), model_config=config))
    text = in_a_thread_of_its_own(lambda: generate(model, tokenizer, "1 2 3 4 ", max_tokens=3))
    assert text == generate(model, tokenizer, "1 2 3 4 ", max_tokens=3)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}], ids=str)
def test_a_draw_that_is_not_evaluated_leaves_the_draws_of_other_threads_alone(
    filters: dict[str, float],
) -> None:
    logits = mx.log(mx.array([[0.1, 0.2, 0.3, 0.4]]))
    mx.eval(logits)
    sampler = make_sampler(temp=1.0, **filters)
    in_a_thread_of_its_own(lambda: sampler(logits))
    for thread in (in_a_thread_of_its_own, lambda action: action()):
        assert 0 <= thread(lambda: sampler(logits).item()) < 4


def kept_arrays() -> dict[int, tuple[str, mx.array]]:
    """Every array that a module of the package holds, by id.

    In a name, a container, a cache, a closure or a class.
    """
    modules = [importlib.import_module(module.name) for module in walk_package()]
    found: dict[int, tuple[str, mx.array]] = {}
    seen: set[int] = set()
    todo = [(f"{m.__name__}.{name}", value) for m in modules for name, value in vars(m).items()]
    while todo:
        where, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, mx.array):
            found[id(value)] = where, value
        todo += [(where, inner) for inner in what_is_inside(value)]
    return found


def what_is_inside(value: Any) -> list[Any]:
    is_cache = hasattr(value, "cache_info") or type(value).__name__ == "_lru_list_elem"
    if is_cache or isinstance(value, CONTAINERS):
        return gc.get_referents(value)
    if isinstance(value, FunctionType):  # its globals are a module's
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
    if isinstance(value, type) and value.__module__.startswith("mlx_paged"):
        return list(vars(value).values())
    return []


def walk_package() -> Iterator[pkgutil.ModuleInfo]:
    for module in pkgutil.walk_packages(mlx_paged.__path__, "mlx_paged."):
        if not module.name.endswith("__main__"):
            yield module


def lazy_arrays() -> list[str]:
    """Where an array is kept that a thread which did not make it can't evaluate."""
    kept = kept_arrays().values()
    return in_a_thread_of_its_own(
        lambda: sorted({where for where, array in kept if is_lazy(array)})
    )


def is_lazy(array: mx.array) -> bool:
    try:
        mx.eval(array)
    except RuntimeError:
        return True
    return False


@functools.cache
def a_lazy_cache() -> mx.array:
    return mx.full((8,), 3.0)


def test_no_module_keeps_an_array_that_is_not_evaluated(
    lazy_metal: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def use_it_and_evaluate_nothing() -> None:
        for query_len in (1, 5, 20):
            attend(make_problem([300, 20], query_len))
        params = SamplingParams(temperature=0.7, top_p=0.9, top_k=3, seed=1)
        sample(mx.zeros((1, 8)), [0], Request("a", [1, 2], params).completions)

    in_a_thread_of_its_own(use_it_and_evaluate_nothing)
    caches = {f"mlx_paged.ops.kernels.{name}" for name in CACHES}
    assert {where for where, _ in kept_arrays().values()} >= caches
    assert lazy_arrays() == []

    # What is lazy is found, wherever a module keeps it.
    monkeypatch.setattr(a_lazy_cache, "__module__", "mlx_paged.ops.kernels")
    monkeypatch.setattr(kernels, "planted_cache", a_lazy_cache, raising=False)
    monkeypatch.setattr(kernels, "planted_table", {"a": [mx.arange(3)]}, raising=False)
    in_a_thread_of_its_own(a_lazy_cache)
    planted = ["planted_cache", "planted_table"]
    assert lazy_arrays() == [f"mlx_paged.ops.kernels.{name}" for name in planted]
