"""Whose request it is: its id, who shares cached K/V with it, whether they may be stored, and the
conversation that it is about.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from starlette.requests import Request

from mlx_paged.server.answers.reader import AnswerFormat
from mlx_paged.server.chat_jobs import ChatJob, prepare
from mlx_paged.server.fair_threads import Work
from mlx_paged.server.fields import Fields
from mlx_paged.server.generations import Generation
from mlx_paged.server.service import Service


class HasJob(Protocol):
    """The body of a request, read, in any protocol."""

    @property
    def job(self) -> ChatJob: ...


B = TypeVar("B", bound=HasJob)


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


async def prepare_chat(
    request: Request, fields: Fields, read: Callable[[Fields, Service], B]
) -> tuple[B, Generation, AnswerFormat]:
    """The body as ``read`` reads it, and the prompt and the answers that it asks for.

    Raises:
        ApiError: what ``read`` raises, or the conversation can't be a prompt.
    """
    service: Service = request.app.state.service
    user = user_of(request)

    def prepared(work: Work) -> tuple[B, Generation, AnswerFormat]:
        body = read(fields, service)
        job = replace(
            body.job,
            user=user,
            cache_salt=cache_salt_of(request, body.job.cache_salt),
            no_store=no_store_of(request, body.job.no_store),
        )
        return body, *prepare(work, service, job)

    return await service.run_in_tokenizer_pool(user, prepared)
