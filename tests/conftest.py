"""The tests that run kernels on the Metal emulator ask for a compiler."""

from metal_emulator.fixtures import compiler

__all__ = ["compiler"]
