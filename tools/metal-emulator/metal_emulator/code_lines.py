"""Which line of the source an instruction comes from: the line table (DWARF 4) of an ELF library.

There is none in a library of macOS, whose compiler leaves it in another file.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Standard opcodes that matter here; the others are skipped with their operands.
COPY, ADVANCE_PC, ADVANCE_LINE, SET_FILE, CONST_ADD_PC, FIXED_ADVANCE_PC = 1, 2, 3, 4, 8, 9
END_SEQUENCE, SET_ADDRESS = 1, 2


@dataclass(frozen=True)
class Row:
    address: int
    file: str
    line: int  # 0: of no line, or behind the end of a function


class CodeLines:
    """The rows of a library's line table, read when they are first asked for."""

    def __init__(self, library: Path):
        self.library = library

    def line_of(self, address: int, file: str) -> int | None:
        """The line of ``file`` that the instruction at an address comes from.

        ``address`` is relative to where the library is loaded.
        """
        index = bisect.bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        row = self._rows[index]
        return row.line if row.line and row.file == file else None

    @cached_property
    def _rows(self) -> list[Row]:
        section = _section(self.library.read_bytes(), ".debug_line")
        return sorted(_all_rows(section), key=lambda row: row.address)

    @cached_property
    def _addresses(self) -> list[int]:
        return [row.address for row in self._rows]


def _section(elf: bytes, wanted: str) -> bytes:
    """A section of a 64-bit little-endian ELF file; empty where there is none."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return b""
    (headers,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQ", elf, headers + index * size) for index in range(count)
    ]
    names_at = sections[names_index][4]
    for name, _, _, _, offset, nbytes in sections:
        start = names_at + name
        if elf[start : elf.index(b"\0", start)].decode() == wanted:
            return elf[offset : offset + nbytes]
    return b""


class _Reader:
    def __init__(self, data: bytes):
        self.data = data
        self.at = 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return int(value)

    def leb(self, is_signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.number("B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        return value - (1 << shift) if is_signed and byte & 0x40 else value

    def text(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode(errors="replace")
        self.at = end + 1
        return text


def _all_rows(section: bytes) -> Iterator[Row]:
    reader = _Reader(section)
    while reader.at < len(section):
        nbytes = reader.number("I")
        unit = _Reader(section[reader.at : reader.at + nbytes])
        reader.at += nbytes
        if unit.number("H") == 4:
            yield from _LineProgram(unit).rows()


class _LineProgram:
    """The program of one unit, which is a row's registers and what changes them."""

    def __init__(self, unit: _Reader):
        self.unit = unit
        program = unit.number("I") + unit.at
        self.min_instruction = unit.number("B")
        unit.at += 2  # operations per instruction, whether rows are statements
        self.line_base, self.line_range = unit.number("b"), unit.number("B")
        self.opcode_base = unit.number("B")
        self.operand_counts = [unit.number("B") for _ in range(self.opcode_base - 1)]
        while unit.text():
            pass  # folders
        self.files = [""]
        while name := unit.text():
            self.files.append(name)
            for _ in range(3):
                unit.leb()
        unit.at = program
        self.address, self.file, self.line = 0, 1, 1

    def rows(self) -> Iterator[Row]:
        while self.unit.at < len(self.unit.data):
            opcode = self.unit.number("B")
            if opcode >= self.opcode_base:
                self._special(opcode)
                yield self._row()
            elif opcode == 0:
                yield from self._extended()
            elif opcode == COPY:
                yield self._row()
            else:
                self._standard(opcode)

    def _row(self) -> Row:
        return Row(self.address, self.files[self.file], self.line)

    def _special(self, opcode: int) -> None:
        self._advance(opcode)
        self.line += self.line_base + (opcode - self.opcode_base) % self.line_range

    def _advance(self, opcode: int) -> None:
        self.address += (opcode - self.opcode_base) // self.line_range * self.min_instruction

    def _extended(self) -> Iterator[Row]:
        nbytes = self.unit.leb()
        start = self.unit.at
        opcode = self.unit.number("B")
        if opcode == END_SEQUENCE:
            yield Row(self.address, "", 0)
            self.address, self.file, self.line = 0, 1, 1
        elif opcode == SET_ADDRESS:
            self.address = self.unit.number("Q")
        self.unit.at = start + nbytes

    def _standard(self, opcode: int) -> None:
        if opcode == ADVANCE_PC:
            self.address += self.unit.leb() * self.min_instruction
        elif opcode == ADVANCE_LINE:
            self.line += self.unit.leb(is_signed=True)
        elif opcode == SET_FILE:
            self.file = self.unit.leb()
        elif opcode == CONST_ADD_PC:
            self._advance(255)
        elif opcode == FIXED_ADVANCE_PC:
            self.address += self.unit.number("H")
        else:
            for _ in range(self.operand_counts[opcode - 1]):
                self.unit.leb()
