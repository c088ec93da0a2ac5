"""What it costs to tell reasoning, text and calls of tools apart, per token of an answer.

    python -m benchmarks answers                                   # some seconds
    python -m benchmarks answers --formats json_tools glm47

For each format of calls, three answers are read token by token, as a stream comes: plain text of
4,000 words, the same as reasoning with a short text after it, and one call that writes a file of
some ten thousand characters. Reported is the best of ``--turns`` readings, in microseconds per
token. The reader that this one replaced read the same answers in turns with this one, in the
formats that it had; its figures are kept beside these.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.lib.card import (
    machine_card,
    make_arg_parser,
    print_card,
    print_json,
    print_table,
)
from mlx_paged.answers.dialect import AnswerFormat, Dialect, marks_of
from mlx_paged.answers.formats import REASONING, format_named
from mlx_paged.answers.reader import AnswerReader

KINDS = ("text", "reasoning", "call")
# Of the reader before, at commit 336d99a3, with the parsers of mlx-lm 0.32.2: the best of 84
# readings, in three turns with this reader, on two cores of an Intel Xeon.
REPLACED = {
    "json_tools": (1.50, 1.45, 1.86),
    "qwen3_coder": (1.49, 1.42, 2.56),
    "glm47": (1.58, 1.45, 2.61),
    "mistral": (1.48, 1.41, 1.04),
    "gemma4": (1.47, 1.42, 2.77),
    "pythonic": (1.52, 1.47, 2.50),
}
WORDS = ("The quick brown fox jumps over the lazy dog and " * 400).split()
CODE = "def f(x):\n    return {'a': [x, 1]}  # it's {x}\n" * 200
TOOL = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        },
    },
}
ARGUMENTS = json.dumps({"path": "a.py", "content": CODE})
CALLS = {
    "json_tools": f'<tool_call>\n{{"name": "write", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n"
    f"<parameter=content>\n{CODE}\n</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>write<arg_key>path</arg_key><arg_value>a.py</arg_value>"
    f"<arg_key>content</arg_key><arg_value>{CODE}</arg_value></tool_call>",
    "mistral": f"[TOOL_CALLS]write[ARGS]{ARGUMENTS}",
    "gemma4": f'<|tool_call>call:write{{content:<|"|>{CODE}<|"|>,path:<|"|>a.py<|"|>}}<tool_call|>',
    "pythonic": f"<|tool_call_start|>[write(path='a.py', content={json.dumps(CODE)})]"
    "<|tool_call_end|>",
    "harmony": "<|channel|>commentary to=functions.write <|constrain|>json<|message|>" + ARGUMENTS,
}


def in_tokens(text: str, marks: Sequence[str]) -> list[str]:
    """A text in pieces of up to four characters. Marks are tokens."""
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    return [
        piece
        for part in parts
        for piece in ([part] if part in marks else re.findall("(?s).{1,4}", part))
    ]


def kinds_of(answer_format: AnswerFormat, pieces: Sequence[str]) -> set[str]:
    """What the reader finds in an answer."""
    reader = AnswerReader(answer_format)
    events = [event for piece in pieces for event in reader.add(answer_format.marks.encode(piece))]
    return {event.kind for event in events + reader.finish()}


def microseconds(answer_format: AnswerFormat, pieces: Sequence[str], turns: int) -> float:
    """Per piece."""
    pieces = [answer_format.marks.encode(piece) for piece in pieces]
    best = float("inf")
    for _ in range(turns):
        reader, begin = AnswerReader(answer_format), time.perf_counter()
        for piece in pieces:
            reader.add(piece)
        reader.finish()
        best = min(best, time.perf_counter() - begin)
    return round(best / len(pieces) * 1e6, 2)


def measure(name: str, turns: int) -> dict[str, Any]:
    calls = format_named(name)
    start = "<|channel|>analysis<|message|>" if name == "harmony" else "<think>"
    reasoning = next(each for each in REASONING if each.start == start)
    parts = [*marks_of(calls), *reasoning.all_marks]
    names = sorted(
        {token for token in TOKENS if any(token in part for part in parts)}, key=len, reverse=True
    )
    dialect = Dialect.of_tokens(
        calls, reasoning, {token: (index, True) for index, token in enumerate(names)}
    )
    answer_format = AnswerFormat.for_prompt(dialect, "", [TOOL])
    said = [f" {word}" for word in WORDS]
    opened = in_tokens("<|channel|>final<|message|>", names) if name == "harmony" else []
    closed = "<|end|><|start|>assistant<|channel|>final<|message|>"
    thought = [
        *in_tokens(reasoning.start, names),
        *said,
        *in_tokens(closed if name == "harmony" else reasoning.end, names),
        *said[:100],
    ]
    answers = {
        "text": [*opened, *said],
        "reasoning": thought,
        "call": in_tokens(CALLS[name], names),
    }
    expected = {"text": {"text"}, "reasoning": {"reasoning", "text"}, "call": {"call"}}
    found = {kind: kinds_of(answer_format, pieces) for kind, pieces in answers.items()}
    assert found == expected, (name, found)
    return {
        "format": name,
        **{kind: microseconds(answer_format, pieces, turns) for kind, pieces in answers.items()},
    }


TOKENS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>", '<|"|>',
    "<|tool_call_start|>", "<|tool_call_end|>", "<|start|>", "<|end|>", "<|message|>",
    "<|channel|>", "<|constrain|>", "<|call|>",
)  # fmt: skip


def beside(result: dict[str, Any], kind: str) -> str:
    """A figure, with that of the reader before, if there is one."""
    before = result.get("replaced")
    return f"{result[kind]:.2f}" + (f" ({before[kind]:.2f})" if before else "")


def main() -> None:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--formats", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    setting = {**machine_card(), "turns": args.turns}
    print_card("Reading answers, microseconds per token", setting)
    results = [measure(name, args.turns) for name in args.formats]
    for result in results:
        if result["format"] in REPLACED:
            result["replaced"] = dict(zip(KINDS, REPLACED[result["format"]], strict=True))
    rows = [[each["format"], *(beside(each, kind) for kind in KINDS)] for each in results]
    print_table(["format", *(f"{kind} (replaced)" for kind in KINDS)], rows)
    print_json("answers", setting, results, args.out)


if __name__ == "__main__":
    main()
