"""Values that rank 0 hands to the others, as JSON: no code travels, and no type that is not listed
here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from mlx_paged.distributed import RanksError
from mlx_paged.engine.prefix_report import PrefixReport
from mlx_paged.errors import (
    ArgumentError,
    CacheFullError,
    PromptTooLongError,
    RequestError,
    reason,
)
from mlx_paged.request import CompletionOutput, Logprob, RequestOutput
from mlx_paged.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

_DATA = (
    *(SamplingParams, StructuredOutputsParams),
    *(RequestOutput, CompletionOutput, Logprob, PrefixReport),
)
_ERRORS = (
    *(ArgumentError, PromptTooLongError, CacheFullError, RequestError, RanksError),
    *(TypeError, ValueError, LookupError, MemoryError, RuntimeError, KeyboardInterrupt),
)


def as_json(value: object) -> Any:
    """A value as JSON has it. What JSON lacks is an object with one member, whose name is the type.

    Errors keep their text, and the nearest type that is known here. Functions are called on rank 0
    alone; elsewhere they raise.

    Raises:
        TypeError: of another type than those.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [as_json(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [as_json(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[as_json(key), as_json(each)] for key, each in value.items()]}
    if isinstance(value, RequestOutputKind):
        return {"RequestOutputKind": value.value}
    if isinstance(value, BaseException):
        return {"error": [*_parts_of_error(value)]}
    for kind in _DATA:
        if isinstance(value, kind):
            names = [field.name for field in dataclasses.fields(kind)]
            return {kind.__name__: as_json({name: getattr(value, name) for name in names})}
    if callable(value):
        return {"function": None}
    raise TypeError(f"[ranks] {type(value).__name__} can't be shared between ranks")


def from_json(value: Any) -> Any:
    """What :func:`as_json` was given; raises an error if it did not make this value."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    return _MAKE[kind](from_json(inner))


def _parts_of_error(error: BaseException) -> tuple[str, str, str | None]:
    for kind in type(error).__mro__:
        if kind in _ERRORS:
            argument = getattr(error, "argument", None)
            return kind.__name__, str(error), argument if isinstance(argument, str) else None
    kind = RuntimeError if isinstance(error, Exception) else KeyboardInterrupt
    return kind.__name__, reason(error), None


def _error(parts: list[Any]) -> Any:
    name, text, argument = parts
    error: Any = next(kind for kind in _ERRORS if kind.__name__ == name)(text)
    if argument is not None:
        error.argument = argument
    return error


def _data(kind: Callable[..., Any], fields: dict[str, Any]) -> Any:
    return kind(**fields)


def _stand_in(*_: object) -> Any:
    raise RuntimeError("[ranks] functions of a request are called on rank 0")


_MAKE: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "RequestOutputKind": RequestOutputKind,
    "error": _error,
    "function": lambda _: _stand_in,
    **{kind.__name__: partial(_data, kind) for kind in _DATA},
}
