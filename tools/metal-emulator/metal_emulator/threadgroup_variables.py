"""Finds declarations of threadgroup variables in a kernel body and puts calls into their places.

C++ has no storage that the threads of one group share, so ``threadgroup float row[32];`` becomes a
reference to memory that the runtime hands out. Pointers to threadgroup memory are ordinary C++ and
stay. Lines keep their numbers.
"""

from __future__ import annotations

import re
from functools import cache

TOKENS = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/|^[ \t]*\#[^\n]*)"
    r'|(?P<string>"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\')'
    r"|(?P<word>[A-Za-z_]\w*|\d[\w.]*)"
    r"|(?P<mark>::|[^\s\w])",
    re.DOTALL | re.MULTILINE,
)


@cache
def share_threadgroup_variables(body: str) -> str:
    tokens = [match for match in TOKENS.finditer(body) if match.lastgroup != "comment"]
    texts = [match.group() for match in tokens]
    pieces, copied_to, count = [], 0, 0
    for index in range(len(tokens)):
        keyword = (
            closing(texts, index + 1) + 1 if texts[index : index + 2] == ["alignas", "("] else index
        )
        end = _declaration_end(texts, index, keyword)
        if end is None:
            continue
        start, stop = tokens[index].start(), tokens[end].end()
        declarations = _share(body, tokens, texts, keyword, end, count)
        pieces += [
            body[copied_to:start],
            " ".join(declarations),
            "\n" * body.count("\n", start, stop),
        ]
        copied_to, count = stop, count + len(declarations)
    return "".join(pieces) + body[copied_to:]


def _declaration_end(texts: list[str], start: int, keyword: int) -> int | None:
    """The index of the semicolon, if a statement that declares variables, not pointers, starts
    here.
    """
    if texts[keyword : keyword + 1] != ["threadgroup"] or (start and texts[start - 1] not in ";{}"):
        return None
    index = _after_type(texts, keyword + 1)
    # A type, then a name: `threadgroup float* row` has a star in between.
    if index >= len(texts) or not texts[index].isidentifier():
        return None
    while index < len(texts) and texts[index] not in ";={(":
        index = closing(texts, index) + 1 if texts[index] == "[" else index + 1
    return index if index < len(texts) and texts[index] == ";" else None


def _after_type(texts: list[str], index: int) -> int:
    """The index behind a type such as ``const metal::vec<T, 4>``, or where it stops to be one."""
    while index < len(texts) and texts[index] in {
        "const",
        "volatile",
        "typename",
        "unsigned",
        "signed",
    }:
        if texts[index] in {"unsigned", "signed"} and texts[index + 1] not in {
            "int",
            "char",
            "short",
            "long",
        }:
            return index + 1
        index += 1
    while index < len(texts) and texts[index].isidentifier():
        index += 1
        if index < len(texts) and texts[index] == "<":
            index = closing(texts, index) + 1
        if index >= len(texts) or texts[index] != "::":
            return index
        index += 1
    return index


def closing(texts: list[str], opening: int) -> int:
    left, right = texts[opening], {"(": ")", "[": "]", "<": ">"}[texts[opening]]
    depth = 0
    for index in range(opening, len(texts)):
        depth += (texts[index] == left) - (texts[index] == right)
        if depth == 0:
            return index
    return len(texts) - 1


def _share(
    body: str, tokens: list[re.Match[str]], texts: list[str], start: int, end: int, count: int
) -> list[str]:
    type_end = _after_type(texts, start + 1)
    element = body[tokens[start + 1].start() : tokens[type_end - 1].end()]
    declarations: list[str] = []
    index = type_end
    while index < end:
        name, dimensions_start = texts[index], index + 1
        index += 1
        while texts[index] == "[":
            index = closing(texts, index) + 1
        dimensions = "".join(
            texts[i] if texts[i] in "[]" else f" {texts[i]} "
            for i in range(dimensions_start, index)
        )
        number = count + len(declarations)
        declarations.append(
            f"auto& {name} = *emulator::threadgroup_variable<{element}{dimensions}>"
            f'({number}, "{name}");'
        )
        index += 1  # the comma
    return declarations
