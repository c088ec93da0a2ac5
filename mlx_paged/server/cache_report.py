"""``/v1/cache``: what the prefix cache held of the last prompts, and why not more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.engine.prefix_history import REASONS, Change, PrefixReport
from mlx_paged.server.errors import ApiError
from mlx_paged.server.service import Service

DEFAULT_LIMIT = 20
# Of each side's text, around the place where a prompt left the cached one.
NUM_TEXT_TOKENS = 48

_CHANGES = {
    "inserted": "{found} inserted",
    "removed": "{expected} removed",
    "replaced": "{expected} replaced by {found}",
    "reordered": "{found} in another order",
}


def explanation(report: PrefixReport) -> str:
    """Why no more of a prompt was cached, in a sentence without any of its text."""
    cached = f"{report.num_cached_tokens:,} of {_tokens(report.num_prompt_tokens)} cached"
    other, position = report.other_request_id, f"{report.position:,}"
    if report.reason == "hit":
        return f"{cached}: all whole blocks"
    if report.reason == "new":
        return f"{cached}: {REASONS['new']}"
    if report.reason == "continued":
        return f"{cached}: it goes on where {other} ended, at token {position}"
    if report.reason == "changed":
        return f"{cached}: it left {other} at token {position}: {_change(report)}"
    if report.reason == "pending":
        return f"{cached}: from token {position} on, {other} is being computed"
    if report.reason == "held":
        return f"{cached}: from token {position} on, {other} holds it, and --kv basic can't share"
    return (
        f"{cached}: from token {position} on, what {other} computed was evicted; a larger "
        "--kv-cache-bytes keeps more"
    )


def _change(report: PrefixReport) -> str:
    change = report.change()
    assert change is not None, "the report says that it changed"
    expected, found = change.num_expected, change.num_found
    is_open = max(expected, found) >= max(len(report.expected), len(report.found))
    if is_open and change.kind == "replaced":
        return "all that follows is different"
    return _CHANGES[change.kind].format(expected=_tokens(expected), found=_tokens(found))


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


def report_body(report: PrefixReport, tokenizer: TokenizerWrapper | None = None) -> dict[str, Any]:
    """A report for JSON; with a tokenizer, also the texts around the place of the change."""
    change: Change | None = report.change()
    body: dict[str, Any] = {
        "request_id": report.request_id,
        "prompt_tokens": report.num_prompt_tokens,
        "cached_tokens": report.num_cached_tokens,
        "reason": report.reason,
        "position": report.position,
        "compared_with": report.other_request_id,
        "change": None if change is None else change._asdict(),
        "explanation": explanation(report),
    }
    if tokenizer is not None:
        body["text"] = {
            "before": _text(tokenizer, report.before),
            "cached": _text(tokenizer, report.expected[:NUM_TEXT_TOKENS]),
            "prompt": _text(tokenizer, report.found[:NUM_TEXT_TOKENS]),
        }
    return body


def _text(tokenizer: TokenizerWrapper, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(token_ids)) if token_ids else ""
    return text


async def cache(request: Request) -> Response:
    """``GET /v1/cache?limit=20&request_id=...&text=true``."""
    service: Service = request.app.state.service
    query = dict(request.query_params)
    limit = _limit(query.pop("limit", str(DEFAULT_LIMIT)))
    request_id = query.pop("request_id", None)
    wants_text = _truth(query.pop("text", "false"))
    for name in query:
        raise ApiError(400, f"{name} is not supported; limit, request_id and text are", param=name)
    is_own = _owner(request)
    history = service.engine.engine.prefix_history
    reports = [
        report
        for report in reversed(list(history.reports))
        if is_own(report) and request_id in (None, report.request_id)
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
        "num_missed_tokens": dict(history.num_missed_tokens),
        "reports": [
            report_body(report, service.tokenizer if wants_text else None)
            for report in reports[:limit]
        ],
    }
    return JSONResponse(body)


def _owner(request: Request) -> Callable[[PrefixReport], bool]:
    """Which reports the user of this request may see: those of prompts under the user's salt."""
    principal = getattr(request.state, "principal", None)
    if principal is None:
        return lambda report: True
    return lambda report: bool(principal.owns(report.cache_salt))


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
