"""The benchmarks that need no Mac: K/V bytes of the kernels, counted, and that the scripts run."""

from __future__ import annotations

import json

import pytest

from benchmarks.kernels import attention, cost_model
from mlx_paged.ops.kernels import MAX_LATENT_ROWS

# What is new in each: partitions; rows from inputs; rows over two threadgroups and an odd group; a
# window, and a ragged batch of which one sequence needs no merge.
CASES = {
    "two partitions": ((257,), (1,), 2, {}),
    "rows from inputs": ((300,), (1,), 2, {"has_rows": True}),
    "a run of a large group": ((300,), (4,), 5, {"num_kv_heads": 1}),
    "a window in a ragged batch": ((700, 16, 300), (1, 1, 1), 2, {"window": 280, "has_rows": True}),
}


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_a_threadgroup_loads_each_row_of_keys_and_values_once():
    cases = {name: cost_model.Case(*lens, **changes) for name, (*lens, changes) in CASES.items()}
    with cost_model.counting_metal() as trace:
        counts = {name: cost_model.count_case(case, trace) for name, case in cases.items()}
        gather = cost_model.count_gather(300, trace)
    assert cost_model.over_bound(list(counts.values())) == []
    for name, count in counts.items():
        least = count["least"]
        assert count["kv_loaded"] == least["kv_loaded"] * count["row_parts"], name
        assert count["kv_ratio"] == 1, name
        assert count["rows_stored"] == least["rows_stored"], name
        assert count["output_stored"] == least["output_stored"], name
        partial_bytes = (count["head_dim"] + 4) * 4
        assert count["partials_stored"] % partial_bytes == 0, name
        assert count["partials_loaded"] >= count["partials_stored"] > 0, name
    # Twenty query rows are five simdgroups', in two threadgroups.
    assert {name: count["row_parts"] for name, count in counts.items()} == dict.fromkeys(
        CASES, 1
    ) | {"a run of a large group": 2}
    # The least, by hand: K and V, tokens that a query sees, KV heads, bytes of a row.
    assert counts["two partitions"]["least"]["kv_loaded"] == 2 * 257 * 8 * 256
    assert (
        counts["a window in a ragged batch"]["least"]["kv_loaded"] == 2 * (280 + 16 + 280) * 8 * 256
    )
    assert counts["rows from inputs"]["rows_stored"] == 2 * 1 * 8 * 256
    # 300 tokens are 320 on the ladder of sizes: those behind them are of the null block.
    assert gather["kv_slab_loaded"] == gather["dense_stored"] == gather["least"] * 320 // 300


def test_the_registers_and_slots_that_are_kept_are_those_of_the_kernels_here():
    setting = json.loads(cost_model.REGISTERS.read_text())["setting"]
    found = {
        "kernels": cost_model.source_hash(),
        "rows_matmul": cost_model.source_hash(["rows_matmul"]),
    }
    assert {name: setting[name] for name in found} == found, (
        "kernels changed since their registers and slots were measured: measure again, "
        "or say in docs/internals/kernels.md and in the JSON whose figures they are"
    )


def test_nothing_in_half_precision_spills_by_the_figures_that_are_kept():
    measured = json.loads(cost_model.REGISTERS.read_text())
    for name in ("formats", "widths", "latents", "latent_runs"):
        kept = [row for row in measured[name] if row["dtype"] != "float"]
        assert len(kept) >= 12
        assert {row["spills"] for row in kept} == {0}
    # Groups and heads of 1 to 16, odd ones among them, in decodes and in runs.
    assert len(measured["sweep"]) >= 80
    assert {row["spilling_shapes"] for row in measured["sweep"]} == {0}
    kept = [row for row in measured["results"] if row["dtype"] != "float"]
    assert len(kept) >= 25
    assert {row["after"]["spills"] for row in kept} == {0}
    slots = {
        (row["dtype"], row["head_dim"], row["group"]): row["after"]["slots_per_kib"]
        for row in kept
        if row["run"] == 1
    }
    # A bfloat16 has to be widened by an instruction of its own, a float16 does not.
    for (dtype, head_dim, group), figure in slots.items():
        if dtype == "bfloat":
            # At 512 its registers hold chunks half as large, too.
            bound = 1.55 if head_dim == 512 else 1.4 if group > 1 else 1.45
            assert figure <= bound * slots["half", head_dim, group]


def test_a_matmul_of_a_few_rows_issues_less_than_one_of_mlx_for_each_row():
    measured = json.loads(cost_model.REGISTERS.read_text())["rows_matmul"]
    spilling = [row for row in measured if row["spills"]]
    assert [(row["mode"], row["bits"], row["dtype"], row["rows"]) for row in spilling] == [
        ("affine", 8, "bfloat", 5)
    ]
    slots = {
        (row["bits"], row["dtype"], row["rows"]): row["slots_per_kib"]
        for row in measured
        if row["mode"] == "affine"
    }
    # MLX's kernel for one row, which M1 and M2 run once per row.
    for bits, dtype, of_one in (
        (4, "half", 307),
        (4, "bfloat", 331),
        (8, "half", 141),
        (8, "bfloat", 157),
    ):
        assert slots[bits, dtype, 1] < 0.81 * of_one
        assert slots[bits, dtype, 4] < 0.38 * 4 * of_one


