"""What several folders of tests share: a compiler for the Metal emulator, or the reason why there
is none.
"""

import pytest


@pytest.fixture(scope="session")
def compiler():
    """Tests that run kernels on the emulator ask for this."""
    from metal_emulator import has_compiler

    if not has_compiler():
        pytest.skip("no C++ compiler that fits: neither clang 18 or later nor the ziglang package")
