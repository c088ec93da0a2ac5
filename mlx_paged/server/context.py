"""``RequestContext``: what an endpoint gets for a request: its body, its user and its id."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.request import RequestOutput
from mlx_paged.server.chat_jobs import ChatJob, prepare
from mlx_paged.server.fair_threads import Work
from mlx_paged.server.generations import Answer, Generation
from mlx_paged.server.http.access import Principal
from mlx_paged.server.http.sse import EventStream
from mlx_paged.server.schemas import Body
from mlx_paged.server.service import Service


class Renderer(Protocol):
    """Renders the answer to a request as one object or as server-sent events."""

    request_id: str
    is_streamed: bool

    def whole(self, *outputs: RequestOutput) -> dict[str, Any]: ...

    def events(self, *answers: Answer) -> AsyncGenerator[bytes, None]: ...


T = TypeVar("T")
B = TypeVar("B", bound=Body)
J = TypeVar("J", ChatJob, Generation)


@dataclass(frozen=True)
class RequestContext(Generic[B]):
    """A request to an endpoint.

    Args:
        request: its head.
        schema: the class of its body.
        value: its body, as parsed from JSON.
        principal: the user.
        request_id: used in the log and in headers.
    """

    request: Request
    service: Service
    schema: type[B]
    value: Any
    principal: Principal
    request_id: str

    def read_body(self, leaves_out: bool = False) -> B:
        """Validate the body. This is slow for large ones, so call it with
        :meth:`run_in_tokenizer_pool`.

        Args:
            leaves_out: drop unknown fields instead of refusing them.

        Raises:
            ApiError: the first error in the body, with its place; 400.
        """
        return self.schema.read(self.value, leaves_out=leaves_out)

    async def run_in_tokenizer_pool(self, work: Callable[[Work], T]) -> T:
        """:meth:`Service.run_in_tokenizer_pool` for the user."""
        return await self.service.run_in_tokenizer_pool(self.principal.name, work)

    def owned(self, asked: J) -> J:
        """A copy for the user: with a cache salt that contains theirs, and with ``no_store`` if the
        header ``Cache-Control: no-store`` (RFC 9111) requests that.
        """
        directives = self.request.headers.get("cache-control", "").lower().split(",")
        no_store = asked.no_store or "no-store" in map(str.strip, directives)
        salt = self.principal.salted(asked.cache_salt)
        return replace(asked, user=self.principal.name, cache_salt=salt, no_store=no_store)

    async def prepare_chat(
        self, read: Callable[[B, Service], ChatJob], leaves_out: bool = False
    ) -> tuple[B, Generation]:
        """Validate the body and encode its conversation.

        Args:
            read: turns the body into a job.
            leaves_out: drop unknown fields instead of refusing them.

        Raises:
            ApiError: raised by ``read``, or the conversation can't be made into a prompt.
        """

        def prepared(work: Work) -> tuple[B, Generation]:
            body = self.read_body(leaves_out)
            return body, prepare(work, self.service, self.owned(read(body, self.service)))

        return await self.run_in_tokenizer_pool(prepared)

    async def respond(self, renderer: Renderer, *generations: Generation) -> Response:
        """Run generations and render their answers."""
        if renderer.is_streamed:
            answers = await self.service.start_all(generations, renderer.request_id)
            return EventStream(renderer.events(*answers), *answers)
        outputs = await self.service.whole(generations, renderer.request_id)
        return JSONResponse(renderer.whole(*outputs))
