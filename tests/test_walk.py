"""A token's way from ``LLM.generate`` to the backend and back to text can be read."""

from __future__ import annotations

from pathlib import Path

from paged_testing.walk import lines, walk

MOST_CALLS, MOST_FILES = 31, 16


def test_the_way_of_a_token_is_as_short_as_the_design_shows_it():
    calls = walk()
    assert len(calls) <= MOST_CALLS
    assert len({call.file for call in calls}) <= MOST_FILES
    text = (Path(__file__).parents[1] / "DESIGN.md").read_text()
    assert "\n".join(lines(calls)) in text
