"""Write ``dashboards/mlx_paged.json``, the dashboard that Grafana is provisioned with.

    python grafana/make_dashboard.py

Each panel is a line or two of ``PANELS``; the JSON around them is the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).parent / "dashboards" / "mlx_paged.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
ONE = '{model_name=~"$model_name"}'


class Panel(NamedTuple):
    """A panel: its queries by legend.

    Args:
        unit: of Grafana, such as ``"s"`` or ``"bytes"``.
        kind: ``"timeseries"`` or ``"stat"``.
        is_stacked: whether lines stand on top of one another.
        most: the end of the axis.
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    description: str = ""
    is_stacked: bool = False
    most: float | None = None


def rate(name: str, labels: str = ONE) -> str:
    return f"rate({name}{labels}[$__rate_interval])"


def total(expression: str, by: str = "") -> str:
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def quantiles(name: str) -> dict[str, str]:
    buckets = total(rate(f"{name}_bucket"), "le")
    return {
        f"p{100 * share:.0f}": f"histogram_quantile({share}, {buckets})"
        for share in (0.5, 0.95, 0.99)
    }


def mean(name: str) -> str:
    return f"{total(rate(f'{name}_sum'))} / {total(rate(f'{name}_count'))}"


def ratio(part: str, whole: str, by: str = "") -> str:
    return f"{total(rate(part), by)} / {total(rate(whole), by)}"


