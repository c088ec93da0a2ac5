"""The tests that compile a kernel ask for a compiler."""

from metal_emulator.fixtures import compiler

__all__ = ["compiler"]
