"""Parameters of which the fast lane, ``pytest -m "not slow"``, runs a few."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def mostly_slow(
    argnames: str | tuple[str, ...],
    argvalues: Iterable[Any],
    ids: Iterable[str] | Callable[[Any], str] | None = None,
    *,
    quick: Collection[int] = (0,),
    indirect: bool | list[str] = False,
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` with all values marked as slow but those at the places ``quick``,
    for tests whose many cases take seconds together. Where two of these are stacked, only what is
    quick in both is in the fast lane.
    """
    values = list(argvalues)
    assert quick and all(0 <= place < len(values) for place in quick), (quick, len(values))
    is_one = isinstance(argnames, str) and "," not in argnames
    params = [
        pytest.param(
            *((value,) if is_one else value), marks=() if place in quick else pytest.mark.slow
        )
        for place, value in enumerate(values)
    ]
    names = ids if ids is None or callable(ids) else list(ids)
    return pytest.mark.parametrize(argnames, params, indirect=indirect, ids=names)


# For a test of a module that is run in all ways to step: one that takes no step, or whose steps are
# the same in all ways.
in_one_way = pytest.mark.parametrize("run_ahead", ["ahead"], indirect=True)
