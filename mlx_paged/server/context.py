"""``RequestContext``: what an endpoint knows of a request: its body, whose it is, who shares cached
K/V with it, whether they may be stored, and the conversation that it is about.
"""

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
    """Writes the answer to a request, whole or as events."""

    request_id: str
    is_streamed: bool

    def whole(self, *outputs: RequestOutput) -> dict[str, Any]: ...

    def events(self, *answers: Answer) -> AsyncGenerator[bytes, None]: ...


B = TypeVar("B", bound=Body)
J = TypeVar("J", ChatJob, Generation)


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

    def owned(self, asked: J) -> J:
        """The same as the user's: their salt is in that of its cached K/V, and nothing of it is
        written to disk where the header ``Cache-Control: no-store`` is there, which asks that of
        every cache on the way (RFC 9111).
        """
        directives = self.request.headers.get("cache-control", "").lower().split(",")
        no_store = asked.no_store or "no-store" in map(str.strip, directives)
        salt = self.principal.salted(asked.cache_salt)
        return replace(asked, user=self.user, cache_salt=salt, no_store=no_store)

    async def prepare_chat(
        self, read: Callable[[B, Service], ChatJob], leaves_out: bool = False
    ) -> tuple[B, Generation]:
        """The body, and the prompt and the answers that it asks for.

        Args:
            read: makes the job of the body.
            leaves_out: unknown fields are left out, and not refused.

        Raises:
            ApiError: what ``read`` raises, or the conversation can't be a prompt.
        """

        def prepared(work: Work) -> tuple[B, Generation]:
            body = self.read_body(leaves_out)
            return body, prepare(work, self.service, self.owned(read(body, self.service)))

        return await self.service.run_in_tokenizer_pool(self.user, prepared)

    async def respond(self, renderer: Renderer, *generations: Generation) -> Response:
        """The answers of generations, as a renderer writes them."""
        if renderer.is_streamed:
            answers = await self.service.start_all(generations, renderer.request_id)
            return EventStream(renderer.events(*answers), *answers)
        outputs = await self.service.whole(generations, renderer.request_id)
        return JSONResponse(renderer.whole(*outputs))
