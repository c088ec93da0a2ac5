"""No arrays and no clock: a scheduler's same calls give the same plan on every machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

IMPORTS = """
import sys
import mlx_paged.engine.request, mlx_paged.engine.scheduling.scheduler
print(sorted({"mlx", "numpy", "transformers"} & {name.partition(".")[0] for name in sys.modules}))
for name in ("batch", "scheduler", "prefix_cache", "request_queues"):
    assert not hasattr(sys.modules["mlx_paged.engine.scheduling." + name], "time")
assert not hasattr(sys.modules["mlx_paged.engine.speculation.speculation"], "time")
"""

PLANS = """
import hashlib, random, zlib
from helpers import scheduler_helpers

# The tokens of the simulated model must not depend on the seed either.
scheduler_helpers.hash = lambda value: zlib.crc32(repr(value).encode())
rng, plans = random.Random(3), hashlib.sha256()
engine = scheduler_helpers.FakeEngine(24, swap_blocks=5, max_num_batched_tokens=24)
for step in range(400):
    if rng.random() < 0.4:
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        engine.add(f"r{step}", prompt, max_tokens=rng.randrange(1, 20), n=rng.choice([1, 1, 2]),
                   priority=rng.randrange(3))
    batch = engine.step()
    plans.update(repr([(p.completion.seq_id, *p[1:]) for p in batch.scheduled]).encode())
    plans.update(repr((batch.transfers, sorted(batch.new_block_ids))).encode())
assert engine.counts["preempted"] and engine.counts["swap_ins"] and engine.counts["forks"]
print(plans.hexdigest())
"""


def run(program: str, hash_seed: int) -> str:
    environment = os.environ | {
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_scheduler_imports_no_arrays_and_no_clock():
    assert run(IMPORTS, 0) == "[]\n"


@pytest.mark.slow
def test_the_same_calls_give_the_same_plan_whatever_the_order_of_sets():
    assert run(PLANS, 1) == run(PLANS, 2)
