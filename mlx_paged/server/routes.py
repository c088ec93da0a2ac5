"""``ApiRoute``: a path with its endpoint, its protocol and the class of its body."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_paged.errors import shown
from mlx_paged.server.context import RequestContext
from mlx_paged.server.errors import ApiError, WireProtocol
from mlx_paged.server.http.bodies import parse_json
from mlx_paged.server.http.disconnects import CLIENT_LEFT, ClientLeftError, until_disconnect
from mlx_paged.server.schemas import Body
from mlx_paged.server.service import Service

# Bytes that are parsed in the event loop, within 1 to 2 ms. More would delay streams.
_SMALL_BODY = 2**15

B = TypeVar("B", bound=Body)
Endpoint: TypeAlias = Callable[[RequestContext[B]], Coroutine[Any, Any, Response]]


class ApiRoute(Route):
    """A route whose endpoint takes a :class:`RequestContext`.

    Args:
        body: the class of the body of POST requests; ``None`` for GET requests. An endpoint with a
            body is cancelled if the client disconnects before the response begins.
        methods: overrides these methods.

    Attributes:
        service: set before the first request.
    """

    service: Service

    def __init__(
        self,
        path: str,
        endpoint: Endpoint[B],
        body: type[B] | None = None,
        protocol: WireProtocol = WireProtocol.OPENAI,
        methods: Sequence[str] = (),
    ):
        methods = methods or ("GET" if body is None else "POST",)
        super().__init__(path, self._respond, methods=list(methods))
        self.body = body
        self.protocol = protocol
        self.summary = (endpoint.__doc__ or "").strip().partition("\n")[0]
        self._endpoint = endpoint

    async def _respond(self, request: Request) -> Response:
        if self.body is None:
            return await self._endpoint(self._context(request, None))
        try:
            return await until_disconnect(request.receive, self._answer(request))
        except ClientLeftError:
            return Response(status_code=CLIENT_LEFT)

    async def _answer(self, request: Request) -> Response:
        return await self._endpoint(self._context(request, await self._read_json(request)))

    async def _read_json(self, request: Request) -> Any:
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            what = (
                f"the content encoding {shown(encoding)} is not supported; send the body unencoded"
            )
            raise ApiError(415, what, headers={"Accept-Encoding": "identity"})
        body, user = await request.body(), request.state.principal.name
        if len(body) <= _SMALL_BODY:
            return parse_json(body)
        return await self.service.run_in_tokenizer_pool(user, lambda _: parse_json(body))

    def _context(self, request: Request, value: Any) -> RequestContext[Any]:
        state = request.state
        return RequestContext(
            request, self.service, self.body or Body, value, state.principal, state.request_id
        )
