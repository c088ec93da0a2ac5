"""``RequestContext``: what an endpoint knows of a request: its body, whose it is, who shares cached
K/V with it, whether they may be stored, and the conversation that it is about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request

from mlx_paged.server.answers.reader import AnswerFormat
from mlx_paged.server.chat_jobs import ChatJob, prepare
from mlx_paged.server.fair_threads import Work
from mlx_paged.server.generations import Generation
from mlx_paged.server.http.access import Principal
from mlx_paged.server.schemas import Body
from mlx_paged.server.service import Service


class HasJob(Protocol):
    """The body of a request, read, in any protocol."""

    @property
    def job(self) -> ChatJob: ...


B = TypeVar("B", bound=Body)
J = TypeVar("J", bound=HasJob)


@dataclass(frozen=True)
class RequestContext(Generic[B]):
    """A request to an endpoint.

    Args:
        request: its head.
        service: that answers.
        schema: of its body.
        value: of its body, which is JSON.
        principal: whose request it is.
        request_id: in the log and in headers.
    """

    request: Request
    service: Service
    schema: type[B]
    value: Any
    principal: Principal
    request_id: str

    def read_body(self, leaves_out: bool = False) -> B:
        """The body. It takes long for long ones, so call it with
        :meth:`Service.run_in_tokenizer_pool`.

        Args:
            leaves_out: unknown fields are left out, and not refused.

        Raises:
            ApiError: the first thing that is wrong with it, by its place; 400.
        """
        return self.schema.read(self.value, leaves_out=leaves_out)

    @property
    def user(self) -> str:
        """The name of the user, who has a share of the threads that prepare requests."""
        return self.principal.name

    def cache_salt(self, wanted: str | None = None) -> str | None:
        """What keeps the cached K/V apart, from that of the user and that of the body."""
        return self.principal.salted(wanted)

    def no_store(self, wanted: bool = False) -> bool:
        """Whether nothing of the request is written to disk: its body says so, or its header
        ``Cache-Control: no-store``, which asks that of every cache on the way (RFC 9111).
        """
        directives = self.request.headers.get("cache-control", "").lower().split(",")
        return wanted or "no-store" in map(str.strip, directives)

    async def prepare_chat(
        self, read: Callable[[B, Service], J], leaves_out: bool = False
    ) -> tuple[J, Generation, AnswerFormat]:
        """The body as ``read`` reads it, and the prompt and the answers that it asks for.

        Args:
            leaves_out: unknown fields are left out, and not refused.

        Raises:
            ApiError: what ``read`` raises, or the conversation can't be a prompt.
        """

        def prepared(work: Work) -> tuple[J, Generation, AnswerFormat]:
            body = read(self.read_body(leaves_out), self.service)
            job = replace(
                body.job,
                user=self.user,
                cache_salt=self.cache_salt(body.job.cache_salt),
                no_store=self.no_store(body.job.no_store),
            )
            return body, *prepare(work, self.service, job)

        return await self.service.run_in_tokenizer_pool(self.user, prepared)
