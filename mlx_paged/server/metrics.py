"""``/metrics``: metrics of the engine and the server for Prometheus.

Metrics that vLLM's v1 engine also has are named as there, so that its dashboards work; the others
begin with ``mlx_paged:``. Values are read when they are requested: a scrape takes no lock, and
steps do no work for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import mlx.core as mx
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.reports import Histogram
from mlx_paged.engine.request import Completion
from mlx_paged.engine.stats import EngineStats
from mlx_paged.engine.storing.tier_cache import TierCacheStats
from mlx_paged.request import SpecDecodingStats
from mlx_paged.server.routes import RequestContext
from mlx_paged.server.schemas import Body

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"
_OPENMETRICS = "application/openmetrics-text"


# What each metric says, by its name.
_GAUGES = {
    "vllm:num_requests_running": "Running sequences.",
    "vllm:num_requests_waiting": "Waiting sequences.",
    "vllm:kv_cache_usage_perc": "Share of the K/V budget in blocks held by requests, from 0 to 1.",
    "vllm:cache_config_info": "The configuration of the K/V cache; the value is always 1.",
    "vllm:lora_requests_info": "The adapters of running and of waiting requests, and the most "
    "that may be loaded; the value is the time of the scrape.",
    "mlx_paged:kv_cache_blocks": "Allocated blocks: held by requests, free but cached, and empty.",
    "mlx_paged:checkpoints": "Recurrent states kept for prefix hits.",
    "mlx_paged:checkpoint_bytes": "Bytes of recurrent states.",
    "mlx_paged:kv_cache_bytes": "Bytes allocated for K/V.",
    "mlx_paged:kv_cache_budget_bytes": "The K/V budget in bytes.",
    "mlx_paged:swapped_tokens": "Tokens of preempted requests whose K/V are in host memory.",
    "mlx_paged:disk_cache_blocks": "Blocks on disk.",
    "mlx_paged:disk_cache_bytes": "Bytes of the blocks on disk.",
    "mlx_paged:disk_cache_up": "1 while the disk is used, 0 after a failure.",
    "mlx_paged:device_memory_bytes": "MLX's memory: active, cached for reuse, and the peak of "
    "active memory.",
}
_COUNTERS = {
    "vllm:num_preemptions": "Preemptions: sequences whose blocks were given to others.",
    "vllm:request_success": "Finished completions by finish reason.",
    "mlx_paged:engine_busy_seconds": "Seconds the engine spent in steps.",
    "vllm:prompt_tokens": "Prompt tokens of requests that reached their first token, including "
    "cached ones.",
    "vllm:prompt_tokens_by_source": "The same by the source of their K/V.",
    "vllm:prompt_tokens_cached": "Cached prompt tokens.",
    "vllm:generation_tokens": "Generated tokens.",
    "vllm:spec_decode_num_drafts": "Verifications of drafts, one per sequence and step.",
    "vllm:spec_decode_num_draft_tokens": "Verified draft tokens.",
    "mlx_paged:spec_decode_num_draft_tokens_per_pos": "The same by their position among the drafts "
    "of a step.",
    "vllm:spec_decode_num_accepted_tokens": "Accepted draft tokens.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "The same by their position among the drafts "
    "of a step.",
    "vllm:prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens found in the prefix cache.",
    "mlx_paged:prompt_tokens_missed": "Prompt tokens that were not cached, by reason; empty if no "
    "history is kept.",
    "mlx_paged:kv_cache_evictions": "Cached blocks that were evicted.",
    "mlx_paged:stateless_tokens": "Prompt tokens recomputed despite cached K/V, since a recurrent "
    "state was missing.",
    "vllm:external_prefix_cache_queries": "Prompt tokens looked up on disk, since they were not "
    "in memory.",
    "vllm:external_prefix_cache_hits": "Prompt tokens whose K/V were read from disk.",
    "mlx_paged:disk_cache_block_events": "Blocks that were read, written, dropped before being "
    "written, corrupt, or evicted.",
    "mlx_paged:disk_cache_written_bytes": "Bytes that this server has written to disk: blocks, "
    "states and answers.",
    "mlx_paged:http_requests": "Finished HTTP requests; status 499: disconnected before the "
    "response was complete.",
}
# The value of a metric, or the names of further labels and the values by those of the labels.
Value: TypeAlias = "float | tuple[str, Mapping[Any, float]]"


def count_request(
    counts: Counter[tuple[str, str, int]], routes: Sequence[Route], scope: Scope, status: int
) -> None:
    """Count a finished HTTP request by method, path and status.

    The path is that of a route, with the names of its parameters, also for requests that were
    refused before routing. Any other path is ``"other"``, so that clients can't create new labels.

    Args:
        routes: the routes of the application.
    """
    method = scope["method"] if scope["method"] in _METHODS else _OTHER
    endpoint = scope.get("endpoint")  # set by the router
    taken = (route.path for route in routes if route.endpoint is endpoint)
    is_plain = any(route.path == scope["path"] for route in routes)
    counts[method, scope["path"] if is_plain else next(taken, _OTHER), status] += 1


class EngineCollector(Collector):
    """Collects the metrics of an engine and the counts of HTTP requests.

    Args:
        model_name: a label of all metrics.
        http_counts: HTTP requests by method, path and status.
        is_one_of_several: whether these counts have the label, too.
    """

    def __init__(
        self,
        engine: Engine,
        model_name: str,
        http_counts: Mapping[tuple[str, str, int], int],
        is_one_of_several: bool = False,
    ):
        self._engine = engine
        self._http_counts = http_counts
        self._http_labels = {"model_name": model_name} if is_one_of_several else {}
        # vLLM numbers its engines; there is one here.
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        values = self._requests(stats) | self._cache(stats)
        if stats.disk_tier is not None:
            values |= self._disk(stats, stats.disk_tier)
        yield from (_metric(*each, self._labels) for each in values.items())
        yield from map(self._histogram, self._engine.latencies.histograms)
        memory = {
            "active": mx.get_active_memory(),
            "cache": mx.get_cache_memory(),
            "peak": mx.get_peak_memory(),
        }
        yield _metric("mlx_paged:device_memory_bytes", ("kind", memory), self._labels)
        http = {
            (method, path, str(status)): count
            for (method, path, status), count in sorted(dict(self._http_counts).items())
        }
        yield _metric("mlx_paged:http_requests", ("method path status", http), self._http_labels)

    def _requests(self, stats: EngineStats) -> dict[str, Value]:
        num_cached, num_read = stats.num_cached_prompt_tokens, stats.num_read_prompt_tokens
        sources = {
            "local_compute": stats.num_prompt_tokens - num_cached,
            "local_cache_hit": num_cached - num_read,
            "external_kv_transfer": num_read,
        }
        return {
            "vllm:num_requests_running": stats.num_running,
            "vllm:num_requests_waiting": stats.num_waiting,
            "vllm:num_preemptions": stats.num_preemptions,
            "vllm:request_success": ("finished_reason", stats.num_finished),
            "mlx_paged:engine_busy_seconds": stats.busy_seconds,
            "vllm:prompt_tokens": stats.num_prompt_tokens,
            "vllm:prompt_tokens_by_source": ("source", sources),
            "vllm:prompt_tokens_cached": num_cached,
            "vllm:generation_tokens": stats.num_generation_tokens,
            **self._drafts(stats.spec_decoding),
            **self._adapters(),
        }

    def _adapters(self) -> dict[str, Value]:
        scheduler, most = self._engine.scheduler, self._engine.adapters.max_adapters
        if not most:
            return {}

        def names(completions: Iterable[Completion]) -> str:
            adapters = [each.request.adapter for each in completions]
            return ",".join(sorted({each.name for each in adapters if each is not None}))

        labels = {
            "max_lora": str(most),
            "running_lora_adapters": names(list(scheduler.running)),
            "waiting_lora_adapters": names(list(scheduler.waiting)),
        }
        return {
            "vllm:lora_requests_info": (" ".join(labels), {tuple(labels.values()): time.time()})
        }

    def _drafts(self, stats: SpecDecodingStats) -> dict[str, Value]:
        most = self._engine.scheduler.speculation.num_draft_tokens
        if not most:
            return {}

        def per_pos(counts: Sequence[int]) -> Value:
            # With those that drafts have not reached yet.
            padded = [*counts, *[0] * (most - len(counts))]
            return "position", {str(position): count for position, count in enumerate(padded)}

        return {
            "vllm:spec_decode_num_drafts": stats.num_drafts,
            "vllm:spec_decode_num_draft_tokens": stats.num_draft_tokens,
            "mlx_paged:spec_decode_num_draft_tokens_per_pos": per_pos(
                stats.num_draft_tokens_per_pos
            ),
            "vllm:spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
            "vllm:spec_decode_num_accepted_tokens_per_pos": per_pos(
                stats.num_accepted_tokens_per_pos
            ),
        }

    def _cache(self, stats: EngineStats) -> dict[str, Value]:
        scheduler, config = self._engine.scheduler, self._engine.cache.config
        missed = {**self._engine.prefix_history.num_missed_tokens}
        num_used, num_empty = stats.num_used_blocks, stats.num_empty_blocks
        num_cached = stats.num_usable_blocks - num_used - num_empty
        blocks = {"held": num_used, "cached": num_cached, "empty": num_empty}
        labels = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_blocks),
            "cache_dtype": str(config.layers[0].format),
            "enable_prefix_caching": str(scheduler.config.enable_prefix_caching),
        }
        return {
            "vllm:kv_cache_usage_perc": num_used / max(1, scheduler.max_num_blocks),
            "vllm:prefix_cache_queries": stats.num_queried_tokens,
            "vllm:prefix_cache_hits": stats.num_hit_tokens,
            "mlx_paged:prompt_tokens_missed": ("reason", missed),
            "vllm:cache_config_info": (" ".join(labels), {tuple(labels.values()): 1}),
            "mlx_paged:kv_cache_blocks": ("state", blocks),
            "mlx_paged:kv_cache_evictions": stats.num_evictions,
            "mlx_paged:checkpoints": stats.num_checkpoints,
            "mlx_paged:checkpoint_bytes": stats.nbytes_checkpoints,
            "mlx_paged:stateless_tokens": stats.num_stateless_tokens,
            "mlx_paged:kv_cache_bytes": stats.nbytes_held,
            "mlx_paged:kv_cache_budget_bytes": stats.nbytes_budget,
            "mlx_paged:swapped_tokens": stats.num_swapped_tokens,
        }

    def _disk(self, stats: EngineStats, tier: TierCacheStats) -> dict[str, Value]:
        num_hits = stats.num_cached_prompt_tokens - stats.num_read_prompt_tokens  # in memory
        events = ("read", "written", "dropped", "corrupt", "evicted")
        return {
            "vllm:external_prefix_cache_queries": stats.num_prompt_tokens - num_hits,
            "vllm:external_prefix_cache_hits": stats.num_read_prompt_tokens,
            "mlx_paged:disk_cache_blocks": tier.num_blocks,
            "mlx_paged:disk_cache_bytes": tier.nbytes,
            "mlx_paged:disk_cache_block_events": (
                "event",
                {each: getattr(tier, f"num_{each}_blocks") for each in events},
            ),
            "mlx_paged:disk_cache_written_bytes": tier.nbytes_written,
            "mlx_paged:disk_cache_up": tier.failure is None,
        }

    def _histogram(self, histogram: Histogram) -> Metric:
        # Counts of buckets that belong together; the sum may be an observation ahead of them.
        totals = accumulate(list(histogram.counts))
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        metric = HistogramMetricFamily(histogram.name, histogram.help, labels=list(self._labels))
        buckets = list(zip(bounds, totals, strict=True))
        metric.add_metric(list(self._labels.values()), buckets, histogram.sum)
        return metric


def _metric(name: str, value: Value, labels: Mapping[str, str]) -> Metric:
    names, values = value if isinstance(value, tuple) else ("", {(): value})
    known, family = (
        (_GAUGES, GaugeMetricFamily) if name in _GAUGES else (_COUNTERS, CounterMetricFamily)
    )
    metric = family(name, known[name], labels=[*labels, *names.split()])
    for key, each in values.items():
        metric.add_metric([*labels.values(), *([key] if isinstance(key, str) else key)], each)
    return metric


async def metrics(context: RequestContext[Body]) -> Response:
    """Metrics for Prometheus."""
    request = context.request
    body, kind = exposition(request.app.state.metrics, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": kind, "Cache-Control": "no-store"})


def exposition(collector: Collector, accept: str) -> tuple[bytes, str]:
    """The metrics and their content type: OpenMetrics if ``Accept`` contains it, otherwise
    Prometheus's text format.
    """
    if _OPENMETRICS in [kind.partition(";")[0].strip() for kind in accept.split(",")]:
        # prometheus_client's default, UNDERSCORES, replaces the colons in names although they need
        # no escaping (its issue 1177).
        generate: Callable[..., bytes] = openmetrics.generate_latest
        body = generate(collector, escaping=openmetrics.ALLOWUTF8)
        return body, f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"
    return generate_latest(collector), "text/plain; version=0.0.4; charset=utf-8"
