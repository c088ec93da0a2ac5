"""What an answer has to be: the format that the request wants, or calls of its tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.errors import ArgumentError
from mlx_paged.server.answers import ToolChoice
from mlx_paged.server.errors import ApiError
from mlx_paged.server.generations import api_error
from mlx_paged.server.tool_call_grammars import ToolCallFormat
from mlx_paged.server.tool_grammar import (
    ToolGrammar,
    reasoning_marks,
    required_calls,
    strict_calls,
)
from mlx_paged.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True)
class Constraint:
    """What an answer has to be.

    Args:
        structured_outputs: for the engine.
        is_json_calls: the answer is a JSON list of calls, which stands for a format of the model's
            that no grammar is written for.
    """

    structured_outputs: StructuredOutputsParams
    is_json_calls: bool = False


def constraint_of(
    tokenizer: TokenizerWrapper,
    prompt_token_ids: Sequence[int],
    wanted: StructuredOutputsParams | None,
    tools: Sequence[dict[str, Any]],
    tool_choice: ToolChoice,
    parallel_tool_calls: bool,
) -> Constraint | None:
    """What the answer to a prompt has to be; ``None`` where anything will do. It begins behind the
    model's reasoning.

    Where a tool must be called, the answer is calls, whatever format is wanted. Where one may be,
    it is either calls or what is wanted.

    Args:
        wanted: of an answer that is no call.

    Raises:
        ApiError: it can't be done with these tools or this model; 400.
    """
    try:
        constraint = _constraint(tokenizer, wanted, tools, tool_choice, parallel_tool_calls)
    except ArgumentError as error:
        raise api_error(error) from error
    if constraint is None:
        return None
    marks: Any = reasoning_marks(tokenizer, prompt_token_ids)
    return replace(constraint, structured_outputs=replace(constraint.structured_outputs, **marks))


def _constraint(
    tokenizer: TokenizerWrapper,
    wanted: StructuredOutputsParams | None,
    tools: Sequence[dict[str, Any]],
    tool_choice: ToolChoice,
    parallel_tool_calls: bool,
) -> Constraint | None:
    if tool_choice == "none" or not tools:
        return None if wanted is None else Constraint(wanted)
    call_format = ToolCallFormat.of(tokenizer)
    if tool_choice != "auto":
        name = None if tool_choice == "required" else tool_choice
        return _of_calls(
            required_calls(tools, call_format, name=name, parallel_tool_calls=parallel_tool_calls)
        )
    if wanted is None:
        strict = strict_calls(tools, call_format, parallel_tool_calls=parallel_tool_calls)
        return None if strict is None else _of_calls(strict)
    calls = required_calls(tools, call_format, parallel_tool_calls=parallel_tool_calls)
    return Constraint(either(calls, wanted))


def _of_calls(grammar: ToolGrammar) -> Constraint:
    return Constraint(grammar.structured_outputs, grammar.is_json)


def either(calls: ToolGrammar, wanted: StructuredOutputsParams) -> StructuredOutputsParams:
    """Calls, or JSON that is wanted where there is none.

    Raises:
        ApiError: something else than JSON is wanted, or calls that are JSON themselves; 400.
    """
    if calls.is_json or wanted.kind not in ("json", "json_object"):
        raise ApiError(
            400,
            "what an answer has to be does not go with tools that this model may call or not: send "
            "tool_choice 'none' or 'required', or leave out the tools or the format",
            param="tool_choice",
        )
    schema = {"type": "object"} if wanted.json is None else json.loads(str(wanted.json))
    options: dict[str, object] = {"whitespace_flexible": wanted.whitespace_flexible}
    if not wanted.whitespace_flexible:
        options |= {"item_separator": ", ?", "key_separator": ": ?"}
    text = json.dumps({**({} if schema is True else schema), "x-guidance": options})
    rules = str(calls.structured_outputs.grammar).removeprefix("start: ")
    grammar = f"start: calls | wanted\nwanted: %json {text}\ncalls: {rules}"
    return StructuredOutputsParams(grammar=grammar)
