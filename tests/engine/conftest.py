"""The ways to step: waiting for each step, one step ahead, and one step ahead with drafts."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.drafting import Oracle, eager_speculation, looks_up

from mlx_paged.cache import PagedKVCache
from mlx_paged.engine import build


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
