"""kill -9 of writers, of the cache tool and of engines at random moments, while others read; the
long run is `benchmarks/cache/kill_writers.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from paged_testing import killed_engines, killed_writers
from paged_testing.store_kills import StoreKills


@pytest.mark.slow
@pytest.mark.parametrize("max_nbytes", [killed_writers.ROOMY, killed_writers.TIGHT])
def test_no_byte_is_wrong_after_writers_were_killed(tmp_path: Path, max_nbytes: int):
    findings = StoreKills(tmp_path, max_nbytes, seed=1).run(12, kills_per_look=4)
    assert findings.problems == []
    assert findings.num_kills >= 12 and findings.num_looks >= 2
    assert findings.counts["reads"] > 0 and findings.counts["blocks written"] > 0


@pytest.mark.slow
def test_no_token_is_wrong_after_engines_were_killed(tmp_path: Path):
    findings = killed_engines.EngineKills(tmp_path, seed=1).run(6, kills_per_look=4)
    assert findings.problems == []
    assert findings.num_kills >= 6 and findings.num_looks >= 1
    assert findings.counts["answers"] >= 40 and findings.counts["prompt tokens from disk"] > 0
