"""Models that most tests here share, engines that hold nothing at the end of a test, and the ways
to step: waiting for each step, one step ahead, and one step ahead with drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.nn as nn
import pytest
from helpers import engine_runs
from helpers.drafting import Oracle, eager_speculation, looks_up

from mlx_paged.cache import PagedKVCache
from mlx_paged.engine import build
from mlx_paged.models import qwen3


@pytest.fixture(autouse=True)
def engines_hold_nothing_at_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines of ``make_engine`` hold no request, block or message when a test is over and what it
    has left unfinished is aborted.
    """
    made: list[Any] = []
    monkeypatch.setattr(engine_runs, "made_engines", made)
    yield
    for engine in made:
        if engine.thread.failure is None:
            engine.abort_all()
            engine_runs.run(engine)
            engine_runs.assert_nothing_held(engine)


@pytest.fixture(scope="session")
def demo() -> tuple[nn.Module, Any]:
    """The demo model and its tokenizer."""
    return engine_runs.load_demo()


@pytest.fixture(scope="session")
def demo_model(demo: tuple[nn.Module, Any]) -> nn.Module:
    return demo[0]


@pytest.fixture(scope="session")
def kernel_model() -> qwen3.Model:
    """A random model of a head_dim that kernels and groups of 32 are made for."""
    return engine_runs.small_model(head_dim=32)


# Without Metal, engines of the other folders' tests wait for each step, too. Tests of drafts that
# need not run in all ways are in the fast lane.
@pytest.fixture(
    params=[
        "ahead",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("waiting", "drafting")),
    ]
)
def run_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What engines with a paged cache do by default; ``usefixtures("run_ahead")`` runs a module's
    tests in all ways.
    """
    is_ahead = request.param != "waiting"
    monkeypatch.setattr(PagedKVCache, "can_run_ahead", is_ahead)
    if request.param == "drafting":

        def eager(num_draft_tokens: int, model: Any, *args: Any) -> Any:
            is_tiny = model.args.vocab_size < 100
            return eager_speculation(model.args.vocab_size, Oracle(model) if is_tiny else looks_up)

        monkeypatch.setattr(build, "speculation_of", eager)
    return is_ahead


@pytest.fixture
def is_drafting(request: pytest.FixtureRequest, run_ahead: bool) -> bool:
    """Whether engines make drafts by default, so that a step may give several tokens."""
    return "drafting" in request.node.name
