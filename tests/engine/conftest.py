"""Both ways to step: waiting for each step, and one step ahead."""

from __future__ import annotations

import pytest

from mlx_paged.cache import PagedKVCache


@pytest.fixture(params=[False, True], ids=["waiting", "ahead"])
def run_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What engines with a paged cache do by default; ``usefixtures("run_ahead")`` runs a module's
    tests both ways.
    """
    monkeypatch.setattr(PagedKVCache, "can_run_ahead", request.param)
    is_ahead: bool = request.param
    return is_ahead
