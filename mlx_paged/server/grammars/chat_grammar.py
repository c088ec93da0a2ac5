"""What the answer to a conversation has to be: calls of tools, a format, or either."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_paged.errors import ArgumentError
from mlx_paged.model_dialect import ModelDialect, ToolFormat
from mlx_paged.server.answers.reader import ToolChoice
from mlx_paged.server.errors import ApiError
from mlx_paged.server.grammars.tool_call_grammars import json_rule
from mlx_paged.server.grammars.tool_grammar import (
    ToolGrammar,
    reasoning_before,
    required_calls,
    strict_calls,
)
from mlx_paged.structured_outputs import StructuredOutputsParams


def chat_grammar(
    dialect: ModelDialect,
    prompt: str,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    parallel_tool_calls: bool,
    wanted: StructuredOutputsParams | None,
) -> tuple[StructuredOutputsParams | None, bool]:
    """What an answer has to be, behind its reasoning, and whether it is a list of calls in JSON, as
    :mod:`mlx_paged.server.grammars.tool_grammar` describes it.

    Args:
        prompt: as the chat template wrote it.
        wanted: the format that the request asks for. With tools that may be called, the answer is
            in that format, or it calls tools.

    Raises:
        ApiError: what can't be kept to, by the field's name; 400.
    """
    try:
        grammar = _tool_grammar(dialect.tools, tools, tool_choice, parallel_tool_calls, wanted)
    except ArgumentError as error:
        raise ApiError(400, str(error), param=error.argument) from error
    if grammar is not None:
        wanted = grammar.structured_outputs
    if wanted is not None:
        marks: dict[str, Any] = {**reasoning_before(dialect.reasoning, prompt)}
        wanted = replace(wanted, **marks)
    return wanted, grammar is not None and grammar.is_json


def _tool_grammar(
    call_format: ToolFormat | None,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    parallel_tool_calls: bool,
    wanted: StructuredOutputsParams | None,
) -> ToolGrammar | None:
    """The grammar of the calls of an answer; ``None`` where they need none."""
    if not tools or tool_choice == "none":
        return None
    if tool_choice == "auto":
        if wanted is not None:
            return _format_or_calls(tools, call_format, parallel_tool_calls, wanted)
        return strict_calls(tools, call_format, parallel_tool_calls=parallel_tool_calls)
    if wanted is not None:
        raise ArgumentError(
            "tool_choice wants a call, and the request wants an answer in another format; send "
            "one of them",
            "tool_choice",
        )
    name = None if tool_choice == "required" else tool_choice
    return required_calls(tools, call_format, name=name, parallel_tool_calls=parallel_tool_calls)


def _format_or_calls(
    tools: Sequence[Mapping[str, Any]],
    call_format: ToolFormat | None,
    parallel_tool_calls: bool,
    wanted: StructuredOutputsParams,
) -> ToolGrammar:
    """An answer in JSON, or calls in the model's own format."""
    calls = required_calls(tools, call_format, parallel_tool_calls=parallel_tool_calls)
    if wanted.kind not in ("json", "json_object") or calls.is_json:
        raise ArgumentError(
            "tools do not go with this format of the answer, or with any in this model; send "
            "tool_choice 'none', or leave one of them out",
            "tools",
        )
    schema = {"type": "object"} if wanted.json is None else json.loads(str(wanted.json))
    schema = schema if isinstance(schema, dict) else {}
    lark = str(calls.structured_outputs.grammar).replace("start: ", "calls: ", 1)
    lark = f"start: calls | formatted\nformatted: {json_rule(schema)}\n{lark}"
    return ToolGrammar(StructuredOutputsParams(grammar=lark), is_json=False)
