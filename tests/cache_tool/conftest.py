"""The cache tool in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlx_paged.__main__ import main

RunTool = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cache(capsys: pytest.CaptureFixture[str]) -> RunTool:
    """Exit status, stdout and stderr of the tool with these arguments."""

    def run(*words: object) -> tuple[int, str, str]:
        status = main(["cache", *map(str, words)])
        return (status, *capsys.readouterr())

    return run
