"""What the server shows of itself: ``/``, a page that shows the pool, and ``/v1/pool``, its data;
``/v1/cache``, how much of recent prompts was cached, and why not more; ``/health``, ``/version``.
"""

from __future__ import annotations

import base64
import time
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

import mlx_paged
from mlx_paged.engine.reports import Histogram
from mlx_paged.request import PrefixReport
from mlx_paged.server.errors import ApiError, api_error
from mlx_paged.server.http.access import html_page
from mlx_paged.server.routes import RequestContext
from mlx_paged.server.schemas import Body, read_query
from mlx_paged.server.service import Service

MAX_CELLS = 16384
DEFAULT_CELLS = 4096
MAX_ROWS = 200
_STATE_ORDER = {"running": 0, "preempted": 1, "waiting": 2}

DEFAULT_LIMIT = 20


async def page(context: RequestContext[Body]) -> Response:
    """A page that shows the pool."""
    return html_page("mlx_paged.server")


class PoolQuery(BaseModel):
    cells: Annotated[int, Field(ge=1, le=MAX_CELLS)] = DEFAULT_CELLS


async def pool(context: RequestContext[Body]) -> Response:
    """The data of the page: the blocks of the pool, the requests, and statistics.

    ``?cells=N`` asks for at most N cells, each of which represents one or more blocks.
    """
    query = read_query(PoolQuery, context.request.query_params)
    body = pool_report(context.service, query.cells)
    return JSONResponse(body, headers={"Cache-Control": "no-store"})


def pool_report(service: Service, num_cells: int) -> dict[str, Any]:
    """The body of ``/v1/pool``, which contains no texts of users. The bytes of its cells
    (:meth:`EngineView.cells`) are in base64.
    """
    engine = service.engine.engine
    view = service.engine.view()
    blocks_per_cell, cells = view.cells(num_cells)
    rows = sorted(view.requests, key=lambda row: (_STATE_ORDER[row.state], -row.age))
    return {
        "object": "pool",
        "model": service.model_names[0],
        "created": service.created,
        "seconds": time.perf_counter(),
        "block_size": view.block_size,
        "num_blocks": len(view.blocks),
        "max_num_blocks": engine.scheduler.max_num_blocks,
        "cells": {
            "blocks_per_cell": blocks_per_cell,
            **{name: _base64(values) for name, values in cells.items()},
        },
        "requests": [asdict(row) for row in rows[:MAX_ROWS]],
        "num_requests": len(rows),
        "stats": asdict(service.engine.stats()),
        "latencies": {
            name: _histogram(getattr(engine.latencies, name))
            for name in ("time_to_first_token", "inter_token_latency")
        },
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _histogram(histogram: Histogram) -> dict[str, Any]:
    counts = list(histogram.counts)
    return {"bounds": histogram.bounds, "counts": counts, "sum": histogram.sum}


class CacheQuery(BaseModel, extra="forbid"):
    limit: Annotated[int, Field(ge=0)] = DEFAULT_LIMIT
    request_id: str | None = None
    text: bool = False


async def cache_report(context: RequestContext[Body]) -> Response:
    """The state of the prefix cache: ``?limit=20&request_id=...&text=true``."""
    service, owns = context.service, context.principal.owns
    query = read_query(CacheQuery, context.request.query_params)
    if query.text and not service.settings.allow_cache_texts:
        raise ApiError(
            403,
            "this server does not show texts of prompts; start it with --allow-cache-texts",
            param="text",
            code="texts_not_allowed",
        )
    history = service.engine.engine.prefix_history
    reports = [
        report
        for report in reversed(list(history.reports))
        if owns(report.cache_salt) and query.request_id in (None, report.request_id)
    ]
    stats = service.engine.stats()
    body = {
        "object": "cache",
        "block_size": service.engine.engine.cache.config.block_size,
        "num_blocks": stats.num_usable_blocks,
        "num_used_blocks": stats.num_used_blocks,
        "num_cached_blocks": stats.num_cached_blocks,
        "num_evictions": stats.num_evictions,
        "bytes_held": stats.nbytes_held,
        "bytes_budget": stats.nbytes_budget,
        "num_queried_tokens": stats.num_queried_tokens,
        "num_cached_tokens": stats.num_hit_tokens,
        "hit_rate": stats.hit_rate,
        "num_checkpoints": stats.num_checkpoints,
        "bytes_checkpoints": stats.nbytes_checkpoints,
        "num_stateless_tokens": stats.num_stateless_tokens,
        "disk": None if stats.disk_tier is None else asdict(stats.disk_tier),
        "num_missed_tokens": dict(history.num_missed_tokens),
        "reports": [
            _report_body(report) | ({"text": service.texts_of(report)} if query.text else {})
            for report in reports[: query.limit]
        ],
    }
    return JSONResponse(body)


def _report_body(report: PrefixReport) -> dict[str, Any]:
    change = report.change()
    return {
        "request_id": report.request_id,
        "prompt_tokens": report.num_prompt_tokens,
        "cached_tokens": report.num_cached_tokens,
        "read_tokens": report.num_read_tokens,
        "reason": report.reason,
        "position": report.position,
        "compared_with": report.other_request_id,
        "change": None if change is None else change._asdict(),
        "explanation": report.explanation,
    }


async def health(context: RequestContext[Body]) -> Response:
    """The health of the server: 503 after the engine has stopped, and while a step hangs."""
    service = context.service
    reason = service.engine.stopped()
    if reason is not None:
        raise api_error(reason)
    seconds = service.engine.step_seconds()
    if seconds > service.settings.step_timeout:
        raise ApiError(
            503,
            f"a step of the engine has been running for {seconds:.0f} seconds, and --step-timeout "
            f"is {service.settings.step_timeout:g}; if it does not end, restart the server",
            code="step_hangs",
        )
    return JSONResponse({"status": "ok"})


async def version(context: RequestContext[Body]) -> Response:
    """The version of the package."""
    return JSONResponse({"version": mlx_paged.__version__})
