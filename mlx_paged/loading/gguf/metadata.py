"""A GGUF file's metadata, whose values are checked when they are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mlx_paged.errors import shown
from mlx_paged.loading.folder import LoadError
from mlx_paged.options.argument_values import is_plain_integer


class Metadata:
    """Values by key. A missing key yields the default, or :class:`LoadError` if there is none.

    Args:
        file: the file's path, for messages.
    """

    def __init__(self, file: Path, values: dict[str, Any]):
        self.file = file
        self.values = values

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def integer(self, key: str, default: int | None = None, *, low: int = 0) -> int:
        value = self._value(key, default)
        if not is_plain_integer(value, low):
            raise self._wrong(key, f"a whole number, at least {low}")
        return value

    def number(self, key: str, default: float | None = None, *, or_zero: bool = False) -> float:
        """A finite number above 0, or 0 where that has a meaning."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        if not 0 < value < math.inf and not (or_zero and value == 0):
            raise self._wrong(key, "a finite number " + ("at least 0" if or_zero else "above 0"))
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        return self._list(key, str, "texts")

    def integers(self, key: str, length: int) -> list[int]:
        return self._list(key, int, "whole numbers", length)

    def numbers(self, key: str, length: int) -> list[float]:
        return self._list(key, (int, float), "numbers", length)

    def _list(
        self,
        key: str,
        kind: type | tuple[type, ...],
        what: str,
        length: int | None = None,
    ) -> list[Any]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise self._wrong(key, f"a list of {what}")
        if length is not None and len(value) != length:
            raise LoadError(
                f"[load] {self.file}: {key} must have {length:,} entries, and has {len(value):,}"
            )
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise LoadError(f"[load] {self.file} lacks {key} in its metadata")
        return value

    def _wrong(self, key: str, what: str) -> LoadError:
        got = shown(self.values.get(key))
        return LoadError(f"[load] {self.file}: {key} must be {what}, got {got}")
