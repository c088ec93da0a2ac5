"""``/openapi.json`` names each route, and each field of each body."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.servers import client_of

from mlx_paged.options.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.server.app import ROUTES
from mlx_paged.server.service import Service


@pytest.fixture(scope="module")
def document(shared_service: Service) -> dict[str, Any]:
    answer = client_of(shared_service).get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


def test_it_names_each_route_and_each_method(document):
    assert {path: set(item) for path, item in document["paths"].items()} == {
        route.path_format: {name.lower() for name in route.methods - {"HEAD"}} for route in ROUTES
    }
    summaries = [each["summary"] for item in document["paths"].values() for each in item.values()]
    assert all(summaries)


def test_the_guide_names_each_route():
    pages = (Path(__file__).parents[2] / "docs/guide").rglob("*.md")
    named = set(re.findall(r"(?:`|POST |GET )(/[\w./]*)", "".join(map(Path.read_text, pages))))
    routes = {route.path.partition("/{")[0] for route in ROUTES}
    assert routes - named == set()


def test_it_names_each_field_of_each_body(document):
    for route in ROUTES:
        if route.body is None:
            continue
        content = document["paths"][route.path]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"]
        found = resolved(document, schema)
        assert set(found["properties"]) == {
            field.alias or name for name, field in route.body.model_fields.items()
        }
        assert found["additionalProperties"] is False


def test_what_it_refers_to_is_there(document):
    places = list(references(document))
    assert len(places) > 40
    for place in places:
        assert resolved(document, {"$ref": place})


def test_a_sampling_parameter_is_described_as_its_declaration_does(document):
    properties = document["components"]["schemas"]["ChatRequest"]["properties"]
    declared = {name: each.help for name, each in SAMPLING_PARAMS.items() if each.wire}
    assert {name: properties[name]["description"] for name in declared} == declared
    assert properties["top_k"]["type"] == "integer"
    texts = {"items": {"type": "string"}, "type": "array"}
    assert properties["stop"]["anyOf"] == [{"type": "string"}, texts]


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    found: Any = document
    for name in schema["$ref"].removeprefix("#/").split("/"):
        found = found[name]
    return found


def references(value: Any) -> Any:
    if isinstance(value, dict):
        yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)
