"""Finds pointers and references without an address space: C++ takes them for ``thread`` ones, a Mac
refuses them.
"""

from __future__ import annotations

import re

from metal_emulator.threadgroup_variables import TOKENS, closing

ADDRESS_SPACES = {"device", "constant", "threadgroup", "thread"}
SCALARS = (
    "bool",
    "char",
    "uchar",
    "short",
    "ushort",
    "int",
    "uint",
    "long",
    "ulong",
    "half",
    "bfloat",
    "float",
)
TYPES = {
    *SCALARS,
    *(f"{scalar}{n}" for scalar in SCALARS for n in (2, 3, 4)),
    *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(
        "size_t",
        "bfloat16_t",
        "float16_t",
        "vec",
        "void",
        "atomic",
        "atomic_int",
        "atomic_uint",
        "atomic_float",
    ),
}
DECLARES_TYPE = re.compile(r"\b(?:typename|class|struct|using)\s+([A-Za-z_]\w*)")

MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(.*)$", re.MULTILINE)


def find_bare_pointers(source: str) -> list[int]:
    """The lines of them."""
    types = TYPES | set(DECLARES_TYPE.findall(source))
    # A macro may stand for an address space, in kernels that are to be read by other compilers,
    # too.
    macros = {
        name
        for name, text in MACRO.findall(source)
        if ADDRESS_SPACES & set(re.findall(r"\w+", text))
    }
    spaces = ADDRESS_SPACES | macros
    tokens = [
        match for match in TOKENS.finditer(source) if match.lastgroup not in {"comment", "string"}
    ]
    texts = [match.group() for match in tokens]
    lines = []
    for index, text in enumerate(texts):
        if text not in types or index + 1 >= len(texts):
            continue
        behind = index + 1
        if texts[behind] == "<":
            behind = closing(texts, behind) + 1
        while behind < len(texts) and texts[behind] == "const":
            behind += 1
        if behind >= len(texts) or texts[behind] not in "*&":
            continue
        # The qualifiers stand before the type: back to where its declaration starts.
        before = index
        while before > 0 and (
            texts[before - 1] in {"const", "volatile", "typename", "metal", "::", *spaces}
        ):
            before -= 1
        if not spaces & set(texts[before:index]):
            lines.append(source.count("\n", 0, tokens[index].start()) + 1)
    return lines