HIT_RATE = ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
PANELS: dict[str, list[list[Panel]]] = {
    "Now": [
        [
            Panel("Running", {"": total(f"vllm:num_requests_running{ONE}")}, kind="stat"),
            Panel("Waiting", {"": total(f"vllm:num_requests_waiting{ONE}")}, kind="stat"),
            Panel(
                "K/V in use",
                {"": f"max(vllm:kv_cache_usage_perc{ONE})"},
                "percentunit",
                "stat",
                "Share of the budget's blocks that requests hold. At 1 they begin to be preempted.",
            ),
            Panel("Tokens/s", {"": total(rate("vllm:generation_tokens_total"))}, kind="stat"),
            Panel("Prefix cache hits", {"": HIT_RATE}, "percentunit", "stat"),
            Panel(
                "Time to first token, p95",
                {"": quantiles("vllm:time_to_first_token_seconds")["p95"]},
                "s",
                "stat",
            ),
        ],
    ],
    "Speed": [
        [
            Panel(
                "Tokens per second",
                {
                    "generated": total(rate("vllm:generation_tokens_total")),
                    "prompts, {{source}}": total(
                        rate("vllm:prompt_tokens_by_source_total"), "source"
                    ),
                },
            ),
            Panel("Time to first token", quantiles("vllm:time_to_first_token_seconds"), "s"),
            Panel("Time between tokens", quantiles("vllm:inter_token_latency_seconds"), "s"),
        ],
        [
            Panel("Whole requests", quantiles("vllm:e2e_request_latency_seconds"), "s"),
            Panel(
                "Where a request's time goes",
                {
                    "queue": mean("vllm:request_queue_time_seconds"),
                    "prefill": mean("vllm:request_prefill_time_seconds"),
                    "decode": mean("vllm:request_decode_time_seconds"),
                },
                "s",
                description="Means.",
                is_stacked=True,
            ),
            Panel(
                "Engine",
                {"busy": total(rate("mlx_paged:engine_busy_seconds_total"))},
                "percentunit",
                description="Share of the time that the engine spends in steps.",
                most=1,
            ),
        ],
    ],
    "K/V cache": [
        [
            Panel(
                "Blocks",
                {"{{state}}": total(f"mlx_paged:kv_cache_blocks{ONE}", "state")},
                description="Cached blocks are free: they are evicted when there is no empty one.",
                is_stacked=True,
            ),
            Panel("Prefix cache hits", {"share of tokens": HIT_RATE}, "percentunit", most=1),
            Panel(
                "Why prompt tokens were missed",
                {"{{reason}}": total(rate("mlx_paged:prompt_tokens_missed_total"), "reason")},
                description="Tokens per second; /v1/cache has each prompt.",
                is_stacked=True,
            ),
            Panel(
                "Pressure",
                {
                    "evicted blocks": total(rate("mlx_paged:kv_cache_evictions_total")),
                    "preemptions": total(rate("vllm:num_preemptions_total")),
                },
                "ops",
            ),
        ],
        [
            Panel(
                "Memory",
                {
                    "K/V": total(f"mlx_paged:kv_cache_bytes{ONE}"),
                    "K/V budget": total(f"mlx_paged:kv_cache_budget_bytes{ONE}"),
                    "MLX, {{kind}}": total(f"mlx_paged:device_memory_bytes{ONE}", "kind"),
                },
                "bytes",
            ),
            Panel(
                "Tokens in host memory",
                {"swapped": total(f"mlx_paged:swapped_tokens{ONE}")},
                description="Of preempted requests.",
            ),
            Panel(
                "Drafts accepted",
                {
                    "all": ratio(
                        "vllm:spec_decode_num_accepted_tokens_total",
                        "vllm:spec_decode_num_draft_tokens_total",
                    ),
                    "position {{position}}": ratio(
                        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
                        "mlx_paged:spec_decode_num_draft_tokens_per_pos_total",
                        "position",
                    ),
                },
                "percentunit",
                description="Empty where nobody drafts.",
                most=1,
            ),
        ],
        [
            Panel(
                "Disk",
                {
                    "written in 24 hours": total(
                        f"increase(mlx_paged:disk_cache_written_bytes_total{ONE}[24h])"
                    ),
                    "held": f"max(mlx_paged:disk_cache_bytes{ONE})",
                },
                "bytes",
                description="Empty without --cache-dir.",
            ),
            Panel(
                "Blocks on disk",
                {"{{event}}": total(rate("mlx_paged:disk_cache_block_events_total"), "event")},
                "ops",
                description="Empty without --cache-dir.",
            ),
        ],
    ],
    "Requests": [
        [
            Panel(
                "Requests",
                {
                    "running": total(f"vllm:num_requests_running{ONE}"),
                    "waiting": total(f"vllm:num_requests_waiting{ONE}"),
                },
                is_stacked=True,
            ),
            Panel(
                "Ended by",
                {
                    "{{finished_reason}}": total(
                        rate("vllm:request_success_total"), "finished_reason"
                    )
                },
                "ops",
                is_stacked=True,
            ),
            Panel(
                "HTTP",
                {
                    "{{path}} {{status}}": total(
                        rate("mlx_paged:http_requests_total", ""), "path, status"
                    )
                },
                "reqps",
            ),
        ],
        [
            Panel("Prompt tokens", quantiles("vllm:request_prompt_tokens")),
            Panel("Answer tokens", quantiles("vllm:request_generation_tokens")),
            Panel("Tokens per step", quantiles("vllm:iteration_tokens_total")),
        ],
    ],
}


def make_dashboard() -> dict[str, Any]:
    panels = [panel | {"id": number} for number, panel in enumerate(_placed_panels(), 1)]
    return {
        "uid": "mlx-paged",
        "title": "mlx_paged",
        "description": "A server of mlx_paged: speed, K/V cache and requests.",
        "tags": ["mlx_paged", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "templating": {"list": [_datasource_variable(), _model_variable()]},
        "panels": panels,
    }


def _placed_panels() -> Iterator[dict[str, Any]]:
    y = 0
    for title, lines in PANELS.items():
        yield {
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
        }
        y += 1
        for line in lines:
            width = WIDTH // len(line)
            height = 4 if line[0].kind == "stat" else 8
            for index, panel in enumerate(line):
                place = {"h": height, "w": width, "x": index * width, "y": y}
                yield _panel(panel) | {"gridPos": place}
            y += height


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 25 if panel.is_stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
        }
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        options = {
            "colorMode": "none",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for number, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "current": {},
        "options": [],
    }


def _model_variable() -> dict[str, Any]:
    query = "label_values(vllm:num_requests_running, model_name)"
    return {
        "name": "model_name",
        "label": "Model",
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "models"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "options": [],
    }


def dashboard_text() -> str:
    return json.dumps(make_dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(dashboard_text())
    print(DASHBOARD)
