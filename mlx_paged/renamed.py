"""Public names of the previous version, which work for one more version with a warning."""

from __future__ import annotations

import warnings
from typing import Any


class RenamedMethod:
    """A method under its old name, as an attribute of its class::

    hold_prompt_cache = RenamedMethod("pin_prompt_cache")
    """

    def __init__(self, new_name: str):
        self.new_name = new_name
        self._old_name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._old_name = f"{owner.__name__}.{name}"

    def __get__(self, instance: object, owner: type) -> Any:
        warnings.warn(
            f"{self._old_name} is called {self.new_name} now; the next version removes the old "
            "name",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(owner if instance is None else instance, self.new_name)
