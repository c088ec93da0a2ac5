"""Whose request it is: its id, who shares cached K/V with it, and whether they may be stored."""

from __future__ import annotations

import uuid
from dataclasses import replace

from starlette.requests import Request

from mlx_paged.server.chat_jobs import ChatJob


def request_id_of(request: Request, wanted: str | None = None) -> str:
    """The id of a request: the one that its body wants, that of its headers, or a new one."""
    name: str | None = wanted or getattr(request.state, "request_id", None)
    return name or uuid.uuid4().hex


def user_of(request: Request) -> str:
    """The name of the user, who has a share of the threads that prepare requests."""
    principal = getattr(request.state, "principal", None)
    return "-" if principal is None else principal.name


def cache_salt_of(request: Request, wanted: str | None) -> str | None:
    """What keeps the cached K/V of a request apart, from that of its user and that of its body."""
    principal = getattr(request.state, "principal", None)
    if principal is None:
        return wanted
    salt: str | None = principal.salted(wanted)
    return salt


def no_store_of(request: Request, wanted: bool) -> bool:
    """Whether nothing of a request is written to disk: its body says so, or its header
    ``Cache-Control: no-store``, which asks that of every cache on the way (RFC 9111).
    """
    directives = request.headers.get("cache-control", "").lower().split(",")
    return wanted or "no-store" in map(str.strip, directives)


def job_of(request: Request, job: ChatJob) -> ChatJob:
    """The conversation of a body as that of the request's user."""
    return replace(
        job,
        user=user_of(request),
        cache_salt=cache_salt_of(request, job.cache_salt),
        no_store=no_store_of(request, job.no_store),
    )
