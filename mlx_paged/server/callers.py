"""Whose request it is: its id, and who shares cached K/V with it."""

from __future__ import annotations

import uuid

from starlette.requests import Request


def request_id_of(request: Request, wanted: str | None = None) -> str:
    """The id of a request: the one that its body wants, that of its headers, or a new one."""
    name: str | None = wanted or getattr(request.state, "request_id", None)
    return name or uuid.uuid4().hex


def cache_salt_of(request: Request, wanted: str | None) -> str | None:
    """What keeps the cached K/V of a request apart, from that of its user and that of its body."""
    principal = getattr(request.state, "principal", None)
    if principal is None:
        return wanted
    salt: str | None = principal.salted(wanted)
    return salt
