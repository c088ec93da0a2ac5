"""The charts: drawn from what was measured, the same bytes each time, readable on any page."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from helpers.fast_lane import mostly_slow

pytest.importorskip("matplotlib", reason="charts need matplotlib, which the extra charts brings")

from benchmarks import charts
from benchmarks.__main__ import read_programs
from benchmarks.lib import chart_panels, chart_style
from benchmarks.lib.card import COMMAND

RESULTS = charts.ROOT / "benchmarks" / "results"


def results_of(name: str) -> list[dict]:
    return [charts.read(source, RESULTS) for source in charts.CHARTS[name].sources]


@mostly_slow("name", charts.CHARTS)
def test_a_chart_of_what_was_measured_is_the_same_bytes_each_time(name, tmp_path):
    paths = [
        chart_style.save(charts.CHARTS[name].draw(results_of(name)), tmp_path / folder, name)
        for folder in ("first", "second")
    ]
    first, second = ([path.read_bytes() for path in made] for made in paths)
    assert first == second
    png, svg = first
    assert png.startswith(b"\x89PNG") and svg.startswith(b"<?xml")
    # Nothing in them says when or where they were made.
    assert not re.search(rb"\d{4}-\d\d-\d\dT|dc:date|Matplotlib v|/home/|/tmp/", png + svg)


def luminance(colour: str) -> float:
    """Relative, as WCAG 2 defines it."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_and_lines_stand_out_from_the_background_that_a_chart_brings():
    background = luminance(chart_style.BACKGROUND)
    for colour in ("TEXT", "FAINT", "OURS", "THEIRS", "OTHER", "NEUTRAL"):
        own = luminance(getattr(chart_style, colour))
        assert (background + 0.05) / (own + 0.05) >= 4.5, colour
    figure, _ = chart_style.make_panels(1, 2.0)
    assert figure.get_facecolor() == (1.0, 1.0, 1.0, 1.0)  # opaque: a dark page can't shine through


def test_bars_and_labels_are_the_figures_of_the_json():
    (result,) = results_of("approaches")
    rows = result["results"]["approaches"]
    context, speed, _, memory = charts.CHARTS["approaches"].draw([result]).axes
    assert [label.get_text() for label in context.get_yticklabels()] == list(rows)
    speeds = [bar.get_width() for bar in speed.patches]
    assert speeds == [row["tokens_per_second"]["together"] for row in rows.values()]
    assert [bar.get_width() * chart_panels.MIB for bar in memory.patches] == pytest.approx(
        [row["kv_nbytes"] for row in rows.values()]
    )
    said = {text.get_text() for text in context.texts}
    limits = [row["longest_context"]["num_tokens"] for row in rows.values()]
    assert {f"{limit:,}" for limit in limits if limit is not None} <= said
    assert ("no limit" in said) == (None in limits)


def test_only_what_outlives_a_process_has_a_time_after_a_restart():
    (result,) = results_of("approaches")
    rows = list(result["results"]["approaches"].values())
    first = charts.CHARTS["approaches"].draw([result]).axes[2]
    (line,) = [line for line in first.lines if line.get_label() == "restarted"]
    assert line.get_ydata().tolist() == [place for place, row in enumerate(rows) if row["survives"]]


@pytest.mark.slow
def test_the_script_draws_one_chart_and_refuses_what_is_not_there(tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, "charts", *arguments, "--images", str(tmp_path / "images")]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run("restart")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [
        "restart.png",
        "restart.svg",
    ]
    done = run("pie")
    assert done.returncode == 1 and "there is no chart 'pie'" in done.stderr
    done = run("serving", "--results", str(tmp_path))
    assert done.returncode == 1 and "throughput-curves-cpu.json; --measure" in done.stderr
    assert "Traceback" not in done.stderr


def test_measuring_writes_where_the_chart_reads(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(charts.subprocess, "run", lambda command, **_: commands.append(command))
    for chart in charts.CHARTS.values():
        for source in chart.sources:
            charts.measure(source, tmp_path)
            name, out = commands[-1][len(COMMAND)], Path(commands[-1][-1])
            assert name in read_programs() and out == tmp_path / source.file
            out.write_text(json.dumps({"read": source.file}))
            assert charts.read(source, tmp_path) == {"read": source.file}
