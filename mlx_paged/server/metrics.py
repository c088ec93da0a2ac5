"""``/metrics``: metrics of the engine and the server for Prometheus.

Metrics that vLLM's v1 engine also has are named as there, so that its dashboards work; the others
begin with ``mlx_paged:``. Values are read when they are requested: a scrape takes no lock, and
steps do no work for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

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
from mlx_paged.engine.stats import EngineStats
from mlx_paged.engine.storing.tier_cache import TierCacheStats
from mlx_paged.request import SpecDecodingStats
from mlx_paged.server.routes import RequestContext
from mlx_paged.server.schemas import Body

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"
_OPENMETRICS = "application/openmetrics-text"


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
    """

    def __init__(
        self, engine: Engine, model_name: str, http_counts: Mapping[tuple[str, str, int], int]
    ):
        self._engine = engine
        self._http_counts = http_counts
        # vLLM numbers its engines; there is one here.
        self._labels = {"model_name": model_name, "engine": "0"}
        self._gauge = partial(self._metric, GaugeMetricFamily)
        self._counter = partial(self._metric, CounterMetricFamily)

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._states(stats)
        yield from self._tokens(stats)
        yield from self._cache(stats)
        if stats.disk_tier is not None:
            yield from self._disk_tier(stats, stats.disk_tier)
        yield from map(self._histogram, self._engine.latencies.histograms)
        yield self._gauge(
            "mlx_paged:device_memory_bytes",
            "MLX's memory: active, cached for reuse, and the peak of active memory.",
            {
                "active": mx.get_active_memory(),
                "cache": mx.get_cache_memory(),
                "peak": mx.get_peak_memory(),
            },
            "kind",
        )
        yield self._http()

    def _states(self, stats: EngineStats) -> Iterator[Metric]:
        gauge, counter = self._gauge, self._counter
        yield gauge("vllm:num_requests_running", "Running sequences.", stats.num_running)
        yield gauge("vllm:num_requests_waiting", "Waiting sequences.", stats.num_waiting)
        yield counter(
            "vllm:num_preemptions",
            "Preemptions: sequences whose blocks were given to others.",
            stats.num_preemptions,
        )
        yield counter(
            "vllm:request_success",
            "Finished completions by finish reason.",
            stats.num_finished,
            "finished_reason",
        )
        yield counter(
            "mlx_paged:engine_busy_seconds",
            "Seconds the engine spent in steps.",
            stats.busy_seconds,
        )

    def _tokens(self, stats: EngineStats) -> Iterator[Metric]:
        counter, num_cached = self._counter, stats.num_cached_prompt_tokens
        yield counter(
            "vllm:prompt_tokens",
            "Prompt tokens of requests that reached their first token, including cached ones.",
            stats.num_prompt_tokens,
        )
        yield counter(
            "vllm:prompt_tokens_by_source",
            "The same by the source of their K/V.",
            {
                "local_compute": stats.num_prompt_tokens - num_cached,
                "local_cache_hit": num_cached - stats.num_read_prompt_tokens,
                "external_kv_transfer": stats.num_read_prompt_tokens,
            },
            "source",
        )
        yield counter("vllm:prompt_tokens_cached", "Cached prompt tokens.", num_cached)
        yield counter("vllm:generation_tokens", "Generated tokens.", stats.num_generation_tokens)
        if self._engine.scheduler.speculation.is_on:
            yield from self._drafts(stats.spec_decoding)

    def _drafts(self, stats: SpecDecodingStats) -> Iterator[Metric]:
        counter = self._counter
        yield counter(
            "vllm:spec_decode_num_drafts",
            "Verifications of drafts, one per sequence and step.",
            stats.num_drafts,
        )
        yield counter(
            "vllm:spec_decode_num_draft_tokens", "Verified draft tokens.", stats.num_draft_tokens
        )
        yield counter(
            "mlx_paged:spec_decode_num_draft_tokens_per_pos",
            "The same by their position among the drafts of a step.",
            self._per_pos(stats.num_draft_tokens_per_pos),
            "position",
        )
        yield counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Accepted draft tokens.",
            stats.num_accepted_tokens,
        )
        yield counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "The same by their position among the drafts of a step.",
            self._per_pos(stats.num_accepted_tokens_per_pos),
            "position",
        )

    def _per_pos(self, counts: Sequence[int]) -> dict[str, int]:
        """By label, with those that drafts have not reached yet."""
        num_positions = self._engine.scheduler.speculation.num_draft_tokens
        padded = [*counts, *[0] * (num_positions - len(counts))]
        return {str(position): count for position, count in enumerate(padded)}

    def _cache(self, stats: EngineStats) -> Iterator[Metric]:
        gauge, counter, engine = self._gauge, self._counter, self._engine
        num_free = stats.num_usable_blocks - stats.num_used_blocks
        yield gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the K/V budget in blocks held by requests, from 0 to 1.",
            stats.num_used_blocks / max(1, engine.scheduler.max_num_blocks),
        )
        yield counter(
            "vllm:prefix_cache_queries",
            "Tokens looked up in the prefix cache.",
            stats.num_queried_tokens,
        )
        yield counter(
            "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", stats.num_hit_tokens
        )
        yield counter(
            "mlx_paged:prompt_tokens_missed",
            "Prompt tokens that were not cached, by reason; empty if no history is kept.",
            {**engine.prefix_history.num_missed_tokens},
            "reason",
        )
        yield self._cache_config()
        yield gauge(
            "mlx_paged:kv_cache_blocks",
            "Allocated blocks: held by requests, free but cached, and empty.",
            {
                "held": stats.num_used_blocks,
                "cached": num_free - stats.num_empty_blocks,
                "empty": stats.num_empty_blocks,
            },
            "state",
        )
        yield counter(
            "mlx_paged:kv_cache_evictions", "Cached blocks that were evicted.", stats.num_evictions
        )
        yield gauge(
            "mlx_paged:checkpoints", "Recurrent states kept for prefix hits.", stats.num_checkpoints
        )
        yield gauge(
            "mlx_paged:checkpoint_bytes", "Bytes of recurrent states.", stats.nbytes_checkpoints
        )
        yield counter(
            "mlx_paged:stateless_tokens",
            "Prompt tokens recomputed despite cached K/V, since a recurrent state was missing.",
            stats.num_stateless_tokens,
        )
        yield gauge("mlx_paged:kv_cache_bytes", "Bytes allocated for K/V.", stats.nbytes_held)
        yield gauge(
            "mlx_paged:kv_cache_budget_bytes", "The K/V budget in bytes.", stats.nbytes_budget
        )
        yield gauge(
            "mlx_paged:swapped_tokens",
            "Tokens of preempted requests whose K/V are in host memory.",
            stats.num_swapped_tokens,
        )

    def _disk_tier(self, stats: EngineStats, tier: TierCacheStats) -> Iterator[Metric]:
        gauge, counter = self._gauge, self._counter
        num_hits = stats.num_cached_prompt_tokens - stats.num_read_prompt_tokens  # in memory
        yield counter(
            "vllm:external_prefix_cache_queries",
            "Prompt tokens looked up on disk, since they were not in memory.",
            stats.num_prompt_tokens - num_hits,
        )
        yield counter(
            "vllm:external_prefix_cache_hits",
            "Prompt tokens whose K/V were read from disk.",
            stats.num_read_prompt_tokens,
        )
        yield gauge("mlx_paged:disk_cache_blocks", "Blocks on disk.", tier.num_blocks)
        yield gauge("mlx_paged:disk_cache_bytes", "Bytes of the blocks on disk.", tier.nbytes)
        yield counter(
            "mlx_paged:disk_cache_block_events",
            "Blocks that were read, written, dropped before being written, corrupt, or evicted.",
            {
                "read": tier.num_read_blocks,
                "written": tier.num_written_blocks,
                "dropped": tier.num_dropped_blocks,
                "corrupt": tier.num_corrupt_blocks,
                "evicted": tier.num_evicted_blocks,
            },
            "event",
        )
        yield counter(
            "mlx_paged:disk_cache_written_bytes",
            "Bytes that this server has written to disk: blocks, states and answers.",
            tier.nbytes_written,
        )
        yield gauge(
            "mlx_paged:disk_cache_up",
            "1 while the disk is used, 0 after a failure.",
            tier.failure is None,
        )

    def _cache_config(self) -> Metric:
        config = self._engine.cache.config
        labels = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_blocks),
            "cache_dtype": str(config.layers[0].format),
            "enable_prefix_caching": str(self._engine.scheduler.config.enable_prefix_caching),
        }
        info = "The configuration of the K/V cache; the value is always 1."
        return self._gauge("vllm:cache_config_info", info, {tuple(labels.values()): 1}, *labels)

    def _http(self) -> Metric:
        labels = ("method", "path", "status")
        metric = CounterMetricFamily(
            "mlx_paged:http_requests",
            "Finished HTTP requests; status 499: disconnected before the response was complete.",
            labels=labels,
        )
        for (method, path, status), count in sorted(dict(self._http_counts).items()):
            metric.add_metric([method, path, str(status)], count)
        return metric

    def _metric(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        documentation: str,
        values: float | Mapping[Any, float],
        *labels: str,
    ) -> Metric:
        """A metric with one value, or with one for each value of additional labels."""
        metric = family(name, documentation, labels=[*self._labels, *labels])
        for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
            more = [key] if isinstance(key, str) else key
            metric.add_metric([*self._labels.values(), *more], value)
        return metric

    def _histogram(self, histogram: Histogram) -> Metric:
        # Counts of buckets that belong together; the sum may be an observation ahead of them.
        totals = accumulate(list(histogram.counts))
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        metric = HistogramMetricFamily(histogram.name, histogram.help, labels=list(self._labels))
        buckets = list(zip(bounds, totals, strict=True))
        metric.add_metric(list(self._labels.values()), buckets, histogram.sum)
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
