"""What most folders of tests use: a tiny random model, both kinds of cache, a C++ compiler for the
tests that run kernels on the Metal emulator, and an end for tests that hang.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.engine_runs import tiny_models
from helpers.lanes import mark_lanes
from helpers.mlx_compiler import prepare_compiler
from metal_emulator.fixtures import compiler

from mlx_paged.cache import PagedKVCache
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.thread import EngineThread
from mlx_paged.models import qwen3

__all__ = ["compiler"]
pytest_plugins = ["helpers.hangs"]


def pytest_configure(config: pytest.Config) -> None:
    # Where it is set, each process that tests start compiles every module of the package, and
    # pytest all tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # The first is ignored behind a script's "&" and the second under nohup, and so in programs that
    # are started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if not hasattr(config, "workerinput"):
        prepare_compiler()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_lanes(items)
    # The longest tests, on the largest models, come first. Near the end, a process that is done
    # takes over tests of another: it would load these models again, and the other wait for it.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/real/"))


def pytest_collection_finish() -> None:
    # A million objects are there now and stay. A collection, of which the tests of what is freed
    # ask for hundreds, would look at all of them each time: for half a second.
    gc.collect()
    gc.freeze()


# Files of tests that look at an engine's own thread, which ends with the engine.
_OF_THREADS = (
    "test_async_engine",
    "test_compiled_decode",
    "test_engine_failures",
    "test_engine_interrupts",
    "test_engine_programs",
    "test_engine_threads",
    "test_llm",
    "test_run_ahead",
    "test_structured_outputs",
)


@pytest.fixture(autouse=True)
def few_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines take the threads that others have left: MLX keeps a thread of the system for each
    stream that a process has ever had, and those of thousands of engines are more than a container
    may have.
    """
    # Not the fixture monkeypatch, which would then end after all others.
    with pytest.MonkeyPatch.context() as patched:
        if request.path.stem not in _OF_THREADS:
            patched.setattr(Engine, "_new_thread", EngineThread.shared)
        yield


@pytest.fixture(scope="session")
def mypy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of a run: mypy reads the libraries once and keeps what it found,
    which it also takes for a copy of a file.
    """
    return tmp_path_factory.getbasetemp().parent / "mypy_cache"


@pytest.fixture(scope="session")
def model() -> qwen3.Model:
    return tiny_models()[0]


@pytest.fixture(params=["basic", "paged", "paged, one step ahead"])
def cache_options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Arguments of `generate_step` for each kind of cache."""
    kind, *ahead = request.param.split(", ")
    monkeypatch.setattr(PagedKVCache, "can_run_ahead", bool(ahead))
    return {"kv": kind, "kv_cache_bytes": "40blocks"}
