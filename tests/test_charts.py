"""The charts and the figures of the docs: drawn from what was measured, the same bytes each time,
readable on any page.
"""

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
from benchmarks.lib import chart_panels, chart_style, doc_figures
from benchmarks.lib.card import COMMAND

RESULTS = charts.ROOT / "benchmarks" / "results"


DOCS = charts.ROOT / "docs"


def result_of(name: str) -> dict:
    return charts.read(charts.CHARTS[name], RESULTS)[0]


@mostly_slow("name", charts.CHARTS)
def test_a_chart_of_what_was_measured_is_the_same_bytes_each_time(name, tmp_path):
    result, drawn_from = charts.read(charts.CHARTS[name], RESULTS)
    first, second = (
        chart_style.save(charts.CHARTS[name].draw(result), tmp_path / folder, name, drawn_from)
        for folder in ("first", "second")
    )
    png = first.read_bytes()
    assert png == second.read_bytes() and png.startswith(b"\x89PNG")
    # Nothing in it says when or where it was made.
    assert not re.search(rb"\d{4}-\d\d-\d\dT|Matplotlib v|/home/|/tmp/", png)


def test_the_charts_of_the_docs_were_drawn_from_the_results_that_are_kept():
    # After a measurement: python -m benchmarks charts
    for name, chart in charts.CHARTS.items():
        path = DOCS / "images" / f"{name}.png"
        assert chart_style.drawn_from(path) == charts.read(chart, RESULTS)[1]
    others = {path.stem for path in (DOCS / "images").iterdir()} - set(charts.CHARTS)
    assert others == {"page", "chat"}  # tests/test_recording.py looks at the latter
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    readme = (charts.ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in charts.CHARTS if f"images/{name}.png" not in pages + readme] == []


def test_figures_in_the_docs_are_those_of_the_results_that_are_kept():
    # After a measurement: python -m benchmarks charts
    num_marks = 0
    for path in DOCS.rglob("*.md"):
        page = path.read_text(encoding="utf-8")
        assert doc_figures.with_figures(page, RESULTS) == page, path
        num_marks += page.count("<!-- figures ")
    assert num_marks == 4


def test_a_page_gets_the_figures_that_its_marks_ask_for(tmp_path):
    page = tmp_path / "page.md"
    mark = "<!-- figures restart_sentence of a.json -->\n"
    page.write_text(f"Text.\n\n{mark}stale\n<!-- end of figures -->\n\nMore.\n")
    seconds = {"computed": 2.0, "page cache": 0.05, "device": 0.1234}
    rows = [{"length": length, "seconds": seconds} for length in (500, 1000, 4000)]
    result = {"results": rows, "setting": {"blas": "one"}}
    (tmp_path / "a.json").write_text(json.dumps(result))
    assert doc_figures.write_figures(tmp_path, tmp_path) == [page]
    said = "2 s to compute, 50 ms from the page cache, 0.123 s from the device"
    begin, rest = page.read_text().split(mark)
    text, end = rest.split("<!-- end of figures -->")
    assert (begin, end) == ("Text.\n\n", "\n\nMore.\n")
    assert " ".join(text.split()) == (
        f"1,000 tokens: {said}; 4,000 tokens: {said} (medians, on a CPU; BLAS: one)."
    )
    assert doc_figures.write_figures(tmp_path, tmp_path) == []


def test_a_chart_of_restarts_has_a_line_for_each_way_and_a_dot_for_each_run():
    result = result_of("restart-demo")
    times, ratios = charts.CHARTS["restart-demo"].draw(result).axes
    ways = {"computed": "computed", "device": "read from the device"}
    ways["page cache"] = "read from the page cache"
    for way, label in ways.items():
        (line,) = [line for line in times.lines if line.get_label() == label]
        assert line.get_ydata().tolist() == [row["seconds"][way] for row in result["results"]]
    dots = [value for line in times.lines if line.get_marker() == "." for value in line.get_ydata()]
    runs = [
        each["seconds_to_first_token"]
        for row in result["results"]
        for way in ways
        for each in row["runs"][way]
    ]
    assert sorted(dots) == sorted(runs)
    assert {line.get_label() for line in ratios.lines if line.get_marker() != "."} == {
        "read from the device",
        "read from the page cache",
    }


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
    result = result_of("approaches")
    rows = result["results"]["approaches"]
    context, speed, _, memory = charts.CHARTS["approaches"].draw(result).axes
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
    result = result_of("approaches")
    rows = list(result["results"]["approaches"].values())
    first = charts.CHARTS["approaches"].draw(result).axes[2]
    (line,) = [line for line in first.lines if line.get_label() == "after a restart"]
    assert line.get_ydata().tolist() == [place for place, row in enumerate(rows) if row["survives"]]


@pytest.mark.slow
def test_the_script_draws_one_chart_and_refuses_what_is_not_there(tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, "charts", *arguments, "--docs", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run("restart-demo")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["restart-demo.png"]
    done = run("pie")
    assert done.returncode == 1 and "there is no chart 'pie'" in done.stderr
    done = run("serving", "--results", str(tmp_path))
    assert done.returncode == 1 and "throughput-curves-cpu.json; --measure" in done.stderr
    assert "Traceback" not in done.stderr


def test_measuring_writes_where_the_chart_reads(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(charts.subprocess, "run", lambda command, **_: commands.append(command))
    for chart in charts.CHARTS.values():
        commands.clear()
        charts.measure(chart, tmp_path)
        for command in commands:
            assert command[len(COMMAND)] in read_programs()
            assert Path(command[-1]) == tmp_path / chart.file
        # Only the first begins a file.
        assert ["--add" in command for command in commands] == [False] + [True] * (
            len(commands) - 1
        )
        (tmp_path / chart.file).write_text(json.dumps({"read": chart.file}))
        assert charts.read(chart, tmp_path)[0] == {"read": chart.file}
