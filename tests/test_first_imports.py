"""What a program imports first is not looked through for unused memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BEGIN = """
import gc, sys
from types import ModuleType
from mlx_paged.cli.program import import_first
"""


def run(probe: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + probe],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},  # transformers makes lists of sets
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_are_imported_and_frozen_and_collections_go_on():
    lines = run(
        "import_first('plistlib', 'mailbox')\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 1000)\n"
        "print({'plistlib', 'mailbox'} <= set(sys.modules))"
    )
    assert lines == "True True\nTrue\n"


def test_a_module_that_fails_leaves_collections_on():
    lines = run(
        "try: import_first('plistlib', 'no.such.module')\n"
        "except ModuleNotFoundError as error: print(error.name, gc.isenabled())\n"
    )
    assert lines == "no True\n"


@pytest.mark.parametrize("is_enabled", [True, False])
def test_nothing_is_frozen_in_a_process_that_has_mlx(is_enabled: bool):
    lines = run(
        "sys.modules['mlx.core'] = ModuleType('mlx.core')\n"
        f"{'gc.enable' if is_enabled else 'gc.disable'}()\n"
        "import_first('plistlib')\n"
        "print(gc.isenabled(), gc.get_freeze_count())"
    )
    assert lines == f"{is_enabled} 0\n"


@pytest.mark.slow
def test_chat_and_server_import_what_they_load_models_with_first():
    for program in ("cli.chat", "server"):
        lines = run(
            f"from mlx_paged.{program} import program\n"
            "def stop(*names):\n"
            "    import_first(*names)\n"
            "    print(gc.get_freeze_count() > 100_000, 'mlx_lm' in sys.modules)\n"
            "    raise ValueError\n"
            "program.import_first = stop\n"
            f"assert program.main({['hello'] if program == 'cli.chat' else ['--port', '0']}) == 2\n"
        )
        assert lines == "True True\n"


@pytest.mark.slow
def test_transformers_searches_its_files_once_and_knows_the_same_of_them():
    """``lru_cache`` counts the folders that were searched."""
    tell = (
        "import mlx_lm, transformers, transformers.models as models\n"
        "for lazy in (transformers, models):\n"
        "    for name, found in sorted(lazy._import_structure.items()):\n"
        "        print(name, sorted(found))\n"
        "    print(sorted(lazy._class_to_module.items()), dir(lazy))\n"
        "from transformers.utils import import_utils\n"
        "print(import_utils.create_import_structure_from_path.cache_info().misses)\n"
    )
    begin = "from mlx_paged.cli.program import import_transformers\n"
    once = run(begin + "import_transformers()\n" + tell).splitlines()
    twice = run(tell).splitlines()
    assert once[:-1] == twice[:-1]
    assert int(twice[-1]) - int(once[-1]) > 500
