"""The dashboard and rules of ``grafana/`` against the ``/metrics`` of a server that was used."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.servers import client_of, make_service
from prometheus_client.parser import text_string_to_metric_families

from mlx_paged import SamplingParams

GRAFANA = Path(__file__).parents[2] / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "mlx_paged.json").read_text())
# Prometheus's own, which each target has.
TARGET_LABELS = {"instance", "job"}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed"
)


def queries() -> Iterator[tuple[str, str, str]]:
    """Title, expression and legend of each query of the dashboard."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def rule_expressions() -> list[str]:
    text = (GRAFANA / "rules.yml").read_text()
    return [
        " ".join(match.split())
        for match in re.findall(r"expr: (?:>-)?\s*(.+?)\n\s+(?:for|annotations):", text, re.S)
    ]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names of all samples, and the labels of each."""
    service = make_service(
        kv_cache_bytes="100blocks", num_draft_tokens=4, cache_dir=tmp_path_factory.mktemp("kv")
    )
    with service.engine:
        client = client_of(service)
        client.get("/health")
        for _ in service.engine.stream("Hello", SamplingParams(max_tokens=20, ignore_eos=True)):
            pass
        text = client.get("/metrics").text
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def check(expression: str, legend: str, samples: dict[str, set[str]]) -> None:
    """Every metric of an expression is there, and has the labels that are asked of it."""
    names = re.findall(r"\b(?:vllm|mlx_paged):\w+", expression)
    assert names or expression.startswith("up{")
    for name in names:
        assert name in samples, f"{name} is not in /metrics"
    labels = set().union(*(samples[name] for name in names)) | TARGET_LABELS
    for name, matchers in re.findall(r"([\w:]+){([^}]*)}", expression):
        known = samples.get(name, set()) | TARGET_LABELS
        assert set(re.findall(r"(\w+)=", matchers)) <= known, f"labels of {name}"
    for by in re.findall(r"by \(([^)]*)\)", expression):
        assert set(by.split(", ")) <= labels, f"by ({by})"
    assert set(re.findall(r"{{(\w+)}}", legend)) <= labels, legend


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: f"{query[0]}: {query[2]}")
def test_the_metrics_of_the_dashboard_are_there(
    query: tuple[str, str, str], samples: dict[str, set[str]]
):
    check(query[1], query[2], samples)


@pytest.mark.parametrize("expression", rule_expressions())
def test_the_metrics_of_the_rules_are_there(expression: str, samples: dict[str, set[str]]):
    check(expression, "", samples)


def test_a_metric_or_label_that_is_not_there_is_noticed(samples: dict[str, set[str]]):
    check("rate(vllm:generation_tokens_total[1m])", "", samples)
    for wrong in (
        "rate(vllm:generation_tokens[1m])",
        'vllm:num_requests_running{kind="x"}',
        "sum by (reason) (vllm:num_requests_running)",
    ):
        with pytest.raises(AssertionError):
            check(wrong, "", samples)
    with pytest.raises(AssertionError):
        check("vllm:num_requests_running", "{{reason}}", samples)


def test_the_dashboard_is_what_its_script_writes():
    spec = importlib.util.spec_from_file_location("make_dashboard", GRAFANA / "make_dashboard.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(module.dashboard_text()) == DASHBOARD


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    seen: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & seen, panel["title"]
        seen |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_provisioning_names_only_what_both_ways_to_start_set():
    compose = (GRAFANA / "docker-compose.yml").read_text()
    for path in (GRAFANA / "provisioning").rglob("*.yml"):
        for name in re.findall(r"\$(\w+)", path.read_text()):
            assert f"{name}:" in compose, name
    for name in re.findall(r"- \./(\S+?):", compose):
        assert (GRAFANA / name).exists(), name


@needs_promtool
@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-docker.yml"])
def test_prometheus_accepts_its_configuration(name: str):
    checked = subprocess.run(
        ["promtool", "check", "config", str(GRAFANA / name)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
def test_prometheus_accepts_the_queries_of_the_dashboard(tmp_path: Path):
    lines = ["groups:", "  - name: dashboard", "    rules:"]
    for number, (_, expression, _) in enumerate(queries()):
        filled = expression.replace("$__rate_interval", "1m").replace("$model_name", ".*")
        lines += [f"      - record: q{number}", f"        expr: {json.dumps(filled)}"]
    rules = tmp_path / "rules.yml"
    rules.write_text("\n".join(lines) + "\n")
    checked = subprocess.run(
        ["promtool", "check", "rules", str(rules)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
