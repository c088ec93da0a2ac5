"""Values that rank 0 sends to the others, as JSON: no code, and only the types listed here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from mlx_paged.distributed.links import RanksError
from mlx_paged.errors import ArgumentError, CacheFullError, PromptTooLongError, RequestError, reason
from mlx_paged.options.sampling_params import (
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from mlx_paged.request import (
    CompletionOutput,
    Logprob,
    PrefixReport,
    RequestOutput,
    SpecDecodingStats,
)

_DATA = (
    *(SamplingParams, StructuredOutputsParams, PoolingParams),
    *(RequestOutput, CompletionOutput, Logprob, PrefixReport, SpecDecodingStats),
)
_ARGUMENT_ERRORS = (PromptTooLongError, CacheFullError, ArgumentError)
_ERRORS = (
    *(RequestError, RanksError),
    *(TypeError, ValueError, LookupError, MemoryError, RuntimeError, KeyboardInterrupt),
)


def as_json(value: object) -> Any:
    """A value in the types of JSON. Any other type becomes an object with one member: the name of
    the type, and the arguments of its constructor.

    Errors keep their text and the nearest listed type. Functions can be called on rank 0 only;
    elsewhere they raise.

    Raises:
        TypeError: the type is not listed.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [as_json(each) for each in value]
    for kind, arguments_of, _ in _TYPES:
        if isinstance(value, kind):
            return {kind.__name__: [as_json(each) for each in arguments_of(value)]}
    raise TypeError(f"[ranks] {type(value).__name__} can't be shared between ranks")


def from_json(value: Any) -> Any:
    """The inverse of :func:`as_json`; raises an error for any value that this can't return."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((name, arguments),) = value.items()
    (make,) = (make for kind, _, make in _TYPES if kind.__name__ == name)
    return make(*from_json(arguments))


def _stand_in(*_: object) -> Any:
    raise RuntimeError("[ranks] functions of a request are called on rank 0")


# Each type, the arguments that describe a value of it, and the constructor that takes them. The
# first entry that a value is an instance of counts.
_TYPES: list[tuple[Any, Callable[[Any], Iterable[object]], Callable[..., Any]]] = [
    *((kind, attrgetter(*(field.name for field in fields(kind))), kind) for kind in _DATA),
    (tuple, iter, lambda *entries: entries),
    (dict, lambda value: map(list, value.items()), lambda *items: dict(items)),
    (RequestOutputKind, lambda kind: [kind.value], RequestOutputKind),
    *((kind, lambda error: [str(error), error.argument], kind) for kind in _ARGUMENT_ERRORS),
    *((kind, lambda error: [str(error)], kind) for kind in _ERRORS),
    (Exception, lambda error: [reason(error)], RuntimeError),
    (BaseException, lambda error: [reason(error)], KeyboardInterrupt),
    (Callable, lambda _: [], lambda: _stand_in),
]
