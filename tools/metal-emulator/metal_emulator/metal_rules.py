"""What Metal's compiler refuses and C++ takes, found in clang's syntax tree of a kernel.

Casts between address spaces, implicit conversions to bfloat, and variables of the program that are
not in the constant address space. (A ``double`` is found by its name.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from metal_emulator.threadgroup_variables import TOKENS

# A place in a dump: file and line are left out where they are those of the place before.
PLACE = re.compile(r"(?<=[<, ])(?:(line|[^\s<>,:'\"]+):(\d+):\d+|col:\d+)(?=[>, ])")
NODE = re.compile(r"^([ |`-]*)([A-Z]\w+) 0x")
FUNCTION = re.compile(r"(?:Function|CXXMethod|CXXConstructor|CXXConversion|CXXDestructor)Decl$")
TYPE = re.compile(r"'([^']*)'(?::'([^']*)')?")
CONSTANT = re.compile(r"\bconstant\b|address_space\(2\)")


@dataclass(frozen=True)
class Violation:
    line: int
    rule: str


@dataclass
class _Node:
    depth: int
    kind: str
    text: str

    def type(self) -> str:
        """As the compiler knows it, behind all names for it."""
        found = TYPE.search(self.text)
        return (found[2] or found[1]) if found else ""


def find_doubles(source: str) -> Iterator[Violation]:
    for match in TOKENS.finditer(source):
        if match.lastgroup == "word" and match.group() == "double":
            yield Violation(source.count("\n", 0, match.start()) + 1, "Metal has no double")


def find_violations(dump: str, file: str) -> Iterator[Violation]:
    """Those in the lines of ``file``, from the text of ``clang -Xclang -ast-dump``."""
    # Only what follows the first place in the file matters.
    start = dump.find(f"{file}:")
    if start < 0:
        return
    current_file, line = "", 0
    above: list[_Node] = []
    for text in dump[dump.rfind("\n", 0, start) + 1 :].splitlines():
        node_start = NODE.match(text)
        if not node_start:
            continue
        for place in PLACE.finditer(text):
            if place[1] and place[1] != "line":
                current_file = place[1]
            if place[2]:
                line = int(place[2])
        node = _Node(len(node_start[1]), node_start[2], text)
        while above and above[-1].depth >= node.depth:
            above.pop()
        if current_file == file:
            rule = _broken_rule(node, above)
            if rule:
                yield Violation(line, rule)
        above.append(node)


def _broken_rule(node: _Node, above: list[_Node]) -> str | None:
    if "<AddressSpaceConversion>" in node.text:
        return "a pointer can't be cast from one address space to another"
    if "__bf16" in node.type() and _makes_a_bfloat(node, above):
        return "a float does not become a bfloat by itself; write bfloat(...)"
    if node.kind == "VarDecl" and not CONSTANT.search(node.text):
        is_static = re.search(r"' static\b", node.text)
        if is_static or not any(FUNCTION.search(parent.kind) for parent in above):
            return "a variable of the program must be in the constant address space"
    return None


def _makes_a_bfloat(node: _Node, above: list[_Node]) -> bool:
    if node.kind == "CompoundAssignOperator":
        return "ComputeResultTy='float'" in node.text
    if node.kind != "ImplicitCastExpr" or "<FloatingCast>" not in node.text:
        return False
    # A vector that is made of a float says so, as bfloat(...) does.
    is_constructed = bool(above) and "ConstructExpr" in above[-1].kind
    return "part_of_explicit_cast" not in node.text and not is_constructed