def test_a_decode_on_quantised_rows_is_estimated_by_what_bounds_it():
    measured = json.loads(cost_model.REGISTERS.read_text())["formats"]
    kept = [row for row in measured if row["dtype"] != "float" and row["run"] == 1]
    assert {row["format"] for row in kept} == {"dense", "K8V8", "K8V4", "K4V4", "K4V8"}
    estimates = {
        (row["dtype"], row["head_dim"], row["group"], row["run"], row["format"]): row["chips"]
        for row in cost_model.estimate_formats(measured)
    }
    # Bound by memory both: 512 bytes against 256 and 16 of scales and biases.
    few_rows = estimates["half", 128, 4, 1, "K8V8"]["M1 Max"]
    assert few_rows["nanoseconds_per_key"] == pytest.approx(272 / 400)
    assert few_rows["faster_than_dense"] == pytest.approx(512 / 272)
    # Bound by instructions: 625 slots for each KiB of dense K/V, four in a cycle of each core.
    many_rows = estimates["half", 128, 16, 1, "K8V8"]["M1 Max"]
    slots = next(row for row in kept if (row["group"], row["format"]) == (16, "K8V8"))
    nanoseconds = slots["slots_per_kib_whole"] / 2 / (4 * 32 * 1.296)
    assert many_rows["nanoseconds_per_key"] == pytest.approx(nanoseconds)
    assert many_rows["faster_than_dense"] < 1


def test_latents_of_as_many_heads_as_have_a_kernel_are_no_slower_than_gathered_ones():
    measured = json.loads(cost_model.REGISTERS.read_text())["latents"]
    estimates = {
        (row["dtype"], row["format"], row["heads"]): row
        for row in cost_model.estimate_latents(measured)
    }
    # 32 heads of 81.3 slots in bfloat16, four in a cycle of each core, over 6,784 bytes.
    most = estimates["bfloat", "dense", MAX_LATENT_ROWS]
    expected = 32 * 81.3 / (4 * 32 * 1.296) / (6784 / 400)
    assert most["M1 Max"] == pytest.approx(expected, rel=1e-3)
    assert max(most[chip] for chip in cost_model.CORES) <= 1
    assert max(estimates["half", "K8V8", 32][chip] for chip in ("M1", "M2 Max")) <= 1


def test_comments_do_not_make_other_kernels(monkeypatch):
    before = cost_model.source_hash()
    source = cost_model.read_source
    monkeypatch.setattr(
        cost_model, "read_source", lambda name: source(name).replace("// ", "//  as it were ")
    )
    assert cost_model.source_hash() == before
    monkeypatch.setattr(cost_model, "read_source", lambda name: source(name) + "int x;")
    assert cost_model.source_hash() != before


def test_too_many_loads_are_found():
    over = {"contexts": (16, 257), "kv_ratio": 1.03}
    within = [{"contexts": (257,), "kv_ratio": 1.02}, {"contexts": (256,), "kv_ratio": 1.5}]
    assert cost_model.over_bound([*within, over]) == [over]


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_the_quick_cost_model_prints_tables_and_json(tmp_path, capsys):
    out = tmp_path / "results" / "cost.json"
    assert cost_model.main(["--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "ESTIMATE, not measured on a Mac" in printed
    assert printed.splitlines()[-1] == out.read_text().strip()
    line = json.loads(out.read_text())
    assert line["benchmark"] == "cost_model"
    assert {count["kv_ratio"] for count in line["results"]["attention"]} == {1.0}
    # 2 * 4,096 * 8 * 128 * 2 bytes at 400 GB/s, by hand.
    (chip,) = (row for row in line["results"]["roofline_estimate"] if row["chip"] == "M1 Max")
    assert chip["4096"]["layer_microseconds"] == pytest.approx(41.943)


def test_the_cost_model_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr(cost_model, "has_compiler", lambda: False)
    with pytest.raises(SystemExit, match="clang 18 or later, or: pip install ziglang"):
        cost_model.main(["--quick"])


@pytest.mark.slow
def test_the_quick_attention_benchmark_agrees_and_writes_json(tmp_path):
    out = tmp_path / "attention.json"
    attention.main(
        [
            "--quick",
            "--backend",
            "reference",
            "--turns",
            "1",
            "--pools",
            "100",
            "200",
            "--out",
            str(out),
        ]
    )
    results = json.loads(out.read_text())["results"]
    assert len(results["attention"]) == 16 and len(results["append"]) == 2
    assert all(
        row["largest_difference"] < attention.TOLERANCES["f32"] for row in results["attention"]
    )
