"""The benchmarks of what a step costs on the host run, with each side.

Some run in a process of their own: the simulated device stays loaded, and the memory of a process
is that of all tests before.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from helpers.model_zoo import config_of

from benchmarks.__main__ import main as run_benchmark
from benchmarks.kernels import decode
from benchmarks.lib.card import COMMAND
from benchmarks.lib.models import random_model


def line_of(name: str, out: Path, *arguments: str, in_process: bool = True) -> Any:
    """The JSON line of a benchmark, which it prints last and writes to ``out``."""
    arguments = (*arguments, "--out", str(out))
    if in_process:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as said:
            patch.setattr(sys, "argv", ["python -m benchmarks", name, *arguments])
            assert run_benchmark() == 0
        printed = said.getvalue()
    else:
        command = [*COMMAND, name, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    assert printed.splitlines()[-1] == out.read_text().strip()
    return json.loads(out.read_text())


def results_of(name: str, out: Path, *arguments: str, in_process: bool = True) -> Any:
    return line_of(name, out, *arguments, in_process=in_process)["results"]


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None,
    reason="the simulated device is made on Linux, with a C compiler",
)
def test_overlap_runs_each_side_beside_the_simulated_device(tmp_path: Path):
    short = ["--turns", "1", "--steps", "2", "--device-ms", "2", "--streams", "1", "3"]
    results = results_of("overlap", tmp_path / "overlap.json", *short, in_process=False)
    assert [result["num_streams"] for result in results] == [1, 3]
    for result in results:
        ours = {"ours, waiting", "ours, ahead", "ours, compiled"}
        assert set(result["milliseconds"]) == {*ours, "mlx-lm"}


@pytest.mark.slow
def test_a_mixed_load_is_run_on_each_machine_with_each_target(tmp_path: Path):
    short = ["--targets", "0.2", "--answers", "4", "--prompt", "1000", "--prompts", "1"]
    results = results_of("mixed_load", tmp_path / "mixed.json", *short)
    assert len(results) == 5 * 2
    for fixed, clocked in zip(results[::2], results[1::2], strict=True):
        assert (fixed["target"], fixed["throughput_lost"], fixed["budget"]) == (None, 0.0, 512)
        assert clocked["target"] == 0.2 and clocked["between_tokens"]["p99"] <= 0.4
        # 1 prompt of 1,000 tokens; 4 tokens of answers in each of its steps.
        num_prompts = clocked["prompt_tokens_per_second"] / 1000
        assert clocked["first_token"] == pytest.approx(1 / num_prompts)


@pytest.mark.slow
def test_what_a_deterministic_engine_computes_again_is_counted(tmp_path: Path):
    results = results_of("deterministic", tmp_path / "deterministic.json")
    computed = [each["prompt_tokens"] for each in results]
    assert [each["deterministic"] for each in results] == [False, True] * 3
    # A second turn computes the answer again, and what was behind the last chunk; a document none.
    assert computed[0] < computed[1] and computed[2] < computed[3] and computed[4] == computed[5]


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None,
    reason="the simulated device is made on Linux, with a C compiler",
)
def test_structured_outputs_are_measured_by_themselves_and_in_a_step(tmp_path: Path):
    short = ["--turns", "1", "--steps", "2", "--device-ms", "0", "--tokens", "5", "--batch", "2"]
    out = tmp_path / "structured.json"
    (result,) = results_of("structured_outputs", out, *short, "--vocab", "600", in_process=False)
    assert result["vocab_size"] == 600 and result["batch"] == 2
    assert {"set_up", "compile", "host", "device"} < set(result["masks_us"])
    assert [step["device_ms"] for step in result["steps"]] == [0.0]


@pytest.mark.slow
def test_one_stream_runs_each_side(tmp_path: Path):
    results = results_of("one_stream", tmp_path / "one.json", "--turns", "1", "--steps", "1")
    assert set(results["milliseconds"]) == {"mlx-lm", "paged", "basic"}


@pytest.mark.slow
def test_states_on_disk_are_worth_what_they_weigh(tmp_path: Path):
    short = ["--requests", "12", "--seeds", "1", "--states", "3"]
    results = results_of("states_on_disk", tmp_path / "disk.json", *short)
    for result in results.values():
        assert result["LFM2-8B-A1B, 3 states"]["states_written_per_turn"] > 0.5
        for found in result.values():
            assert found["computed_again"] <= found["computed_again_without_disk"]
            assert found["state_nbytes_per_turn"] <= 2 * found["kv_nbytes_per_turn"]


@pytest.mark.slow
def test_checkpoint_policies_run_on_synthetic_agents_and_on_a_trace(tmp_path: Path):
    out = tmp_path / "policies.json"
    short = ["--requests", "6", "--seeds", "1", "--states", "4", "40"]
    results = results_of("checkpoint_policies", out, *short)
    for result in results.values():
        for shares in result["policies"].values():
            assert result["floor"] <= shares["40"] <= shares["4"] <= 1
    system = {"role": "system", "content": "You help. " * 200}
    asked = [system, {"role": "user", "content": "What is it? " * 100}]
    trace = [{"messages": asked[:2]}]
    for number in range(3):
        asked.append({"role": "user", "content": f"And {number}? " * 100})
        trace.append({"messages": asked[:]})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    (result,) = results_of(
        "checkpoint_policies", out, "--trace", str(path), "--states", "8"
    ).values()
    lengths = [
        len("".join(json.dumps(m, sort_keys=True) for m in each["messages"])) for each in trace
    ]
    ends = [-(-length // 4) // 64 * 64 for length in lengths]
    computed = -(-lengths[-1] // 4) + sum(
        -(-length // 4) - end for length, end in zip(lengths[:-1], ends[:-1], strict=True)
    )
    expected = computed / sum(-(-length // 4) for length in lengths)
    assert result["requests"] == 4
    assert result["policies"]["this package"]["8"] == pytest.approx(expected)


@pytest.mark.slow
def test_state_budgets_run_more_sequences_than_fixed_quarters(tmp_path: Path):
    short = ["--requests", "12", "--seeds", "1", "--budgets", "2", "12"]
    for result in results_of("state_budgets", tmp_path / "budgets.json", *short).values():
        before, after = (result["budgets"][kind] for kind in ("fixed quarters", "one budget"))
        assert before["2.0"] is None and after["2.0"]["num_running"] == 1
        assert after["12.0"]["num_running"] > before["12.0"]["num_running"]
        assert 0 < after["12.0"]["share"] < 1


@pytest.mark.parametrize("architecture", ["gemma3_text", "deepseek_v3"])
def test_decode_measures_models_of_mlx_lm(architecture: str):
    ours, theirs = random_model(config_of(architecture))
    args = Namespace(turns=2, block_size=8, no_cache_up_to=64, pools=[1000])
    result = decode.measure_decode(ours, theirs, 20, args)
    assert set(result["tokens_per_second"]) == {"no cache", "mlx-lm", "basic", "paged", "scattered"}
    assert result["kv_bytes"]["paged"] > 0
    appends = decode.measure_append(ours, theirs, 20, args)
    assert set(appends["microseconds"]) == {"mlx-lm", "basic", "paged"}
    assert set(decode.measure_pools(ours, args)) == {"1000"}


@pytest.mark.slow
def test_neighbours_are_measured_alone_and_beside_one_who_asks_for_too_much(tmp_path: Path):
    short = ["--only", "messages", "--seconds", "1", "--alone", "3"]
    (result,) = results_of("neighbours", tmp_path / "neighbours.json", *short, in_process=False)
    assert result["scenario"] == "messages"
    assert result["num_probes"] > 0 and result["num_refused"] == 0
    assert result["alone_ms"]["median"] > 0 and result["beside_ms"]["median"] > 0


@pytest.mark.slow
def test_a_step_is_measured_beside_its_estimate(tmp_path: Path):
    out = tmp_path / "step.json"
    rows = results_of("step_memory", out, "--prompts", "2", "--length", "40")["rows"]
    assert [row["max_num_batched_tokens"] for row in rows] == [128, 512, 2048, 4096]
    assert all(row["peak_bytes"] > 0 for row in rows)


@pytest.mark.slow
def test_what_requests_leave_is_looked_at_ten_times(tmp_path: Path):
    short = ["--requests", "100", "--kinds", "token ids", "grammar"]
    out = tmp_path / "resident.json"
    rows = results_of("resident_memory", out, *short, in_process=False)["over_time"]
    assert [row["requests"] for row in rows] == list(range(10, 110, 10))
    assert all(row["mlx"] > 0 and row["num_objects"] > 0 for row in rows)


@pytest.mark.slow
def test_a_recurrent_model_runs_beside_mlx_lms_batches(tmp_path: Path):
    short = ["--streams", "2", "--contexts", "20", "--turns", "1", "--steps", "2"]
    short += ["--prompt", "10"]
    results = results_of("recurrent", tmp_path / "recurrent.json", *short, in_process=False)
    decodes = results["decodes"]
    assert [(each["model"], each["streams"]) for each in decodes] == [
        ("hybrid", 2),
        ("recurrent layers", 2),
        ("attention layers", 2),
    ]
    assert all(each["times_as_fast"]["BatchGenerator"]["smallest"] > 0 for each in decodes)
    of_states = [each["primitives_per_layer"] for each in decodes if "recurrent" in each["model"]]
    # A recurrent layer has as many as in mlx-lm, and what is left is the model's few.
    assert all(each["model, packed"] - each["model, mlx-lm"] < 1 for each in of_states)
    assert results["prompts"][0]["over_without"] > 0


@pytest.mark.slow
def test_heads_draft_on_each_side_and_change_no_answer(tmp_path: Path):
    short = ["--turns", "1", "--questions", "1", "--tasks", "sequence"]
    results = results_of("heads", tmp_path / "heads.json", *short)
    (task,) = results["tasks"]
    assert task["same_answers"]
    per_step = task["tokens_per_step"]
    assert per_step["none"] == 1 < per_step["head"]
    accepted = task["accepted_by_depth"]
    assert accepted["none"] == [] and len(accepted["head"]) == 3
    assert task["cpu_ratio"].keys() == {"head", "by the rule"}
    # No drafts are among the numbers of which the best is taken.
    assert all(gain >= 1 for each in results["simulated"] for gain in each["gain"].values())
