"""Fixtures for pytest: ``from metal_emulator.fixtures import compiler`` in a ``conftest.py``."""

import pytest

from metal_emulator.compiler import has_compiler


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips the tests that ask for it where no compiler can be had."""
    if not has_compiler():
        pytest.skip("no C++ compiler that fits: neither clang 18 or later nor the ziglang package")
