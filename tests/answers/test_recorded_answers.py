"""The suite ``canitoolcall``: 469 recorded answers of nine families, with its own runner."""

from __future__ import annotations

import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

WHEEL = Path(__file__).parent / "canitoolcall-0.1.1-py3-none-any.whl"
# Passes, and passes but for white space at the ends of texts.
EXPECTED = {
    "deepseek": (85, 0),
    "gemma4": (47, 1),
    "glm": (51, 0),
    "gpt-oss": (51, 0),
    "kimi": (44, 5),
    "llama": (33, 1),
    "mistral": (47, 0),
    "qwen3-hermes": (50, 0),
    "qwen3-xml": (54, 0),
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("suite")
    with zipfile.ZipFile(WHEEL) as archive:
        archive.extractall(folder)
    paths = [str(folder), str(Path(__file__).parent)]
    sys.path[:0] = paths
    try:
        from canitoolcall.adapters.worker import replay
        from canitoolcall.chunking import DEFAULT_STRATEGIES, ChunkStrategy
        from canitoolcall.fixtures import load_families, load_fixtures
        from canitoolcall.runner import evaluate
        from suite_adapter import MlxPaged

        def run(fixture):
            # Beside the suite's own strategies, one character at a time and others at random.
            strategies = [*DEFAULT_STRATEGIES, *(ChunkStrategy("char", seed) for seed in (0, 3))]
            family = families[fixture.family]
            reply = replay(MlxPaged(), fixture, family, strategies)
            return evaluate(fixture, family, reply, include_observed="all")

        families, fixtures = load_families(), load_fixtures()
        yield SimpleNamespace(run=run, fixtures=fixtures)
    finally:
        for path in paths:
            sys.path.remove(path)
        for name in [name for name in sys.modules if name.startswith("canitoolcall")]:
            del sys.modules[name]
        sys.modules.pop("suite_adapter", None)


def test_the_suite_has_469_answers(suite):
    assert Counter(fixture.family for fixture in suite.fixtures) == {
        family: sum(counts) for family, counts in EXPECTED.items()
    }
    assert len(suite.fixtures) == 469


@pytest.mark.parametrize("family", EXPECTED)
def test_all_answers_of_a_family_are_read_and_every_cut_is_like_the_whole(suite, family):
    statuses: Counter[str] = Counter()
    wrong = []
    for fixture in suite.fixtures:
        if fixture.family != family:
            continue
        result = suite.run(fixture)
        statuses[result.status.value] += 1
        wrong += [
            (fixture.id, check.check, check.strategy, check.detail)
            for check in result.checks
            # Of characters in other pieces the suite says no more than a line of its report.
            if check.status.value in ("fail", "error")
            or (check.check == "stream_equals_nonstream" and check.status.value != "pass")
        ]
    assert wrong == []
    assert (statuses["pass"], statuses["soft_pass"]) == EXPECTED[family]
