"""A fixed share of the fuzzed inputs, of which ``tests/fuzz/fuzz_inputs.py`` runs 2,000."""

from __future__ import annotations

import random

import pytest
from fuzz_families import DEADLINES, FAMILIES
from fuzzing import Case, Defect, run_case, run_family
from helpers.fast_lane import mostly_slow

from mlx_paged.options.sampling_params import SamplingParams

COUNTS = {"library": 500, "requests": 20, "folders": 60, "chat": 20, "server": 300}
COUNTS |= {"drafts": 4, "deterministic": 4}


def assert_no_defects(name: str, indices: range) -> None:
    report = run_family(name, FAMILIES[name], indices, seed=0, deadline=DEADLINES[name])
    assert report.ends.total() == len(indices)
    assert not report.defects, "\n".join(report.defects)


@pytest.mark.parametrize("name", FAMILIES)
@mostly_slow("part", range(4))
def test_each_input_is_taken_or_refused_in_one_clear_line(name: str, part: int):
    size = COUNTS[name] // 4
    assert_no_defects(name, range(part * size, (part + 1) * size))


def raise_(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("run", "end"),
    [
        (lambda: None, "taken"),
        (lambda: raise_(ValueError("[room] name must be right")), "refused"),
        (lambda: SamplingParams(name=3), "refused"),
        (lambda: raise_(ValueError("name must be right")), "defect"),
        (lambda: raise_(ValueError("[room] another must be right")), "defect"),
        (lambda: raise_(ValueError("[room] name\nmust be right")), "defect"),
        (lambda: raise_(ValueError("[room] name " + "x" * 1000)), "defect"),
        (lambda: raise_(AttributeError("[room] name")), "defect"),
        (lambda: raise_(SystemExit(2)), "defect"),
        (lambda: raise_(Defect("wrong tokens")), "defect"),
        (lambda: [None for _ in iter(int, 1)], "hang"),
    ],
)
def test_the_fuzzer_knows_a_clear_refusal_from_a_defect(run, end: str):
    deadline = 0.2 if end == "hang" else 60.0
    found, defect = run_case(Case("a case", run, ("name",)), deadline)
    assert found == end and (defect is None) == (end in ("taken", "refused"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_case_is_made_from_its_seed_alone(name: str):
    titles = {
        FAMILIES[name](random.Random(f"3/{name}/5")).title.split(" at 0x")[0] for _ in range(2)
    }
    assert len(titles) == 1
