"""``/openapi.json``: an OpenAPI 3.1 document of the routes and their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema
from starlette.responses import JSONResponse, Response

import mlx_paged
from mlx_paged.server.context import RequestContext
from mlx_paged.server.routes import ApiRoute, Endpoint
from mlx_paged.server.schemas import Body

_PLACE = "#/components/schemas/{model}"


class _WithoutNulls(GenerateJsonSchema):
    """Omits defaults of ``None``, which stand for missing fields."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        described = super().default_schema(schema)
        if described.get("default") is None:
            described.pop("default", None)
        return described


def openapi_endpoint(routes: Sequence[ApiRoute]) -> Endpoint[Body]:
    """The endpoint for the document of some routes."""

    async def openapi(context: RequestContext[Body]) -> Response:
        """The routes and the fields of their bodies, as an OpenAPI 3.1 document."""
        document = await context.run_in_tokenizer_pool(lambda _: openapi_document(routes))
        return JSONResponse(document)

    return openapi


def openapi_document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """The document of some routes."""
    bodies = dict.fromkeys(route.body for route in routes if route.body is not None)
    variants = {body: body.variants() for body in bodies}
    models = dict.fromkeys(each for found in variants.values() for each in found)
    places, definitions = models_json_schema(
        [(model, "validation") for model in models],
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
            schemas = [places[model, "validation"] for model in variants[route.body]]
            schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            content = {"application/json": {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": content}
        methods = sorted((route.methods or set()) - {"HEAD"})
        paths[route.path_format] = {method.lower(): operation for method in methods}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx_paged", "version": mlx_paged.__version__},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }
