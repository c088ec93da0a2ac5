"""What rank 0 hands to the other ranks, as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged import PoolingParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from mlx_paged.distributed import RanksError
from mlx_paged.distributed.values import as_json, from_json
from mlx_paged.engine.request import Request
from mlx_paged.errors import ArgumentError, PromptTooLongError
from mlx_paged.request import (
    CompletionOutput,
    Logprob,
    PrefixReport,
    RequestOutput,
    SpecDecodingStats,
)


def arrived(value: object) -> Any:
    return from_json(json.loads(json.dumps(as_json(value))))


OUTPUT = RequestOutput(
    "a",
    "Hello",
    [1, 2],
    [
        CompletionOutput(
            0,
            "x",
            [3],
            -0.5,
            [{3: Logprob(-0.5, 1, "x")}],
            "stop",
            (3, 4),
            SpecDecodingStats((2, 1), (1, 0)),
        ),
        CompletionOutput(1, "", [], None, None, "error"),
    ],
    finished=True,
    num_cached_tokens=1,
    time_to_first_token=0.125,
    prompt_logprobs=[None, {2: Logprob(-math.inf, 7)}],
    prefix_report=PrefixReport("a", None, 2, 1, "changed", 1, "b", [1], (5,), [2]),
)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 5, -0.1, math.inf, "text \ud800\x1b", [], [[1], "a"], ()),
        {"a": 1, 2: (3, {}), (4, 5): None},
        {"dict": [[1, 2]]},
        [OUTPUT],
        SamplingParams(
            n=2,
            stop=["a"],
            stop_token_ids=[1, (2, 3)],
            logit_bias={4: -math.inf},
            structured_outputs=StructuredOutputsParams(json={"type": "object"}),
            output_kind=RequestOutputKind.DELTA,
        ),
        PoolingParams(dimensions=16, token_ids=(1, 2), num_shared_tokens=3),
    ],
)
def test_a_value_arrives_as_it_was(value: object):
    told = arrived(value)
    assert (type(told), told) == (type(value), value)


def test_an_output_that_arrived_is_read_as_before():
    told = arrived(OUTPUT)
    assert told.finished is not True and told.finished() and told.outputs[0].finished


def test_a_request_arrives_with_its_user_and_all_else_that_plans_depend_on():
    pooled = Request("a", [1, 2], PoolingParams(dimensions=16))
    told = Request.from_arguments(arrived(pooled.arguments))
    assert (told.pooling, told.params) == (pooled.pooling, pooled.params)
    request = Request(
        "a", [1, 2], SamplingParams(n=2), seed=5, priority=-3, cache_salt="s", user="ann"
    )
    told = Request.from_arguments(arrived(request.arguments))
    for name in (
        "request_id",
        "prompt_token_ids",
        "params",
        "seed",
        "priority",
        "cache_salt",
        "user",
    ):
        assert getattr(told, name) == getattr(request, name)


class OfAScript(ValueError):
    pass


class OfAPackage(Exception):
    def __init__(self, code: int, text: str):
        super().__init__(code, text)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PromptTooLongError("[kv cache] too long"), PromptTooLongError("[kv cache] too long")),
        (RanksError("[ranks] differ"), RanksError("[ranks] differ")),
        (KeyError("a"), LookupError("'a'")),
        (OfAScript("wrong"), ValueError("wrong")),
        (OfAPackage(3, "lines\nof text"), RuntimeError("OfAPackage: (3, 'lines\\nof text')")),
        (KeyboardInterrupt(), KeyboardInterrupt("")),
        (SystemExit(3), KeyboardInterrupt("SystemExit: 3")),
    ],
)
def test_an_error_keeps_its_text_and_the_nearest_type_that_is_known(
    error: BaseException, expected: BaseException
):
    told = arrived(error)
    assert (type(told), told.args) == (type(expected), expected.args)


def test_an_error_of_an_argument_keeps_its_name():
    assert arrived(ArgumentError("[params] n", "n")).argument == "n"
    assert arrived(PromptTooLongError("long")).argument == "kv_cache_bytes"


def test_functions_of_a_request_stay_on_rank_0():
    params = SamplingParams(sampler=lambda row: row, logits_processors=[lambda ids, row: row])
    told = arrived(params)
    assert told.temperature == params.temperature
    for function in (told.sampler, *told.logits_processors):
        with pytest.raises(RuntimeError, match="functions of a request are called on rank 0"):
            function(1, 2)


@pytest.mark.parametrize("value", [b"bytes", {1}, mx.array([1]), [object()], {"a": range(3)}])
def test_a_value_of_another_type_is_refused_by_its_name(value: object):
    with pytest.raises(TypeError, match=r"\[ranks\] \w+ can't be shared between ranks"):
        as_json(value)


@pytest.mark.parametrize(
    "said",
    [
        {"Popen": {"dict": [["args", "ls"]]}},
        {"Logprob": {"dict": [["code", 1]]}},
        {"error": ["SystemExit", "", None]},
        {"tuple": [], "dict": []},
        {},
    ],
)
def test_what_no_rank_says_makes_no_value(said: Any):
    with pytest.raises((KeyError, TypeError, ValueError, StopIteration)):
        from_json(said)
