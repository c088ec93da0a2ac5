"""What Metal's compiler refuses and C++ takes, found in clang's syntax tree of a kernel.

Casts between address spaces, implicit conversions to bfloat, and variables of the program that are
not in the constant address space. (A ``double`` is found by its name.)
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from metal_emulator.threadgroup_variables import TOKENS

# A place in a dump, from the name of its file on, which is "line" in the file of the place before.
# The colons are searched for: a pattern that begins with the name takes five times as long.
PLACE = re.compile(r":(\d+):\d+(?=[>, ])")
FILE = re.compile(r"[^\s<>,:'\"]+$")
NODE = re.compile(r"^([ |`-]*)([A-Z]\w+) 0x")
FUNCTION = re.compile(r"(?:Function|CXXMethod|CXXConstructor|CXXConversion|CXXDestructor)Decl$")
TYPE = re.compile(r"'([^']*)'(?::'([^']*)')?")
CONSTANT = re.compile(r"\bconstant\b|address_space\(2\)")
# One of these is in the line of each node that breaks a rule: a dump has a megabyte, and few lines
# with them.
SUSPECTS = ("<AddressSpaceConversion>", "<FloatingCast>", "ComputeResultTy='float'", "-VarDecl 0x")


@dataclass(frozen=True)
class Violation:
    line: int
    rule: str


@dataclass
class _Node:
    depth: int
    kind: str
    text: str

    @classmethod
    def of(cls, text: str) -> _Node | None:
        found = NODE.match(text)
        return cls(len(found[1]), found[2], text) if found else None

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
    dump = dump[dump.rfind("\n", 0, start) + 1 :]
    places = list(_places(dump))
    suspects = {
        dump.rfind("\n", 0, match.start()) + 1
        for text in SUSPECTS
        for match in re.finditer(re.escape(text), dump)
    }
    for begin in sorted(suspects):
        end = dump.find("\n", begin)
        node = _Node.of(dump[begin:end])
        _, node_file, line = places[bisect.bisect_right(places, (end,)) - 1]
        rule = node and node_file == file and _broken_rule(node, _above(dump, begin, node.depth))
        if rule:
            yield Violation(line, rule)


def _places(dump: str) -> Iterator[tuple[int, str, int]]:
    """Where each place ends in the dump, its file and line."""
    file = ""
    for match in PLACE.finditer(dump):
        if dump[match.start() - 5 : match.start()] not in ("<line", " line"):
            found = FILE.search(dump, dump.rfind("\n", 0, match.start()) + 1, match.start())
            file = found[0] if found else file
        yield match.end(), file, int(match[1])


def _above(dump: str, begin: int, depth: int) -> Iterator[_Node]:
    """The nodes around the one of this depth whose line begins here, from the innermost on."""
    while begin:
        end = begin - 1
        begin = dump.rfind("\n", 0, end) + 1
        node = _Node.of(dump[begin:end])
        if node and node.depth < depth:
            depth = node.depth
            yield node


def _broken_rule(node: _Node, above: Iterator[_Node]) -> str | None:
    if "<AddressSpaceConversion>" in node.text:
        return "a pointer can't be cast from one address space to another"
    if "__bf16" in node.type() and _makes_a_bfloat(node, above):
        return "a float does not become a bfloat by itself; write bfloat(...)"
    if node.kind == "VarDecl" and not CONSTANT.search(node.text):
        # What a statement declares is in a function.
        is_local = any(
            parent.kind == "DeclStmt" or FUNCTION.search(parent.kind) for parent in above
        )
        if not is_local or re.search(r"' static\b", node.text):
            return "a variable of the program must be in the constant address space"
    return None


def _makes_a_bfloat(node: _Node, above: Iterator[_Node]) -> bool:
    if node.kind == "CompoundAssignOperator":
        return "ComputeResultTy='float'" in node.text
    if node.kind != "ImplicitCastExpr" or "<FloatingCast>" not in node.text:
        return False
    if "part_of_explicit_cast" in node.text:
        return False
    # A vector that is made of a float says so, as bfloat(...) does.
    parent = next(above, None)
    return parent is None or "ConstructExpr" not in parent.kind
