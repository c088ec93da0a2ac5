"""``/v1/cache``: how much of recent prompts was cached, and why not more."""

from __future__ import annotations

from dataclasses import asdict

from starlette.responses import JSONResponse, Response

from mlx_paged.server.context import RequestContext
from mlx_paged.server.errors import ApiError
from mlx_paged.server.schemas import Body
from mlx_paged.server.watching.prefix_reports import report_body

DEFAULT_LIMIT = 20


async def cache(context: RequestContext[Body]) -> Response:
    """The state of the prefix cache: ``?limit=20&request_id=...&text=true``."""
    service, owns = context.service, context.principal.owns
    query = dict(context.request.query_params)
    limit = _limit(query.pop("limit", str(DEFAULT_LIMIT)))
    request_id = query.pop("request_id", None)
    wants_text = _truth(query.pop("text", "false"))
    if wants_text and not service.settings.allow_cache_texts:
        raise ApiError(
            403,
            "this server does not show texts of prompts; start it with --allow-cache-texts",
            param="text",
            code="texts_not_allowed",
        )
    for name in query:
        words = "is not supported; use limit, request_id or text"
        raise ApiError(400, f"{name} {words}", param=name)
    history = service.engine.engine.prefix_history
    reports = [
        report
        for report in reversed(list(history.reports))
        if owns(report.cache_salt) and request_id in (None, report.request_id)
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
            report_body(report, service.tokenizer if wants_text else None)
            for report in reports[:limit]
        ],
    }
    return JSONResponse(body)


def _limit(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ApiError(400, "limit must be a whole number, at least 0", param="limit")
    return number


def _truth(text: str) -> bool:
    if text not in ("true", "false", "1", "0"):
        raise ApiError(400, "text must be true or false", param="text")
    return text in ("true", "1")
