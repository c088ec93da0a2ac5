"""``oneOf`` is kept to where its branches exclude one another, and is refused elsewhere."""

from __future__ import annotations

import json
import random
from typing import Annotated, Any, Literal

import pytest
from helpers.engine_runs import load_demo
from helpers.fast_lane import mostly_slow
from helpers.grammar_walks import random_answer
from helpers.json_schemas import is_valid, random_one_of
from pydantic import BaseModel, ConfigDict, Field

from mlx_paged import StructuredOutputsParams
from mlx_paged.answers.json_schema import one_of_as_any_of
from mlx_paged.engine.sampling.grammar import GrammarCompiler
from mlx_paged.errors import ArgumentError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_demo()[1]


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer))


def tagged(kind: Any, is_required: bool = True, **more: Any) -> dict[str, Any]:
    required = ["kind"] if is_required else []
    return {"type": "object", "properties": {"kind": kind}, "required": required, **more}


A, B = {"const": "a"}, {"const": "b"}
REFS = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string"}, {"type": "integer"}],
        [{"type": ["string", "null"]}, {"type": ["integer", "boolean"]}],
        [{"enum": [1, 2]}, {"enum": [3, "1"]}],
        [{"const": True}, {"const": 1}],
        [tagged(A), tagged(B), {"type": "null"}],
        [tagged({"type": "string"}), tagged({"type": "array"})],
        [tagged(tagged(A)), tagged(tagged(B))],
        [tagged({"anyOf": [A, {"const": "c"}]}), tagged(B)],
        [tagged(A, type=["object", "null"]), tagged(B)],
        REFS,
    ],
)
def test_branches_that_exclude_one_another_are_any_of(branches: list[Any]):
    definitions = {"$defs": {"A": tagged(A), "B": tagged(B)}}
    result = one_of_as_any_of({"oneOf": branches, **definitions})
    assert result == {"anyOf": branches, **definitions}


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"enum": [1, 2]}, {"const": 2.0}],
        [{"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}],
        [{"type": "string"}, A],
        # A number is valid for both.
        [{"properties": {"kind": each}, "required": ["kind"]} for each in (A, B)],
        [tagged(A), tagged({"enum": ["a", "b"]})],
        [tagged(A), {"type": "object"}],
        [{"$ref": "#/nowhere"}, {"type": "null"}],
        [{"$ref": "#/$defs/Self"}, {"type": "null"}],
        [{"type": "object", "required": [["kind"], 1], "properties": 1}, tagged(B)],
        [True, {"type": "string"}],
    ],
)
def test_what_can_not_be_seen_to_exclude_stays(branches: list[Any]):
    schema = {"oneOf": branches, "$defs": {"Self": {"$ref": "#/$defs/Self"}}}
    result = one_of_as_any_of(schema)
    assert result["oneOf"] == branches


def test_data_is_not_taken_for_a_schema():
    schema = {
        "properties": {"oneOf": {"enum": [{"oneOf": [A, B]}]}, "x": {"default": {"oneOf": [A, B]}}},
        "const": {"oneOf": [A, B]},
    }
    assert one_of_as_any_of(schema) == schema


def test_the_type_beside_one_of_counts_for_its_branches():
    branches = [{"properties": {"kind": each}, "required": ["kind"]} for each in (A, B)]
    assert one_of_as_any_of({"type": "object", "oneOf": branches})["anyOf"] == branches


def test_a_property_that_tells_branches_apart_becomes_required():
    free = [tagged(A, False), tagged(B, False)]
    assert one_of_as_any_of({"oneOf": free}) == {"anyOf": [tagged(A), tagged(B)]}
    definitions = {"A": tagged(A, False), "B": tagged(B)}
    result = one_of_as_any_of(
        {"discriminator": {"propertyName": "kind"}, "oneOf": REFS, "$defs": definitions}
    )
    # The definition stays as it is for others who refer to it.
    assert result == {
        "anyOf": [{"$ref": "#/$defs/mlx_paged.required.0"}, {"$ref": "#/$defs/B"}],
        "$defs": {**definitions, "mlx_paged.required.0": tagged(A)},
    }


def test_many_branches_are_given_up_and_not_compared_for_ever():
    many = [{"const": number} for number in range(5000)]
    assert one_of_as_any_of({"oneOf": many}) == {"oneOf": many}
    few = many[:100]
    assert one_of_as_any_of({"oneOf": few}) == {"anyOf": few}


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")  # so that answers end


class Circle(Model):
    shape: Literal["circle"] = "circle"
    radius: int = Field(ge=0, le=9)


class Box(Model):
    shape: Literal["box", "square"]
    sides: list[bool] = Field(max_length=2)


class Group(Model):
    shape: Literal["group"] = "group"
    parts: list[Shape] = Field(max_length=2)
    other: Shape | None = None


Shape = Annotated[Circle | Box | Group, Field(discriminator="shape")]
Group.model_rebuild()


class Drawing(Model):
    shape: Shape
    second: Circle | None = None


@pytest.mark.parametrize("model", [Group, Drawing])
def test_answers_of_pydantics_unions_are_read_by_pydantic(
    tokenizer: Any, compiler: GrammarCompiler, model: type[BaseModel]
):
    schema = model.model_json_schema()
    assert "oneOf" in json.dumps(schema)
    params = StructuredOutputsParams(json=schema)
    rng = random.Random(0)
    # Ends are preferred: a group may hold groups.
    ends = [token for token in range(len(tokenizer)) if "]" in tokenizer.decode([token])]
    seen = set()
    for _ in range(20):
        text = random_answer(compiler, tokenizer, params, rng, ends)
        seen |= {each for each in ("circle", "box", "square", "group") if f'"{each}"' in text}
        assert model.model_validate_json(text)
    assert seen == {"circle", "box", "square", "group"}


@mostly_slow("seed", range(94), quick=range(3))
def test_answers_are_valid_for_exactly_one_of_random_branches(
    tokenizer: Any, compiler: GrammarCompiler, seed: int
):
    """94 times 8 schemas: 752."""
    rng = random.Random(seed)
    num_kept = 0
    for _ in range(8):
        schema = random_one_of(rng)
        params = StructuredOutputsParams(json=schema)
        try:
            compiler.compile(params)
        except ArgumentError as error:
            assert "oneOf" in str(error)
            assert "oneOf" in one_of_as_any_of(schema)
            continue
        num_kept += 1
        for _ in range(3):
            text = random_answer(compiler, tokenizer, params, rng)
            assert is_valid(json.loads(text), schema), (text, schema)
    assert num_kept
