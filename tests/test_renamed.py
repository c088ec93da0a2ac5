"""Old public names: they work for one version, and a warning names the new ones."""

from __future__ import annotations

import pytest

from mlx_paged import AsyncEngine, Engine
from mlx_paged.renamed import RenamedMethod


class Shelf:
    """A class with a method that was called ``hold`` before."""

    hold = RenamedMethod("pin")

    def pin(self, name: str) -> str:
        return f"pinned {name}"


def test_a_method_under_its_old_name_warns_and_is_the_new_one():
    with pytest.warns(DeprecationWarning) as caught:
        assert Shelf().hold("a") == "pinned a"
    (warning,) = caught
    assert str(warning.message) == (
        "Shelf.hold is called pin now; the next version removes the old name"
    )
    assert warning.filename == __file__, "the caller's line is named"


def test_the_renamed_methods_are_these_and_exist_under_their_new_names():
    renamed = {
        f"{owner.__name__}.{name}": value.new_name
        for owner in (Engine, AsyncEngine)
        for name, value in vars(owner).items()
        if isinstance(value, RenamedMethod)
    }
    assert renamed == {"Engine.hold_prompt_cache": "pin_prompt_cache"}
    assert callable(Engine.pin_prompt_cache)
