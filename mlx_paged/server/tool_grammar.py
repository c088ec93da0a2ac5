"""Grammars for answers that call tools: calls are in the model's own format, and their arguments
conform to the tools' schemas. Pure functions.

After the reasoning, an answer consists of

- with ``ToolGrammar.is_json`` False: text with calls between the model's own marks, which
  :mod:`mlx_paged.answers` reads. If a tool must be called, there is no text before the first call,
  and at most a line break between two calls.
- with ``ToolGrammar.is_json`` True: one JSON array, ``[{"name": "f", "arguments": {...}}, ...]``,
  of at least one call, and nothing else. As in vLLM, this replaces formats without a grammar.

A call that has begun is truncated only by ``max_tokens``, the context or a stop text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_paged.answers.dialect import Dialect
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.options.sampling_declarations import StructuredOutputsParams
from mlx_paged.server.tool_call_grammars import Function, call_rules, json_objects, json_rule


@dataclass(frozen=True)
class ToolGrammar:
    """The grammar of an answer that calls tools; see the module's docstring for its format.

    Args:
        functions: those that it may call.
    """

    structured_outputs: StructuredOutputsParams
    is_json: bool
    functions: Sequence[Function]

    def parts(self) -> dict[str, StructuredOutputsParams]:
        """A grammar for the arguments of each function alone, by the place of their schema."""
        return {
            f"{each.path}.parameters": StructuredOutputsParams(grammar=f"start: {each.arguments}")
            for each in self.functions
        }


def required_calls(
    tools: Sequence[Mapping[str, Any]],
    dialect: Dialect,
    *,
    name: str | None = None,
    parallel_tool_calls: bool = True,
) -> ToolGrammar:
    """A grammar for one or more calls: of any tool (OpenAI's ``tool_choice: "required"``), or of
    the named one.

    Args:
        tools: at least one tool in OpenAI's form: ``{"type": "function", "function": {"name",
            "parameters", "strict"}}``.
        dialect: of the model; JSON is used where it has no format of calls, or the parameters can't
            be written in it.
        name: the tool that must be called; ``None``: any.
        parallel_tool_calls: whether there may be several calls.

    Raises:
        ArgumentError: there is no tool, or none with this name, or its parameters are not the
            schema of an object; its ``argument`` is the field's name.
    """
    functions = _functions(tools)
    if name is not None:
        functions = [each for each in functions if each.name == name]
        if not functions:
            raise ArgumentError(
                f"tool_choice names {shown(name)}, which is not in tools", "tool_choice"
            )
    if not functions:
        raise ArgumentError("tool_choice requires a call, but there are no tools", "tools")
    rules = call_rules(dialect, functions, parallel_tool_calls)
    if rules is None:
        more = ' (", " object)*' if parallel_tool_calls else ""
        lark = f'start: "[" object{more} "]"\n' + json_objects(functions)
        return _grammar(lark, functions, is_json=True)
    more = " (separator call)*" if parallel_tool_calls and not rules.is_group else ""
    return _grammar(f"start: call{more}\n{rules.lark}", functions)


def strict_calls(
    tools: Sequence[Mapping[str, Any]], dialect: Dialect, *, parallel_tool_calls: bool = True
) -> ToolGrammar | None:
    """A grammar for text that may contain calls, each of which is valid once begun: for
    ``tool_choice: "auto"``. ``None`` if no tool is ``strict``.

    Args:
        tools, dialect, parallel_tool_calls: as for :func:`required_calls`.

    Raises:
        ArgumentError: parameters are not the schema of an object, or there is no grammar for the
            model's format; its ``argument`` is the field's name.
    """
    functions = _functions(tools)
    strict = next((each for each in functions if each.is_strict), None)
    if strict is None:
        return None
    calls = dialect.calls
    rules = call_rules(dialect, functions, parallel_tool_calls)
    if calls is None or rules is None or not calls.start or calls.is_bare:
        how = "that calls no tools" if calls is None else f"that writes {calls.name}"
        raise ArgumentError(
            f"{strict.path}.strict can't be enforced with tool_choice 'auto', these parameters and "
            f"a model {how}; send tool_choice 'required', or leave strict out",
            f"{strict.path}.strict",
        )
    times = "*" if parallel_tool_calls else "?"
    if isinstance(dialect.marks.split(calls.start)[0], int):
        # Text contains no special tokens, so the mark always begins a call.
        group = f"(call TEXT){times}" if calls.end else f"call{times}"
        return _grammar(f"start: TEXT {group}\nTEXT: /(.|\\n)*/\n{rules.lark}", functions)
    mark = re.escape(calls.start).replace("/", "\\/")
    group = f"(text_and_mark rest_of_call){times}"
    start = f"start: {group} text\ntext_and_mark[lazy]: /(.|\\n)*{mark}/\n"
    return _grammar(f"{start}text: /(.|\\n)*/\n{rules.lark}", functions)


def format_or_calls(
    tools: Sequence[Mapping[str, Any]],
    dialect: Dialect,
    requested: StructuredOutputsParams,
    *,
    parallel_tool_calls: bool = True,
) -> ToolGrammar:
    """A grammar for JSON as described by ``requested``, or calls in the model's own format.

    Raises:
        ArgumentError: ``requested`` is not JSON, or there is no grammar for the model's format.
    """
    calls = required_calls(tools, dialect, parallel_tool_calls=parallel_tool_calls)
    if requested.kind not in ("json", "json_object") or calls.is_json:
        raise ArgumentError(
            "tools can't be combined with this format of the answer, or for this model with any; "
            "send tool_choice 'none', or leave one of them out",
            "tools",
        )
    schema = {"type": "object"} if requested.json is None else json.loads(str(requested.json))
    rule = json_rule(schema if isinstance(schema, dict) else {})
    lark = str(calls.structured_outputs.grammar).replace("start: ", "calls: ", 1)
    return _grammar(f"start: calls | formatted\nformatted: {rule}\n{lark}", calls.functions)


def reasoning_before(
    dialect: Dialect, prompt: str, calls: ToolGrammar | None = None
) -> dict[str, Any]:
    """``reasoning_start`` and ``begin_after`` of :class:`StructuredOutputsParams` for the answer to
    a prompt: the mark that opens the model's reasoning, unless the prompt has opened it, and the
    mark that closes it. Both are empty if the model has no marks or the prompt has closed it.

    Args:
        calls: the grammar, if it is one of calls.
    """
    if dialect.is_harmony:
        # A call follows reasoning; a text begins after the header of its message.
        is_own = calls is not None and not calls.is_json
        end = dialect.message_end if is_own else dialect.text_header
        return {"reasoning_start": dialect.reasoning_start if is_own else (), "begin_after": end}
    if not dialect.reasoning_end or dialect.closes_reasoning(prompt):
        return {"reasoning_start": (), "begin_after": ()}
    start = () if dialect.opens_reasoning(prompt) else dialect.reasoning_start
    return {"reasoning_start": start, "begin_after": dialect.reasoning_end}


def _grammar(lark: str, functions: Sequence[Function], is_json: bool = False) -> ToolGrammar:
    return ToolGrammar(StructuredOutputsParams(grammar=lark), is_json, functions)


def _functions(tools: Sequence[Mapping[str, Any]]) -> list[Function]:
    functions = []
    for index, tool in enumerate(tools):
        path, function = f"tools[{index}].function", tool["function"]
        parameters = function.get("parameters")
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise ArgumentError(
                f"{path}.parameters must be the JSON schema of an object, got {shown(parameters)}",
                f"{path}.parameters",
            )
        is_strict = function.get("strict") is True
        functions.append(Function(path, str(function["name"]), parameters, is_strict))
    return functions
