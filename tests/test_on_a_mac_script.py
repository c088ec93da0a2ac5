"""`python -m benchmarks on_a_mac`: that it runs, what its card says, and that a section that fails
takes nothing along.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from metal_emulator import Checks
from paged_testing.emulated_metal import emulated_metal

from benchmarks.lib.card import COMMAND
from benchmarks.mac import mac_kernels, mac_sections, on_a_mac
from benchmarks.mac.mac_card import make_card, verdicts_of
from benchmarks.mac.mac_kernels import Decode
from benchmarks.mac.mac_sections import SECTIONS, SIZES, Section
from mlx_paged.engine.speculation.step_costs import ROW_COSTS
from mlx_paged.ops import kernels
from mlx_paged.ops.attention_plan import AttentionPlan

KERNEL = kernels.kernel
QUICK = argparse.Namespace(model="random", quick=True)


def result(*rows: dict, ended: str = "complete") -> dict:
    return {"rows": list(rows), "ended": ended, "seconds": 3.0}


# The script


@pytest.mark.slow
def test_the_quick_run_writes_every_section_and_a_card_without_links(tmp_path):
    out = tmp_path / "mac"
    command = [*COMMAND, "on_a_mac", "--quick", "--out", str(out)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = json.loads(out.with_suffix(".json").read_text())
    card = out.with_suffix(".md").read_text()
    assert line["benchmark"] == "on_a_mac"
    sections = line["sections"]
    assert list(sections) == [section.name for section in SECTIONS]
    assert {section["ended"] for section in sections.values()} == {"complete"}
    assert sections["device"]["rows"][0]["mlx"] in card
    assert [row["name"] for row in sections["streams"]["rows"]] == [
        *("streams: 1", "streams: 2", "long prompt")
    ]
    for row in sections["streams"]["rows"]:
        assert {"ours", "mlx-lm"} <= set(row["sides"])
        assert all(figures["tokens_per_second"] > 0 for figures in row["sides"].values())
    assert [row["context"] for row in sections["attention"]["rows"]] == [64, 300]
    assert printed.strip() == card.strip()
    assert "http" not in card and "](" not in card
    for name in ("streams: 1: tokens/s, ours over mlx-lm", "of the copy bandwidth"):
        assert name in card


@pytest.mark.slow
def test_an_interrupt_leaves_what_there_is(tmp_path):
    out = tmp_path / "mac"
    process = subprocess.Popen(
        [*COMMAND, "on_a_mac", "--quick", "--out", str(out)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("bandwidth"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert process.wait(60) == 0, rest
    sections = json.loads(out.with_suffix(".json").read_text())["sections"]
    assert list(sections) == ["device", "few rows", "writes", "bandwidth"]
    assert sections["bandwidth"]["ended"] == "interrupted"
    assert "Not complete: interrupted." in out.with_suffix(".md").read_text()


# A section and its process


ONE_ROW = """
import json, os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
path.write_text(json.dumps({"rows": [{"copy_gb_per_s": 5.0}], "ended": "it crashed"}))
"""
CHILDREN = {
    "crashes": (ONE_ROW + "os.abort()", "ended by signal 6"),
    "hangs": (ONE_ROW + "time.sleep(60)", "ended after 2 s"),
    "says_no_more": (ONE_ROW, "it crashed"),
    "writes_nothing": ("raise SystemExit(1)", "it crashed before its first figure"),
}


@pytest.mark.parametrize(("code", "ended"), CHILDREN.values(), ids=CHILDREN)
def test_what_a_section_left_before_it_ended_is_kept(code, ended, monkeypatch):
    monkeypatch.setattr(
        on_a_mac,
        "start_section",
        lambda section, args, rows: subprocess.Popen([sys.executable, "-c", code, str(rows)]),
    )
    results: dict = {}
    section = Section("bandwidth", mac_sections.measure_bandwidth, 1)
    on_a_mac.watch_section(section, QUICK, 2, results)
    (left,) = results.values()
    assert left["ended"] == ended
    assert left["rows"] == ([{"copy_gb_per_s": 5.0}] if "copy" in code else [])
    assert verdicts_of("bandwidth", left)[-1] == f"Not complete: {ended}."


def run_in_process(section: Section, tmp_path: Path) -> dict:
    rows = tmp_path / "rows.json"
    on_a_mac.run_section(section, argparse.Namespace(model="random", quick=True, rows=rows))
    return on_a_mac.read_rows(rows)


def test_a_section_that_raises_keeps_its_rows_and_says_what(tmp_path, capsys):
    def measure(sizes, model):
        yield {"first": 1}
        raise RuntimeError("no more memory")

    left = run_in_process(Section("any", measure, 9), tmp_path)
    assert left == {"rows": [{"first": 1}], "ended": "RuntimeError: no more memory"}
    assert "no more memory" in capsys.readouterr().err


def test_a_section_begins_no_row_after_its_time(tmp_path):
    def measure(sizes, model):
        for number in range(3):
            yield {"number": number}

    left = run_in_process(Section("any", measure, 0), tmp_path)
    assert left == {"rows": [{"number": 0}], "ended": "stopped after 0 s"}


@pytest.mark.slow
def test_a_side_that_fails_leaves_the_others(monkeypatch):
    def refuse():
        raise ValueError("no such option")

    models = mac_sections.load_models(SIZES["quick"], "random")
    scenario = mac_sections.scenarios_of(SIZES["quick"], 64)[0]
    sides = {"ours": mac_sections.sides_of(*models, scenario)["ours"], "ours, ahead": refuse}
    figures, tokens = mac_sections.serve_in_turns(sides, scenario, 1)
    assert figures["ours, ahead"] == {"error": "ValueError: no such option"}
    assert figures["ours"]["tokens_per_second"] > 0
    assert "ours" in tokens and "ours, ahead" not in tokens


@pytest.mark.slow
def test_kernels_are_tried_and_launches_timed_where_there_is_metal(compiler, monkeypatch):
    monkeypatch.setattr(mac_sections, "NUM_LAUNCHES", 2)
    with emulated_metal(Checks.quick(), tries_kernels=True):
        (row,) = mac_sections.measure_kernels(SIZES["quick"], "random")
        (writes,) = mac_sections.measure_writes(SIZES["quick"], "random")
        launches = list(mac_sections.measure_launches(SIZES["quick"], "random"))
    assert row["right"] and row["said"] == [] and row["seconds"] > 0
    assert row["shape"].startswith("bfloat16, head_dim 128, blocks of 16, 2 query heads")
    assert writes == {"failure": None}
    four, eight = "4 bits in groups of 64", "8 bits in groups of 64"
    assert [row["rows"] for row in launches] == ["bfloat16", eight, f"K {eight}, V {four}", four]
    assert all(row["us_per_launch"] > 0 for row in launches)


def refusing(name: str):
    """A kernel that says of too many threads what MLX says on Metal, and else what it computes."""

    def call(**arguments):
        (threads, *_), made = arguments["threadgroup"], KERNEL(name)
        if threads <= 1024:
            return made(**arguments)
        raise ValueError(
            f"Thread group size ({threads}) is greater than  the maximum allowed threads per "
            "threadgroup (384)."
        )

    return call


@pytest.mark.slow
def test_each_question_is_asked_where_there_is_metal(compiler, monkeypatch):
    monkeypatch.setattr(mac_sections, "NUM_LAUNCHES", 8)
    for name, (one, other, low, high) in mac_kernels.COMPARISONS.items():
        small = [replace(each, num_kv_heads=1) for each in (one, other)]
        monkeypatch.setitem(mac_kernels.COMPARISONS, name, (*small, low, high))
    with emulated_metal(Checks.quick()), monkeypatch.context() as patch:
        patch.setattr(kernels, "kernel", refusing)
        # No model runs on kernels that are refused.
        patch.setattr(mac_sections, "measure_bits", lambda *_: {"found": 1})
        rows = list(mac_sections.measure_questions(SIZES["quick"], "random"))
    num_threads, num_shares = len(mac_kernels.THREADS), len(mac_kernels.LATENT_SHARES)
    threads, merging = rows[:num_threads], rows[num_threads : num_threads + 6]
    assert {row["found"] for row in threads} == {384}
    assert threads[3]["question"] == "most threads of a threadgroup, bfloat16, 128 x 4"
    assert threads[3]["expected"] == [448, 1024]
    assert merging[4]["question"] == "255 keys of 8 KV heads, merged over whole"
    assert len(rows) == num_threads + 6 + len(mac_kernels.COMPARISONS) + num_shares + 1
    assert all(row["found"] > 0 for row in rows)


@pytest.mark.slow
def test_bits_of_deterministic_answers_are_compared(compiler):
    with emulated_metal(Checks.quick()):
        model, _ = mac_sections.load_models(SIZES["quick"], "random")
        row = mac_sections.measure_bits(model, 8, 4)
    assert row["question"] == "deterministic answers with the same bits in a batch as alone"
    assert (row["found"], row["expected"]) == (4, [4, 4])


def test_partitions_are_cut_as_before_after_they_were_measured():
    step = Decode(keys=255).step()
    plans = []
    for size in (16, 512, None):
        with mac_kernels.partitions_of(size) if size else nullcontext():
            plans.append(AttentionPlan.pack(step, None, 1).num_partitions)
    assert plans == [16, 1, 1]


def test_the_cost_of_rows_is_measured_for_each_kind_of_the_table(monkeypatch):
    monkeypatch.setattr(mac_kernels, "NUM_ROWS", (1, 2, 4))
    rows = list(mac_sections.measure_row_costs(SIZES["quick"], "random"))
    assert [row["kind"] for row in rows] == list(ROW_COSTS["M1"])
    for row in rows:
        assert [count for count, _ in row["costs"]] == [2, 4]
        assert all(cost > 0 for _, cost in row["costs"])


def test_matmuls_of_few_rows_are_measured_by_bits_and_rows(monkeypatch):
    monkeypatch.setattr(mac_kernels, "MATMUL_ROWS", (1, 4))
    rows = list(mac_kernels.measure_few_rows(64, 1, 1))
    assert [(row["bits"], row["same_bits"]) for row in rows] == [(4, True), (8, True), (16, True)]
    assert rows[0]["shape"] == "64 x 192, affine 4 bits"
    for row in rows:
        for side in (row["mlx"], row["rows"]):
            assert [count for count, _ in side] == [1, 4] and all(us > 0 for _, us in side)


# The card


def few_rows(generation: int, four: float, one: float = 10.0, same_bits: bool = True) -> dict:
    sides = {"mlx": [[1, 10.0], [4, 20.0]], "rows": [[1, one], [4, four]]}
    shape = {"shape": "64 x 192, affine 4 bits", "bits": 4}
    return {"generation": generation, "same_bits": same_bits} | shape | sides


ATTENTION = {
    "order": "shuffled",
    "dtype": "bf16",
    "head_dim": 128,
    "group": 2,
    "run": 1,
    "batch": 1,
    "context": 4096,
    "microseconds_per_layer": {"paged": 100.0},
    "paged_over_contiguous": 0.8,
    "paged_over_gather": 0.4,
    "of_copy_bandwidth": {"paged": 0.75},
}
FIGURES = {"tokens_per_second": 100.0, "ttft_median": 0.2, "tpot_median": 0.01}
STREAMS = {
    "name": "streams: 1",
    "what": "1 x 128 + 96 tokens",
    "num_streams": 1,
    "estimated_tokens_per_second": 125.0,
    "sides": {
        "ours": FIGURES,
        "mlx-lm": FIGURES | {"tokens_per_second": 80.0},
        "ours, ahead": FIGURES,
        "ours, waiting": FIGURES | {"tokens_per_second": 50.0},
        "ours, decodes built in Python": FIGURES,
    },
    "same_tokens": {"mlx-lm": 0.9, "ours, ahead": 1.0, "ours, waiting": 0.5},
}
MEMORY = {
    "window": None,
    "num_seqs": 8,
    "num_decodes": 1000,
    "grown_bytes": 3_200_000,
    "prompt_tokens": 2046,
    "peak_bytes": 150_000_000,
    "estimated_bytes": 125_000_000,
}
VERDICTS = {
    "writes": [
        (result({"failure": None}), ["Writes: in place, in order, without a copy."]),
        (result({"failure": "it copies"}), ["Writes: by donated scatter, as it copies."]),
        (result({"skipped": "needs Metal"}), ["Not measured: needs Metal."]),
    ],
    "kernels": [
        (
            result(
                {"shape": "a", "seconds": 1.0, "right": True, "said": []},
                {"shape": "b", "seconds": 3.0, "right": False, "said": ["b is wrong"]},
            ),
            [
                "Kernels: 1 of 2 shapes right; a shape takes 2.00 s to compile and try (median; "
                "expected: 1 to 5), 3.00 s at most.",
                "WRONG: b is wrong",
            ],
        )
    ],
    "launches": [
        (
            result(
                {"rows": "bfloat16", "us_per_launch": 3.0},
                {"rows": "8 bits", "us_per_launch": 3.5},
                {"rows": "4 bits", "us_per_launch": 4.2},
            ),
            [
                "A launch behind another one takes 3.0 us (expected: 2 to 5).",
                "To encode a token's rows takes +1.2 us at most (expected: below 2).",
            ],
        ),
        (
            result({"rows": "bfloat16", "us_per_launch": 3.0}, ended="stopped after 10 s"),
            [
                "A launch behind another one takes 3.0 us (expected: 2 to 5).",
                "Not complete: stopped after 10 s.",
            ],
        ),
    ],
    "memory": [
        (
            result(MEMORY, MEMORY | {"window": 64, "grown_bytes": 20_000}),
            [
                "1,000 decodes of 8 sequences without a window: MLX obtains 3.20 MB (expected: "
                "below 50 MB, once per size of partials).",
                "1,000 decodes of 8 sequences in a window of 64: MLX obtains 0.02 MB (expected: "
                "below 1 MB).",
                "Activations of a prompt of 2,046 tokens: 150 MB, 1.20 of the estimate (expected: "
                "0.5 to 2).",
            ],
        )
    ],
    "questions": [
        (
            result(
                {"question": "time of one over another", "found": 0.6, "expected": [0.5, 0.65]},
                {"question": "most threads, of one", "found": 256, "expected": [384, 1024]},
            ),
            [
                "Time of one over another: 0.6 (expected: 0.5 to 0.65).",
                "Most threads, of one: 256 (expected: 384 to 1024): OTHERWISE.",
            ],
        )
    ],
    "few rows": [
        (
            result(few_rows(13, 11.6)),
            [
                "64 x 192, affine 4 bits, 1 4 rows over one by MLX: MLX 1.00 2.00; rows_matmul "
                "1.00 1.16.",
                "rows_matmul with 4 rows takes 1.16 of one row by MLX (expected: at most 1.25) and "
                "0.58 of 4 by MLX (at most 0.8), one row 1.00 (at most 1.03): as estimated.",
            ],
        ),
        (
            result(few_rows(14, 11.6, one=10.5), few_rows(16, 13.0, same_bits=False)),
            [
                "64 x 192, affine 4 bits, 1 4 rows over one by MLX: MLX 1.00 2.00; rows_matmul "
                "1.05 1.16.",
                "rows_matmul with 4 rows takes 1.16 of one row by MLX (expected: at most 1.25) and "
                "0.58 of 4 by MLX (at most 0.8), one row 1.05 (at most 1.03): REFUTED.",
                "64 x 192, affine 4 bits, 1 4 rows over one by MLX: MLX 1.00 2.00; rows_matmul "
                "1.00 1.30.",
                "WRONG: 64 x 192, affine 4 bits: the bits of a row depend on the others.",
            ],
        ),
    ],
    "row costs": [
        (
            result(
                {"chip": "M4", "kind": "4 bits", "costs": [[2, 1.2], [3, 1.35]]},
                {"chip": "M4", "kind": "mixture", "costs": [[2, 1.9]]},
            ),
            ['"M4": {"4 bits": {2: 1.2, 3: 1.35}, "mixture": {2: 1.9}}'],
        )
    ],
    "attention": [
        (
            result(ATTENTION, ATTENTION | {"context": 256, "paged_over_contiguous": 1.2}),
            [
                "Attention takes 0.80 to 1.20 of the time of SDPA on contiguous K/V (median 1.00, "
                "2 shapes); slower at bf16 128 x 2, run 1, batch 1, 256.",
                "Attention takes 0.40 to 0.40 of the time of gather + SDPA (median 0.40, 2 "
                "shapes); nowhere slower.",
                "Attention over 4,096 tokens reaches 75% to 75% of the copy bandwidth.",
            ],
        ),
        (result({"wrong": "far off"}), ["WRONG: far off"]),
    ],
    "streams": [
        (
            result(STREAMS, ended="stopped after 1 s"),
            [
                "streams: 1: tokens/s, ours over mlx-lm: 1.25.",
                "streams: 1: time per token, ours over mlx-lm: 1.00.",
                "streams: 1: tokens/s, ours, ahead over ours, waiting: 2.00.",
                "streams: 1: tokens/s, ours over ours, decodes built in Python: 1.00.",
                "streams: 1: 100 tokens/s decoded, 0.80 of what mlx-paged fit estimates (expected: "
                "0.5 to 1).",
                "streams: 1: ours, waiting gives other tokens, 50.0% are the same.",
                "Not complete: stopped after 1 s.",
            ],
        ),
        (
            result(STREAMS | {"sides": {"ours": {"error": "it broke"}}, "same_tokens": {}}),
            ["streams: 1: ours FAILED: it broke"],
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "rows", "lines"),
    [(name, *case) for name, cases in VERDICTS.items() for case in cases],
)
def test_each_section_has_its_verdicts(name, rows, lines):
    assert verdicts_of(name, rows) == lines


def test_a_card_is_a_table_of_what_was_measured():
    card = make_card({"attention": result(ATTENTION), "streams": result(STREAMS)})
    assert "| bf16 128 x 2, run 1, batch 1, 4,096 | 100 | 0.80 | 0.40 | 75% |" in card
    assert "| 1 x 128 + 96 tokens | ours, waiting | 50.0 | 200.0 | 10.00 |" in card
    assert re.search(r"^- attention \(3 s\)$", card, re.M)
