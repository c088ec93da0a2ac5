"""``ApiRoute``: a path with its endpoint and the class of its body;
``RequestContext``: what an endpoint gets for a request; and ``/openapi.json``, made of the routes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import mlx_paged
from mlx_paged.engine.options import RequestOptions
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.request import RequestOutput
from mlx_paged.server.chat_jobs import ChatJob, prepare
from mlx_paged.server.errors import until_disconnect
from mlx_paged.server.fields import RequestFields
from mlx_paged.server.generations import Answer, AnswerState, Generation
from mlx_paged.server.http.access import Principal
from mlx_paged.server.http.sse import EventStream
from mlx_paged.server.prompt_threads import Work
from mlx_paged.server.schemas import Body, parse_json
from mlx_paged.server.service import Service

A = TypeVar("A", bound=RequestFields)
B = TypeVar("B", bound=Body)
T = TypeVar("T")

# Bytes that are parsed in the event loop, within 1 to 2 ms. More would delay streams.
_SMALL_BODY = 2**15
_PLACE = "#/components/schemas/{model}"


@dataclass(frozen=True)
class RequestContext(Generic[B]):
    """A request to an endpoint.

    Args:
        request: its head.
        schema: the class of its body.
        value: its body, as parsed from JSON.
        start: when it was received; seconds of ``time.perf_counter``.

    Attributes:
        principal: the user.
        request_id: used in the log and in headers.
    """

    request: Request
    schema: type[B]
    value: Any = None
    start: float = field(default_factory=time.perf_counter)

    @property
    def service(self) -> Service:
        return self.request.app.state.service  # type: ignore[no-any-return]

    @property
    def principal(self) -> Principal:
        return self.request.state.principal  # type: ignore[no-any-return]

    @property
    def request_id(self) -> str:
        return self.request.state.request_id  # type: ignore[no-any-return]

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

    def for_user(self, generation: Generation) -> Generation:
        """A copy for the user: with a cache salt that contains theirs, and with ``no_store`` if the
        header ``Cache-Control: no-store`` (RFC 9111) requests that.
        """
        directives = self.request.headers.get("cache-control", "").lower().split(",")
        options: RequestOptions = {
            **generation.options,
            "user": self.principal.name,
            "cache_salt": self.principal.salted(generation.cache_salt),
        }
        if "no-store" in map(str.strip, directives):
            options["no_store"] = True
        return replace(generation, options=options)

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
            job = read(body, self.service)
            job = replace(job, generation=self.for_user(job.generation))
            return body, prepare(work, self.service, job)

        return await self.run_in_tokenizer_pool(prepared)

    async def respond(self, renderer: Renderer[Any]) -> Response:
        """Run the generations and render their answers."""
        generations = renderer.generations
        if renderer.body.stream:
            answers = await self.service.start_all(generations, renderer.request_id)
            return renderer.stream_class(renderer.events(*answers), *answers)
        outputs = await self.service.whole(generations, renderer.request_id)
        return JSONResponse(renderer.whole(*outputs))


class Renderer(ABC, Generic[A]):
    """Renders the answers to a request as one object or as a stream of events.

    Args:
        generations: what is answered.

    Attributes:
        stream_class: the response that a stream is sent in.
        request_id: the id in the answer.
        model: the name of the model in the answer.
        states: the answers so far.
    """

    stream_class: ClassVar[type[EventStream]] = EventStream

    def __init__(self, context: RequestContext[Any], body: A, *generations: Generation):
        self.context, self.body, self.generations = context, body, generations
        self.request_id = context.request_id
        self.model = body.model_name(context.service)
        self.states = [AnswerState(each.answer_format) for each in generations]

    @property
    def params(self) -> SamplingParams:
        """The parameters of all generations."""
        return self.generations[0].params

    @abstractmethod
    def whole(self, *outputs: RequestOutput) -> dict[str, Any]:
        """The answers as one object."""

    @abstractmethod
    def events(self, *answers: Answer) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""


Endpoint: TypeAlias = Callable[[RequestContext[B]], Coroutine[Any, Any, Response]]


class ApiRoute(Route):
    """A route whose endpoint takes a :class:`RequestContext`.

    Args:
        body: the class of the body of POST requests; ``None`` for GET requests. An endpoint with a
            body is cancelled if the client disconnects before the response begins.
        methods: overrides these methods.
    """

    def __init__(
        self,
        path: str,
        endpoint: Endpoint[B],
        body: type[B] | None = None,
        methods: Sequence[str] = (),
    ):
        methods = methods or ("GET" if body is None else "POST",)
        super().__init__(path, self._respond, methods=list(methods))
        self.body = body
        self.summary = (endpoint.__doc__ or "").strip().partition("\n")[0]
        self._endpoint = endpoint

    async def _respond(self, request: Request) -> Response:
        context = RequestContext[Any](request, self.body or Body)
        if self.body is None:
            return await self._endpoint(context)
        return await until_disconnect(request.receive, self._answer(context))

    async def _answer(self, context: RequestContext[Any]) -> Response:
        body = await context.request.body()
        if len(body) <= _SMALL_BODY:
            value = parse_json(body)
        else:
            value = await context.run_in_tokenizer_pool(lambda _: parse_json(body))
        return await self._endpoint(replace(context, value=value))


class _WithoutNulls(GenerateJsonSchema):
    """Omits defaults of ``None``, which stand for missing fields."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        described = super().default_schema(schema)
        if described.get("default") is None:
            described.pop("default", None)
        return described


async def openapi(context: RequestContext[Body]) -> Response:
    """The routes and the fields of their bodies, as an OpenAPI 3.1 document."""
    routes = context.request.app.routes
    return JSONResponse(await context.run_in_tokenizer_pool(lambda _: openapi_document(routes)))


def openapi_document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """The document of some routes."""
    bodies = dict.fromkeys(route.body for route in routes if route.body is not None)
    places, definitions = models_json_schema(
        [(model, "validation") for model in bodies],
        ref_template=_PLACE,
        schema_generator=_WithoutNulls,
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation: dict[str, Any] = {
            "summary": route.summary,
            "responses": {"200": {"description": "The answer."}},
        }
        names = sorted(route.param_convertors)
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
        if route.body is not None:
            content = {"application/json": {"schema": places[route.body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        methods = sorted((route.methods or set()) - {"HEAD"})
        paths[route.path_format] = {method.lower(): operation for method in methods}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx_paged", "version": mlx_paged.__version__},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }
