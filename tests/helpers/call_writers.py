"""Writes calls as models do, in every format of the table: the counterpart of the reader."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    """A text as it is, and everything else as JSON."""
    return value if isinstance(value, str) else compact(value)


def python(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{python(k)}: {python(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(python, value)) + "]"
    return compact(value) if isinstance(value, str) else repr(value)


def gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        items = (f"{key}:{gemma(each, quote)}" for key, each in value.items())
        return "{" + ",".join(items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(each, quote) for each in value) + "]"
    return compact(value)


def of_json(call: Call, name: str = "name", arguments: str = "arguments") -> str:
    return compact({name: call[0], arguments: call[1]})


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{of_json(call)}\n</tool_call>" for call in calls)


def qwen3_coder(calls: Sequence[Call]) -> str:
    def write(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(
            f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(write(*call) for call in calls)


def glm(calls: Sequence[Call], prefix: str = "", space: str = "") -> str:
    def write(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(
            f"<{prefix}arg_key>{key}</{prefix}arg_key>{space}"
            f"<{prefix}arg_value>{plain(value)}</{prefix}arg_value>{space}"
            for key, value in arguments.items()
        )
        return f"<{prefix}tool_call>{name}{space}{values}</{prefix}tool_call>"

    return space.join(write(*call) for call in calls)


def xml(
    calls: Sequence[Call], invoke: str, parameter: str, around: str = "", attribute: bool = False
) -> str:
    def text(key: str, value: Any) -> str:
        kind = f' string="{str(isinstance(value, str)).lower()}"' if attribute else ""
        return f'<{parameter} name="{key}"{kind}>{plain(value)}</{parameter}>\n'

    inner = "".join(
        f'<{invoke} name="{name}">\n'
        + "".join(text(key, value) for key, value in arguments.items())
        + f"</{invoke}>\n"
        for name, arguments in calls
    )
    return f"<{around}>\n{inner}</{around}>" if around else inner.rstrip("\n")


def kimi_k2(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{compact(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


KINDS = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object",
         list: "array", type(None): "null"}  # fmt: skip


def kimi_k3(calls: Sequence[Call]) -> str:
    def escaped(text: str) -> str:
        return html.escape(text).replace("&lt;", "<").replace("&gt;", ">").replace("&#x27;", "'")

    def argument(key: str, value: Any) -> str:
        return (
            f'<|open|>argument key="{escaped(key)}" type="{KINDS[type(value)]}"<|sep|>'
            f"{plain(value)}<|close|>argument<|sep|>"
        )

    inner = "".join(
        f'<|open|>call tool="{name}" index="{index}"<|sep|>'
        + "".join(argument(key, value) for key, value in arguments.items())
        + "<|close|>call<|sep|>"
        for index, (name, arguments) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{compact(arguments)}" for name, arguments in calls)


def gemma_calls(calls: Sequence[Call], start: str, end: str, quote: str) -> str:
    return "".join(f"{start}call:{name}{gemma(arguments, quote)}{end}" for name, arguments in calls)


def pythonic(calls: Sequence[Call], start: str = "", end: str = "") -> str:
    def write(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={python(each)}' for key, each in arguments.items())})"

    return f"{start}[{', '.join(write(*call) for call in calls)}]{end}"


def deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{compact(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{compact(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def harmony(calls: Sequence[Call]) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{compact(arguments)}"
        for name, arguments in calls
    )


def json_list(calls: Sequence[Call], start: str, end: str, *keys: str) -> str:
    return f"{start}[{', '.join(of_json(call, *keys) for call in calls)}]{end}"


DSML = "｜DSML｜"


def dsml(section: str, space: str = "") -> Callable[[Sequence[Call]], str]:
    return lambda calls: xml(
        calls, f"{DSML}{space}invoke", f"{DSML}{space}parameter", f"{DSML}{section}", True
    )


# By the name of the format, with a note where a format is written in several ways.
WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "json_tools": hermes,
    "qwen3_coder": qwen3_coder,
    "glm47": glm,
    "glm47, with line breaks": lambda calls: glm(calls, space="\n"),
    "laguna": glm,
    "longcat": lambda calls: glm(calls, "longcat_"),
    "minimax_m2": lambda calls: xml(calls, "invoke", "parameter", "minimax:tool_call"),
    "minicpm5": lambda calls: xml(calls, "function", "param"),
    "muse_spark": lambda calls: xml(calls, "atem:invoke", "atem:parameter", "atem:function_calls"),
    "deepseek_v3_2": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v4_1": dsml(" calls", " "),
    "deepseek_v3": deepseek_v3,
    "deepseek_v3_1": deepseek_v31,
    "kimi_k2": kimi_k2,
    "kimi_k3": kimi_k3,
    "mistral": mistral,
    "mistral, older": lambda calls: json_list(calls, "[TOOL_CALLS]", ""),
    "gemma4": lambda calls: gemma_calls(calls, "<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": lambda calls: gemma_calls(
        calls, "<start_function_call>", "<end_function_call>", "<escape>"
    ),
    "pythonic": lambda calls: pythonic(calls, "<|tool_call_start|>", "<|tool_call_end|>"),
    "llama4": pythonic,
    "llama4, with marks": lambda calls: pythonic(calls, "<|python_start|>", "<|python_end|>"),
    "llama3": lambda calls: "; ".join(of_json(call, "name", "parameters") for call in calls),
    "llama3, with a mark": lambda calls: (
        "<|python_tag|>" + "; ".join(of_json(call, "name", "parameters") for call in calls)
    ),
    "command": lambda calls: json_list(
        calls, "<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"
    ),
    "phi4": lambda calls: json_list(calls, "<|tool_call|>", "<|/tool_call|>"),
    "phi4, functools": lambda calls: json_list(calls, "functools", ""),
    "granite": lambda calls: json_list(calls, "<|tool_call|>", ""),
    "harmony": harmony,
}
# What each format writes with control tokens, where its models have them.
TOKENS = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<longcat_tool_call>", "</longcat_tool_call>", "<minimax:tool_call>", "</minimax:tool_call>",
    DSML, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "<|open|>", "<|close|>", "<|sep|>", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", "<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>",
    "<end_function_call>", "<escape>", "<|tool_call_start|>", "<|tool_call_end|>",
    "<|python_start|>", "<|python_end|>", "<|python_tag|>", "<|START_ACTION|>", "<|END_ACTION|>",
    "<|tool_call|>", "<|/tool_call|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>",
    "<|call|>", "<|end|>", "<|return|>", "<think>", "</think>",
)  # fmt: skip
