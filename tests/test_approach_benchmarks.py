"""The benchmarks `approaches`, `throughput_curves`, `identity` and `restart`: that they run,
and that an approach which keeps something wrong is found out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_host_benchmarks import line_of

from benchmarks.cache import approach_report, approach_sides, approaches, restart
from benchmarks.cache.approach_measures import Prediction, TeacherForcing
from benchmarks.serving.throughput_scenarios import SampleRequest

NAMES = [
    "no cache",
    "contiguous",
    "paged",
    "prefix sharing",
    "sharing, 8 bits",
    "sharing, K8V4",
    "sharing, 4 bits",
]
NAMES += ["sharing, window and sinks", "sharing, speculation", "sharing, disk tier", "mlx-lm"]


@pytest.mark.slow
def test_a_quick_run_of_approaches_measures_and_checks_each(tmp_path: Path):
    results = line_of("approaches", tmp_path / "approaches.json", "--quick")["results"]
    rows = results["approaches"]
    assert list(rows) == list(results["checks"]) == NAMES
    for name, row in rows.items():
        assert row["tokens_per_second"]["together"] > 0 and row["ttft"]["cold"] > 0, name
        assert row["longest_context"]["nbytes_held"] <= 256 * 2048, name
    exact = [name for name, row in rows.items() if row["same_tokens"] == 1.0]
    assert set(exact) >= set(NAMES) - {
        "sharing, 8 bits",
        "sharing, K8V4",
        "sharing, 4 bits",
        "sharing, window and sinks",
    }
    contexts = [rows[name]["longest_context"]["num_tokens"] for name in NAMES[2:8]]
    # 15 blocks, as one is the null block; rows of 32 numbers take 40, 32 and 24 bytes for 128.
    assert contexts == [240, 240, 800, 1008, 1344, None]
    assert [name for name in NAMES if rows[name]["survives"]] == ["sharing, disk tier", "mlx-lm"]


@pytest.mark.slow
def test_quick_curves_have_both_sides_at_each_point(tmp_path: Path):
    results = line_of("throughput_curves", tmp_path / "curves.json", "--quick")["results"]
    assert [each["num_requests"] for each in results["at_once"]] == [1, 3]
    assert [each["prefix"] for each in results["shared_prefix"]] == [0, 64]
    for each in results["at_once"]:
        assert all(side["tokens_per_second"] > 0 for side in each["sides"].values())
        assert set(each["sides"]) == {"mlx_paged", "mlx-lm"}


@pytest.mark.slow
def test_a_quick_run_of_identity_finds_the_same_one_twice(tmp_path: Path):
    (row,) = line_of("identity", tmp_path / "identity.json", "--quick")["results"]
    assert row["first"]["digest"] == row["next"]["digest"]
    assert row["first"]["num_arrays"] == row["next"]["num_arrays"] == 32
    assert row["kept"] == 64  # one digest, in hexadecimal


@pytest.mark.slow
def test_a_quick_restart_finds_the_whole_blocks_of_each_prompt(tmp_path: Path):
    rows = line_of("restart", tmp_path / "restart.json", "--quick", "--lengths", "33")["results"]
    assert [(row["length"], row["num_cached_tokens"]) for row in rows] == [(33, 32)]
    assert all(row["seconds"]["computed"] > 0 and row["nbytes_on_disk"] > 0 for row in rows)


def restart_row(length: int, *turns: tuple[float, float]) -> dict[str, Any]:
    """Of one length: seconds computed, and read, of each turn."""

    def answer(seconds: float) -> dict[str, Any]:
        return asdict(restart.Answer(seconds, 0.5, 32, [1], 1000, True))

    computed, read = ([answer(seconds) for seconds in way] for way in zip(*turns, strict=True))
    runs = {"written": [answer(9.0)], "computed": computed, "page cache": read}
    return restart.row_of(length, runs)


def test_runs_that_are_added_count_with_those_that_are_there(tmp_path: Path):
    path, setting = tmp_path / "restart.json", {"model": "demo", "blas": "one"}
    rows = [restart_row(500, (4.0, 1.0)), restart_row(4000, (10.0, 2.0))]
    path.write_text(json.dumps({"setting": setting, "results": rows}))
    added = restart.added_to(path, setting, [restart_row(4000, (20.0, 2.0))])
    assert added[0] == rows[0]
    assert added[1]["seconds"] == {"written": 9.0, "computed": 15.0, "page cache": 2.0}
    assert added[1]["computed_over"] == {"page cache": 7.5}
    assert {way: len(runs) for way, runs in added[1]["runs"].items()} == {
        "written": 2,
        "computed": 2,
        "page cache": 2,
    }
    with pytest.raises(SystemExit, match="has blas: one, and here it is other"):
        restart.added_to(path, setting | {"blas": "other"}, rows)


def row(**changes: Any) -> dict[str, Any]:
    """Of an approach that keeps what it should."""
    kept = {
        "longest_context": {"num_tokens": 752, "refused_beyond": True, "of_budget": 1.0},
        "perplexity_change": 0.0,
        "same_choice": 1.0,
        "same_tokens": 1.0,
        "same_tokens_alone": 1.0,
        "found_again": 1.0,
    }
    return kept | changes


EXACT = approach_sides.Ours("exact", None)
LOSSY = approach_sides.Ours("lossy", None, {"kv_format": 8}, False, approach_sides.Bound(0.01, 0.9))
WINDOW = approach_sides.Ours("window", None, {"window": 64}, False)


def missed(approach: approach_sides.Ours, found: dict[str, Any], is_float32: bool = True) -> int:
    checks = approach_report.checks_of(approach, found, is_float32, has_enough_text=True)
    return sum(not each["met"] for each in checks)


def test_a_cache_that_keeps_what_it_should_meets_every_check():
    assert [missed(approach, row()) for approach in (EXACT, LOSSY, WINDOW)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("approach", "found"),
    [
        (EXACT, row(same_tokens=0.999)),
        (EXACT, row(perplexity_change=-2e-4)),
        (EXACT, row(found_again=0.99)),
        (EXACT, row(longest_context=row()["longest_context"] | {"of_budget": 1.01})),
        (EXACT, row(longest_context=row()["longest_context"] | {"refused_beyond": False})),
        (LOSSY, row(perplexity_change=-0.011)),
        (LOSSY, row(same_choice=0.89)),
        (WINDOW, row(same_tokens_alone=0.9)),
    ],
)
def test_whatever_an_approach_should_keep_is_missed_by_name(approach, found):
    assert missed(approach, found) == 1


def test_tokens_may_differ_by_rounding_in_half_precision_only():
    found = row(same_tokens=0.98, perplexity_change=1e-3)
    assert missed(EXACT, found, is_float32=False) == 0
    assert missed(EXACT, found) == 2


def test_tokens_are_compared_by_place_as_far_as_they_were_given():
    expected = {"a": [1, 2, 3, 4], "b": [5, 6]}
    assert approach_report.share_of_same({"a": [1, 9], "b": [5, 6]}, expected) == 0.75


def test_teacher_forcing_notes_the_losses_of_a_text_and_lets_nothing_else_be_drawn():
    logits = np.random.default_rng(0).normal(size=(4, 1, 10))
    text = [3, 1, 4, 1, 5, 9]
    forced = TeacherForcing(text)
    drawn = [
        int(forced(mx.array(text[:place]), mx.array(logits[place - 2], mx.float32)).argmax())
        for place in range(2, 6)
    ]
    assert drawn == text[2:]
    log_sums = np.log(np.exp(logits[:, 0]).sum(-1))
    losses = log_sums - logits[np.arange(4), 0, text[2:]]
    np.testing.assert_allclose(list(forced.losses.values()), losses, atol=1e-5)
    assert list(forced.choices.values()) == logits[:, 0].argmax(-1).tolist()


def test_perplexity_is_that_of_the_mean_loss():
    prediction = Prediction([np.log(2.0), np.log(8.0)], [1, 2])
    assert prediction.perplexity == pytest.approx(4.0)
    assert prediction.same_choice(Prediction([0.0, 0.0], [1, 3])) == 0.5


def test_without_a_cache_answers_of_several_lengths_are_those_of_the_model_alone():
    def model(tokens: mx.array) -> mx.array:
        """The next token is the sum of all before, within 7."""
        sums = mx.cumsum(tokens, axis=1) % 7
        return (mx.arange(7) == sums[..., None]).astype(mx.float32)

    side = approach_sides.WithoutCache(model)
    for name, prompt, count in (("a", [1, 2], 3), ("b", [5], 2), ("c", [2, 2], 1)):
        side.add(SampleRequest(name, prompt, count))
    answers: dict[str, list[int]] = {}
    while side.running:
        for name, token in side.step():
            answers.setdefault(name, []).append(token)
    assert answers == {"a": [3, 6, 5], "b": [5, 3], "c": [4]}


def test_an_approach_that_there_is_not_is_refused_by_name():
    with pytest.raises(SystemExit, match="there is no 'pagd'; there are 'paged'"):
        approaches.chosen({"paged": EXACT}, ["pagd"])
